"""A small synthetic MiniImageNet in each of the published layouts."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CLASSES = {"train": 3, "validation": 2, "test": 2}
EXAMPLES = 4
SHORT = {"train": "train", "validation": "val", "test": "test"}
PHASES = {
    "train": "miniImageNet_category_split_train_phase_train.pickle",
    "validation": "miniImageNet_category_split_val.pickle",
    "test": "miniImageNet_category_split_test.pickle",
}


def labels(part: str) -> list[str]:
    """Class names, other ones in each part."""
    first = {"train": 10, "validation": 20, "test": 30}[part]
    return [f"n{first + index:08d}" for index in range(CLASSES[part])]


def pixels(label: str, example: int) -> np.ndarray:
    """An image, (84, 84, 3), that nothing but its name tells."""
    generator = np.random.default_rng([int(label[1:]), example])
    return generator.integers(0, 256, (84, 84, 3), dtype=np.uint8)


def everything() -> dict[str, np.ndarray]:
    """All images by `part/label`, (examples, 3, 84, 84)."""
    return {
        f"{part}/{label}": np.stack([pixels(label, e).transpose(2, 0, 1) for e in range(EXAMPLES)])
        for part in CLASSES
        for label in labels(part)
    }


def write_image(path: Path, image: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)


def write_folders(root: Path) -> Path:
    for part, short in SHORT.items():
        for label in labels(part):
            for example in range(EXAMPLES):
                path = root / short / label / f"{label}{example:08d}.png"
                write_image(path, pixels(label, example))
    return root


def write_lists(root: Path, nested: bool = False) -> Path:
    for part, short in SHORT.items():
        lines = ["filename,label"]
        for example in reversed(range(EXAMPLES)):
            for label in reversed(labels(part)):
                name = f"{label}{example:08d}.png"
                folder = root / "images" / (label if nested else "")
                write_image(folder / name, pixels(label, example))
                lines.append(f"{name},{label}")
        (root / f"{short}.csv").write_text("\n".join(lines) + "\n")
    return root


def cache(part: str) -> dict[str, Any]:
    """As handed round with Ren et al. 2018; the classes' images lie scattered."""
    order = [(e, label) for e in range(EXAMPLES) for label in reversed(labels(part))]
    return {
        "image_data": np.stack([pixels(label, e) for e, label in order]),
        "class_dict": {
            label: [position for position, (_, name) in enumerate(order) if name == label]
            for label in labels(part)
        },
    }


def phases(part: str) -> dict[str, Any]:
    """As handed round with Gidaris and Komodakis 2018."""
    order = [(e, label) for e in range(EXAMPLES) for label in labels(part)]
    return {
        "data": np.stack([pixels(label, e) for e, label in order]),
        "labels": [int(label[1:]) for _, label in order],
        "catname2label": {label: int(label[1:]) for label in labels(part)},
    }


def write_caches(root: Path, protocol: int = 4) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for part, short in SHORT.items():
        data = pickle.dumps(cache(part), protocol)
        (root / f"mini-imagenet-cache-{short}.pkl").write_bytes(data)
    return root


def write_caches_of_learn2learn(root: Path) -> Path:
    write_caches(root)
    file = root / "mini-imagenet-cache-val.pkl"
    file.rename(file.with_name("mini-imagenet-cache-validation.pkl"))
    return root


def write_phases(root: Path, protocol: int = 2) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for part, name in PHASES.items():
        (root / name).write_bytes(pickle.dumps(phases(part), protocol))
    return root
