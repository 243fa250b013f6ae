"""MiniImageNet at full size: how long it takes to open, and what it holds in memory.

python experiments/benchmarks/loading.py

Writes 60,000 images of noise, 84 by 84, in the layout of class folders into a temporary directory
(some 2 GB, removed at the end), opens them for the first time (decoded into the cache) and again,
then has two processes sample tasks from the one cache. What a process holds for itself (anonymous
memory) must not grow with the tasks; the pages of the cache are shared.
"""

import argparse
import multiprocessing
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from metadist.tasks import FewShotTasks, MiniImageNet, task_keys
from metadist.tasks.mini_imagenet import PUBLISHED
from metadist.tasks.mini_imagenet_files import EXAMPLES, SIDE

_FOLDERS = {"train": "train", "validation": "val", "test": "test"}
_LOOKS = (10, 100, 500)
"""After how many tasks memory is looked at."""


def write_images(root: Path) -> None:
    """All images of MiniImageNet as JPEG files of noise, a folder a class."""
    generator = np.random.default_rng(0)
    for part, names in PUBLISHED.items():
        for name in names:
            folder = root / _FOLDERS[part] / name
            folder.mkdir(parents=True)
            noise = generator.integers(256, size=(EXAMPLES, SIDE, SIDE, 3), dtype=np.uint8)
            for number, pixels in enumerate(noise):
                Image.fromarray(pixels).save(folder / f"{name}{number:08}.jpg", quality=90)


def opened(root: str) -> tuple[float, MiniImageNet]:
    """Seconds that opening takes, and the dataset."""
    started = time.perf_counter()
    dataset = MiniImageNet(root)
    return time.perf_counter() - started, dataset


def memory() -> dict[str, float]:
    """MB of this process: its own (anonymous), and mapped pages that others may share."""
    found = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, _, size = line.partition(":")
        found[name] = int(size.split()[0]) / 1024
    return {"own": found["Anonymous"], "mapped": found["Rss"] - found["Anonymous"]}


def first_time(root: str) -> tuple[float, float]:
    """Seconds of the first opening, and the most memory that it took, in MB."""
    import resource

    seconds, _ = opened(root)
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def sample(root: str, worker: int) -> list[str]:
    """Open the prepared images and sample 5-way 1-shot tasks of 15 queries; lines to print."""
    seconds, dataset = opened(root)
    tasks = FewShotTasks(dataset, ways=5, shots=1, queries=15)
    lines = [f"worker {worker}: opened in {seconds:.2f} s"]
    started = time.perf_counter()
    for number, key in enumerate(task_keys(worker, "train", 1, range(max(_LOOKS))), start=1):
        tasks.sample(key)
        if number in _LOOKS:
            m = memory()
            held = f"{m['own']:.0f} MB of its own, {m['mapped']:.0f} MB mapped"
            lines.append(f"worker {worker}: after {number} tasks {held}")
    each = 1000 * (time.perf_counter() - started) / max(_LOOKS)
    return [*lines, f"worker {worker}: {each:.2f} ms a task"]


def main() -> None:
    """Write, open, sample; remove everything."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--directory", type=Path, help="for the images; default: temporary files")
    parent = parser.parse_args().directory
    root = Path(tempfile.mkdtemp(prefix="mini_imagenet_", dir=parent))
    context = multiprocessing.get_context("spawn")  # processes that share nothing else
    try:
        started = time.perf_counter()
        write_images(root)
        print(f"60,000 images written in {time.perf_counter() - started:.0f} s", flush=True)
        with ProcessPoolExecutor(1, context) as pool:
            seconds, peak = pool.submit(first_time, str(root)).result()
        print(f"first opening (decoding) {seconds:.1f} s, {peak:.0f} MB at most", flush=True)
        with ProcessPoolExecutor(2, context) as pool:
            for future in [pool.submit(sample, str(root), worker) for worker in range(2)]:
                print("\n".join(future.result()), flush=True)
        size = sum(file.stat().st_size for file in root.glob("mini_imagenet_*"))
        print(f"the cache has {size / 1e9:.2f} GB")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
