"""Wrong configurations, of every kind that a hand can type."""

import random
import re
import string
from collections.abc import Iterator
from pathlib import Path

from bad_inputs.cases import SMALL, Case

WHOLE = {  # whole numbers, and the least that is allowed
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

AT_ODDS = (  # each word by itself would do
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
BROKEN = (
    "trainer.iterations", "=5", "task.ways=[1", "task.ways={", "model={filters: 4", "seed='1",
    "seed=1,2", "trainer.iterations=2,4", "model.filters=${nope}", "seed=${oc.env:NO_SUCH_NAME}",
    "seed=???", "trainer.iterations=???", "model.filters=${model.filters}", "~seed", "~device",
    "~trainer.iterations.x", "~nothing", "trainer=4", "model=[]", "task='few shot'",
    "a b=1", "trainer..iterations=1", ".seed=1", "seed.=1", "seed.deep=1", "+seed=1",
    "model.filters=${", "trainer.iterations=1 2", "trainer.iterations=0x", "@=1", "++=1",
    "hydra.nothing=1", "hydra/launcher=nothing", "logger.console=7",
    "logger=null", "+logger.extra=1", "threads=null", "seed=null", "device=null", "resume=[1]",
)  # fmt: skip


def wrong_configurations(scratch: Path, draw: random.Random) -> list[Case]:
    """Every wrong configuration, a few hundred, those with free places filled by `draw`."""
    found = []
    for name, words in _wrong_words(scratch, draw):
        own = f"hydra.run.dir={scratch}/run-{len(found)}"
        run = () if "hydra.run.dir" in str(words) else (own,)
        other = any(word.startswith("dataset=") for word in words)
        small = [word for word in SMALL if not (other and word.startswith("++dataset."))]
        about = tuple(w.rstrip("s") for w in re.findall(r"\w+", " ".join(words)) if len(w) > 2)
        if name == "cannot be read":
            about = (*about, "command line", *words)
        found.append(Case("configuration", name, (*small, *words, *run), about))
    return found


def _wrong_words(scratch: Path, draw: random.Random) -> Iterator[tuple[str, tuple[str, ...]]]:
    for key, least in WHOLE.items():
        yield "out of range", (f"{key}={least - draw.randint(1, 9)}",)
        kind = draw.choice(["many", "1.5", "[1]", "{a: 1}", "1e3x", "true", "''", "nan", "1_0x"])
        yield "wrong type", (f"{key}={kind}",)
    for key in REAL:
        for value in ("nan", "-.inf", str(-draw.randint(1, 9)), "quick", "[0.1]", "{a: 0.1}"):
            yield "no such number", (f"{key}={value}",)
    for key in POSITIVE:
        yield "out of range", (f"{key}=0",)
    yield "out of range", (f"model.dropout={1 + draw.random()}",)
    for key in FLAGS:
        for value in ("perhaps", str(draw.randint(2, 9)), "[true]"):
            yield "wrong type", (f"{key}={value}",)
    for key in CHOICES:
        for value in (_word(draw), "null", "3"):
            yield "no such choice", (f"{key}={value}",)
    for group in GROUPS:
        yield "no such option", (f"{group}={_word(draw)}",)
    for group in NODES:
        yield "no group", (f"~{group}",)
        yield "no option of the group", (f"+{group}.{_word(draw)}={draw.randint(0, 9)}",)
        for target in (f"{_word(draw)}.{_word(draw)}", "math.pi", "metadist", "''", "builtins.len"):
            yield "no such target", (f"{group}._target_={target}",)
    for key in (*WHOLE, *REAL, *CHOICES):
        misspelt = _misspelt(key.lstrip("+"), draw)
        yield "misspelt", (f"{draw.choice(['', '+'])}{misspelt}=1",)
    for device in ("tpu", "gpu", "cuda:99", "cpu:x", "7", "meta2"):
        yield "no such device", (f"device={device}",)
    for words in AT_ODDS:
        yield "at odds with the rest", words
    for word in BROKEN:
        yield "cannot be read", (word,)
    yield from _places(scratch)


def _places(scratch: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    file = scratch / "a file"
    file.write_text("not a folder")
    for place in ("/dev/null/x", "/proc/x", "/dev/null", f"'{file}'", f"'{file}/below'"):
        yield "no such place", (f"hydra.run.dir={place}",)
        yield "no such place", (f"resume={place}",)
        root = ("dataset=omniglot", "++dataset.download=false", f"dataset.root={place}")
        yield "no such place", root
    for resume in ("nowhere/a.pt", "newest", "''", ".", "/", str(scratch), "5", "true"):
        yield "no checkpoint", (f"resume={resume}",)


def _misspelt(key: str, draw: random.Random) -> str:
    """The key with a letter of its last part lost, doubled or changed."""
    head, dot, last = key.rpartition(".")
    place = draw.randrange(len(last))
    instead = draw.choice(["", last[place] * 2, draw.choice("xyz")])
    changed = last[:place] + instead + last[place + 1 :]
    return head + dot + (changed if changed and changed != last else f"{last}s")


def _word(draw: random.Random) -> str:
    return "".join(draw.choices(string.ascii_lowercase, k=draw.randint(4, 9)))
