"""MiniImageNet at full size: time to open and memory use.

python experiments/benchmarks/loading.py

Writes 60,000 random images of 84 by 84 pixels in class folders into a temporary directory (2 GB,
removed at the end), opens them for the first time (decoding into the cache), then two processes
open the cache and sample tasks. The anonymous memory of a process must not grow with the number of
tasks; the pages of the cache are shared.
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
from metadist.tasks.mini_imagenet import EXAMPLES, PUBLISHED
from metadist.tasks.mini_imagenet_files import SIDE

_FOLDERS = {"train": "train", "validation": "val", "test": "test"}
_CHECKPOINTS = (10, 100, 500)
"""The numbers of tasks after which memory is measured."""


def write_images(root: Path) -> None:
    """Write MiniImageNet's files as random JPEG images, one folder per class."""
    generator = np.random.default_rng(0)
    for part, names in PUBLISHED.items():
        for name in names:
            folder = root / _FOLDERS[part] / name
            folder.mkdir(parents=True)
            noise = generator.integers(256, size=(EXAMPLES, SIDE, SIDE, 3), dtype=np.uint8)
            for number, pixels in enumerate(noise):
                Image.fromarray(pixels).save(folder / f"{name}{number:08}.jpg", quality=90)


def open_dataset(root: str) -> tuple[float, MiniImageNet]:
    """Seconds to open the dataset, and the dataset."""
    started = time.perf_counter()
    dataset = MiniImageNet(root)
    return time.perf_counter() - started, dataset


def memory() -> dict[str, float]:
    """The memory of this process in MB: anonymous, and mapped (shareable)."""
    megabytes = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, _, size = line.partition(":")
        megabytes[name] = int(size.split()[0]) / 1024
    return {
        "anonymous": megabytes["Anonymous"],
        "mapped": megabytes["Rss"] - megabytes["Anonymous"],
    }


def first_open(root: str) -> tuple[float, float]:
    """Seconds of the first opening, and its peak memory in MB."""
    import resource

    seconds, _ = open_dataset(root)
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def sample_tasks(root: str, worker: int) -> list[str]:
    """Open the cache and sample 5-way 1-shot tasks with 15 queries; returns lines to print."""
    seconds, dataset = open_dataset(root)
    tasks = FewShotTasks(dataset, ways=5, shots=1, queries=15)
    lines = [f"worker {worker}: opened in {seconds:.2f} s"]
    started = time.perf_counter()
    for number, key in enumerate(task_keys(worker, "train", 1, range(max(_CHECKPOINTS))), start=1):
        tasks.sample(key)
        if number in _CHECKPOINTS:
            usage = ", ".join(f"{size:.0f} MB {kind}" for kind, size in memory().items())
            lines.append(f"worker {worker}: after {number} tasks {usage}")
    milliseconds = 1000 * (time.perf_counter() - started) / max(_CHECKPOINTS)
    return [*lines, f"worker {worker}: {milliseconds:.2f} ms per task"]


def main() -> None:
    """Run the benchmark and remove the files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--directory", type=Path, help="for the images; default: temporary files")
    parent = parser.parse_args().directory
    root = Path(tempfile.mkdtemp(prefix="mini_imagenet_", dir=parent))
    context = multiprocessing.get_context("spawn")
    try:
        started = time.perf_counter()
        write_images(root)
        print(f"60,000 images written in {time.perf_counter() - started:.0f} s", flush=True)
        with ProcessPoolExecutor(1, context) as pool:
            seconds, peak = pool.submit(first_open, str(root)).result()
        print(f"first opening (decoding) {seconds:.1f} s, {peak:.0f} MB peak", flush=True)
        with ProcessPoolExecutor(2, context) as pool:
            for future in [pool.submit(sample_tasks, str(root), worker) for worker in range(2)]:
                print("\n".join(future.result()), flush=True)
        size = sum(file.stat().st_size for file in root.glob("mini_imagenet_*"))
        print(f"the cache has {size / 1e9:.2f} GB")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
