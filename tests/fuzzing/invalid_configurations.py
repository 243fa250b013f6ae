"""Invalid configurations: wrong types, ranges, keys, choices, syntax and paths."""

import random
import re
import string
from collections.abc import Iterator
from pathlib import Path

from fuzzing.case import SMALL, Case

INTEGERS = {  # key: minimum
    "trainer.iterations": 1,
    "trainer.meta_batch_size": 1,
    "trainer.eval_every": 0,
    "trainer.validation_tasks": 1,
    "trainer.eval_tasks": 1,
    "trainer.checkpoint_every": 0,
    "trainer.keep_checkpoints": 1,
    "task.ways": 1,
    "task.shots": 1,
    "task.queries": 1,
    "algorithm.inner_steps": 1,
    "algorithm.eval_inner_steps": 1,
    "model.filters": 1,
    "seed": 0,
    "threads": 1,
    "dataset.seed": 0,
    "++dataset.examples": 2,
    "++dataset.train_classes": 1,
    "++dataset.size": 8,
}
POSITIVE = ("algorithm.inner_lr", "trainer.clip_norm", "trainer.clip_value")
REAL = (*POSITIVE, "optimizer.lr", "model.dropout")
FLAGS = ("algorithm.first_order", "trainer.send_tasks", "++dataset.rotations")
CHOICES = ("model.pooling", "trainer.on_non_finite", "strategy.gradient")
GROUPS = ("dataset", "model", "algorithm", "optimizer", "scheduler", "strategy", "trainer", "task",
          "reducer", "logger", "+partition", "+experiment")  # fmt: skip
NODES = GROUPS[:9]

INCONSISTENT = (  # each override by itself is valid
    ("dataset=sinusoid",),  # conv4 wants images
    ("dataset=sinusoid", "model=mlp", "algorithm=supervised"),
    ("task.shots=5", "task.queries=5"),
    ("task.ways=13",),
    ("task.ways=1", "task.shots=1", "task.queries=1", "++dataset.size=8"),
    ("++dataset.examples=2", "task.shots=1", "task.queries=2"),
    ("scheduler=step", "scheduler.step_size=0"),
    ("scheduler=cosine", "scheduler.T_max=0"),
    ("scheduler=step", "scheduler.gamma=fast"),
    ("optimizer=sgd", "optimizer.momentum=-1"),
    ("+optimizer.betas=[2,3]",),
    ("+optimizer.betas=[0.9]",),
    ("+optimizer.weight_decay=-1",),
    ("+optimizer.eps=-1",),
    ("optimizer=sgd", "+optimizer.nesterov=true", "optimizer.momentum=0"),
    ("+partition=dim0", "+partition.workers=[1]"),
    ("+partition=dim0", "+partition.workers=[]"),
    ("+partition=dim0", "+partition.workers=[worker1]"),
    ("+partition=dim0", "+partition.workers=[-1]"),
    ("+partition=dim0", "+partition.workers=[0.5]"),
    ("+partition=dim0", "partition.dim=3"),
    ("+partition=dim0", "partition.exclusive=false"),
    ("+partition=batch", "partition.dim=x"),
    ("model=mlp", "~model.filters", "model.hidden=[0]"),
    ("logger=wandb", "logger.wandb.mode=sometimes"),
    ("logger=tensorboard", "+logger.tensorboard.colour=red"),
    ("logger=[console,jsonl,nothing]",),
    ("dataset=omniglot", "dataset.size=7"),
    ("model.filters=300000",),
    ("trainer.meta_batch_size=1000000000000",),
    ("trainer.eval_tasks=99999999999999999999999",),
    ("seed=9223372036854775808",),
    ("threads=100000000000",),
)
MALFORMED = (
    "trainer.iterations", "=5", "task.ways=[1", "task.ways={", "model={filters: 4", "seed='1",
    "seed=1,2", "trainer.iterations=2,4", "model.filters=${nope}", "seed=${oc.env:NO_SUCH_NAME}",
    "seed=???", "trainer.iterations=???", "model.filters=${model.filters}", "~seed", "~device",
    "~trainer.iterations.x", "~nothing", "trainer=4", "model=[]", "task='few shot'",
    "a b=1", "trainer..iterations=1", ".seed=1", "seed.=1", "seed.deep=1", "+seed=1",
    "model.filters=${", "trainer.iterations=1 2", "trainer.iterations=0x", "@=1", "++=1",
    "hydra.nothing=1", "hydra/launcher=nothing", "logger.console=7",
    "logger=null", "+logger.extra=1", "threads=null", "seed=null", "device=null", "resume=[1]",
)  # fmt: skip


def invalid_configurations(scratch: Path, rng: random.Random) -> list[Case]:
    """All invalid configurations, a few hundred; random parts are sampled from `rng`."""
    found = []
    for name, overrides in _overrides(scratch, rng):
        run_directory = f"hydra.run.dir={scratch}/run-{len(found)}"
        run = () if "hydra.run.dir" in str(overrides) else (run_directory,)
        other = any(each.startswith("dataset=") for each in overrides)
        small = [each for each in SMALL if not (other and each.startswith("++dataset."))]
        expected = tuple(
            w.rstrip("s") for w in re.findall(r"\w+", " ".join(overrides)) if len(w) > 2
        )
        if name == "cannot be read":
            expected = (*expected, "command line", *overrides)
        if name == "no checkpoint":  # of the path, "/" may be all
            expected = (*expected, "holds no checkpoint")
        found.append(Case("configuration", name, (*small, *overrides, *run), expected))
    return found


def _overrides(scratch: Path, rng: random.Random) -> Iterator[tuple[str, tuple[str, ...]]]:
    for key, least in INTEGERS.items():
        yield "out of range", (f"{key}={least - rng.randint(1, 9)}",)
        kind = rng.choice(["many", "1.5", "[1]", "{a: 1}", "1e3x", "true", "''", "nan", "1_0x"])
        yield "wrong type", (f"{key}={kind}",)
    for key in REAL:
        for value in ("nan", "-.inf", str(-rng.randint(1, 9)), "quick", "[0.1]", "{a: 0.1}"):
            yield "no such number", (f"{key}={value}",)
    for key in POSITIVE:
        yield "out of range", (f"{key}=0",)
    yield "out of range", (f"model.dropout={1 + rng.random()}",)
    for key in FLAGS:
        for value in ("perhaps", str(rng.randint(2, 9)), "[true]"):
            yield "wrong type", (f"{key}={value}",)
    for key in CHOICES:
        for value in (_random_name(rng), "null", "3"):
            yield "no such choice", (f"{key}={value}",)
    for group in GROUPS:
        yield "no such option", (f"{group}={_random_name(rng)}",)
    for group in NODES:
        yield "no group", (f"~{group}",)
        yield "no option of the group", (f"+{group}.{_random_name(rng)}={rng.randint(0, 9)}",)
        for target in (
            f"{_random_name(rng)}.{_random_name(rng)}",
            "math.pi",
            "metadist",
            "''",
            "builtins.len",
        ):
            yield "no such target", (f"{group}._target_={target}",)
    for key in (*INTEGERS, *REAL, *CHOICES):
        misspelt = _misspelt(key.lstrip("+"), rng)
        yield "misspelt", (f"{rng.choice(['', '+'])}{misspelt}=1",)
    for device in ("tpu", "gpu", "cuda:99", "cpu:x", "7", "meta2"):
        yield "no such device", (f"device={device}",)
    for overrides in INCONSISTENT:
        yield "inconsistent", overrides
    for override in MALFORMED:
        yield "cannot be read", (override,)
    yield from _paths(scratch)


def _paths(scratch: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    file = scratch / "a file"
    file.write_text("not a folder")
    for path in ("/dev/null/x", "/proc/x", "/dev/null", f"'{file}'", f"'{file}/below'"):
        yield "no such path", (f"hydra.run.dir={path}",)
        yield "no such path", (f"resume={path}",)
        root = ("dataset=omniglot", "++dataset.download=false", f"dataset.root={path}")
        yield "no such path", root
    for resume in ("nowhere/a.pt", "newest", "''", ".", "/", str(scratch), "5", "true"):
        yield "no checkpoint", (f"resume={resume}",)


def _misspelt(key: str, rng: random.Random) -> str:
    """The key with a letter of its last part dropped, doubled or changed."""
    head, dot, last = key.rpartition(".")
    index = rng.randrange(len(last))
    replacement = rng.choice(["", last[index] * 2, rng.choice("xyz")])
    changed = last[:index] + replacement + last[index + 1 :]
    return head + dot + (changed if changed and changed != last else f"{last}s")


def _random_name(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(4, 9)))
