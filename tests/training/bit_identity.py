"""Short trainings whose bits are compared: of many algorithms and models, in worlds of any size.

    python tests/training/bit_identity.py CASES SEED

prints "identical" if all strategies, numbers of workers and chunk sizes agree on a random sample of
CASES cases. It is a command so that a test can run it with other processor features, which are
chosen by environment variables before PyTorch is loaded.
"""

import hashlib
import json
import random
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from omegaconf import DictConfig
from tiny import SMALL, compose
from worlds import run_world

from metadist.config import build_experiment
from metadist.loggers import LoggerCollection
from metadist.training import Experiment, Trainer
from metadist.training.saved_state import state_tensors

ALGORITHMS = {
    "maml": ["algorithm.inner_steps=2"],
    "fomaml": [],
    "pretrained": [],
    "anil": [],
    "meta_sgd": ["algorithm.inner_steps=2"],
    "maml_plus_plus": ["algorithm.inner_steps=2", "model.running_statistics=true"],
    "reptile": ["algorithm.eval_inner_steps=3", "task.train_shots=3"],
    "imaml": ["algorithm.inner_steps=3"],
    "prototypical": ["task.train_ways=5"],
}
MODELS = {
    "stride": ["model.filters=16"],
    "stride of 5 filters": ["model.filters=5"],
    "max": ["model.filters=16", "model.pooling=max"],
    "mlp": ["model=mlp", "model.hidden=[24,16]"],
    "sinusoid": [
        *("dataset=sinusoid", "model=mlp", "model.hidden=[40,40]", "model.batch_norm=false"),
        *("task.shots=5", "algorithm.inner_lr=0.01"),
    ],
}
STEPS = 3


class Case(NamedTuple):
    """An algorithm, a model, with or without native kernels, and a number of tasks."""

    algorithm: str
    model: str
    native: bool
    tasks: int

    def compose(self, strategy: str) -> DictConfig:
        """The case's configuration, without overrides of `tiny.SMALL` that do not fit the model."""
        omit = ("++dataset.", "model.", "task.") if self.model == "sinusoid" else ("model.",)
        return compose(
            *(override for override in SMALL if not override.startswith(omit)),
            f"strategy={strategy}",
            f"algorithm={self.algorithm}",
            *MODELS[self.model],
            *ALGORITHMS[self.algorithm],
            f"model.native={str(self.native).lower()}",
            f"trainer.meta_batch_size={self.tasks}",
        )


def all_cases() -> list[Case]:
    """Every combination that exists, for 1 to 12 tasks."""
    cases = []
    for algorithm in ALGORITHMS:
        for model in MODELS:
            if model == "sinusoid" and algorithm not in ("maml", "fomaml", "meta_sgd", "anil"):
                continue
            for native in (True, False):
                cases += [Case(algorithm, model, native, tasks) for tasks in range(1, 13)]
    return cases


def digests(
    directory: str,
    configurations: Iterable[DictConfig],
    chunk_sizes: Iterable[int | str],
) -> list[str] | None:
    """Train each case for a few steps; on drivers, a digest of losses, norms and final state."""
    torch.set_num_threads(1)
    trained = []
    for configuration in configurations:
        for chunk_size in chunk_sizes:
            configuration.trainer.task_chunk_size = chunk_size
            x = build_experiment(configuration, f"{directory}/{len(trained)}", "maml")
            x.logger = LoggerCollection([])
            trained.append(x)
    # One world for all cases, opened when every rank has built all: a worker is called at any time.
    world = trained[0].strategy
    world.open()
    found = [digest(x) for x in trained] if world.is_driver else None
    world.close()
    return found


def digest(x: Experiment) -> str:
    """Train for a few steps; a digest of losses, norms and the final state."""
    trainer = Trainer(x)
    found = hashlib.sha256()
    for iteration in range(1, STEPS + 1):
        output = trainer.train_step(iteration)
        found.update(repr((output.loss, output.gradient_norm)).encode())
    for tensor in state_tensors(x):
        found.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()[:16]


def compare(
    cases: list[Case],
    worlds: Iterable[tuple[str, int]],
    timeout: float,
    chunk_sizes: tuple[int | str, ...] = (1, 2, 3, 7, "auto"),
) -> list[str]:
    """The cases whose bits differ, each as one line; [] if all agree.

    Args:
        cases: what to train.
        worlds: strategies and numbers of workers.
        timeout: seconds for each world.
        chunk_sizes: of `local`; the worlds have "auto".
    """
    with tempfile.TemporaryDirectory() as directory:
        configurations = [case.compose("local") for case in cases]
        arguments = (f"{directory}/local", configurations, chunk_sizes)
        (local,) = run_world(digests, 1, *arguments, timeout=timeout)
        found = {
            f"local, chunks of {c}": local[i :: len(chunk_sizes)] for i, c in enumerate(chunk_sizes)
        }
        for strategy, size in worlds:
            configurations = [case.compose(strategy) for case in cases]
            arguments = (f"{directory}/{strategy}-{size}", configurations, ("auto",))
            outcomes = run_world(digests, size, *arguments, timeout=timeout)
            for rank, each in enumerate(outcomes):
                if each is not None:
                    found[f"{strategy} on {size}, rank {rank}"] = each
    different = []
    for number, case in enumerate(cases):
        by_digest: dict[str, list[str]] = {}
        for world, each in found.items():
            by_digest.setdefault(each[number], []).append(world)
        if len(by_digest) > 1:
            different.append(f"{case}: {list(by_digest.values())}")
    return different


def main() -> int:
    number, seed = int(sys.argv[1]), int(sys.argv[2])
    cases = random.Random(seed).sample(all_cases(), number)
    worlds = [("rpc", n) for n in (1, 2, 3, 4)] + [("allreduce", n) for n in (1, 2, 3, 4)]
    different = compare(cases, worlds, timeout=1800.0)
    print("identical" if not different else json.dumps(different, indent=1), flush=True)
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
