"""Damaged checkpoints, and what else belongs to a run that goes on."""

import hashlib
import io
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bad_inputs.cases import SMALL, Case
from bad_inputs.damage import ANYWHERE, REPLACED, truncated

_WORDS = "print('CODE WAS RUN')"


class _Code:
    """Pickled, it is a call of anything."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple:
        return self.call


def damaged_checkpoints(good_run: Path, scratch: Path, draw: random.Random) -> list[Case]:
    """Cases for `resume=`, from the newest checkpoint of a finished small run."""
    good = good_run / "checkpoints" / "iteration-00000004.pt"
    data = good.read_bytes()
    cases = []

    def add(name: str, content: bytes) -> None:
        number = len(cases)
        run = scratch / f"run-{number}"
        path = run / "checkpoints" / "iteration-00000004.pt"
        # Alone in its folder a damaged checkpoint has none before it; by its path it is asked for.
        resume = "auto" if number % 2 else path
        elsewhere = run if number % 2 else scratch / f"other-{number}"
        words = (*SMALL, f"hydra.run.dir={elsewhere}", f"resume={resume}")
        about = (str(path.parent),)
        make = partial(_write, path, content)
        cases.append(Case("checkpoint", name, words, about, prepare=make, folder=run))

    for damage in ANYWHERE:
        for _ in range(24 if damage is truncated else 18):
            add(damage.__name__, damage(data, draw))
    for damage in REPLACED:
        for _ in range(3):
            add(damage.__name__, damage(data, draw))
    contents = torch.load(good, weights_only=True)
    for name, content in _sealed(contents):
        add(name, content + b"metadist-sha256:" + hashlib.sha256(content).hexdigest().encode())
    add("without a digest", data[:-80])
    add("twice", data + data)
    return cases


def _sealed(contents: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """What someone made who can write a digest: it is right, and the contents are not."""
    for function, argument in ((os.system, "echo CODE WAS RUN"), (exec, _WORDS), (eval, _WORDS)):
        yield "code in a zip", _saved({**contents, "learner": _Code(function, argument)})
        yield "code in a pickle", pickle.dumps(_Code(function, argument))
        legacy = _saved(_Code(function, argument), _use_new_zipfile_serialization=False)
        yield "code in an old file", legacy
    yield "a class", _saved({**contents, "learner": Path("x")})
    for number in (0, 1, 3, "2", None):
        yield "another format", _saved({**contents, "format": number, "version": "0.0.9"})
    for name in contents:
        if name != "version":
            yield "a part missing", _saved({k: v for k, v in contents.items() if k != name})
    for name in ("learner", "optimizer", "scheduler", "iteration", "fingerprint", "buffers"):
        yield "a part that is text", _saved({**contents, name: "text"})
    learner = contents["learner"]
    smaller = {k: v[:1] if v.dim() else v for k, v in learner.items()}
    yield "other shapes", _saved({**contents, "learner": smaller})
    renamed = {f"x{k}": v for k, v in learner.items()}
    yield "other names", _saved({**contents, "learner": renamed})
    yield "beyond the end", _saved({**contents, "iteration": 10**9})
    yield "before the start", _saved({**contents, "iteration": -3})
    for other in ([1, 2], "text", 5, None):
        yield "no dictionary", _saved(other)
    grown = io.BytesIO()
    inner = _saved({**contents, "learner": {"weight": torch.zeros(10_000_000)}})
    with zipfile.ZipFile(io.BytesIO(inner)) as old, zipfile.ZipFile(grown, "w", 8) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    yield "grows when opened", grown.getvalue()


def _saved(thing: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(thing, buffer, **options)
    return buffer.getvalue()


def damaged_runs(good_run: Path, scratch: Path, draw: random.Random) -> list[Case]:
    """Cases of a run's other files: its record, and its configuration for a replay."""
    cases = []

    def add(kind: str, file: str, content: bytes, about: tuple[str, ...]) -> None:
        run = scratch / f"other-files-{len(cases)}"
        words: tuple[str, ...] = (*SMALL, f"hydra.run.dir={run}", "resume=auto")
        script = "maml.py"
        if kind == "configuration of a run":
            words, script = (str(run), "--key", "0,train,1,0"), "replay.py"
        make = partial(_copy_with, good_run, run, file, content)
        cases.append(Case(kind, "damaged", words, about, script, False, make, run))

    lines = (good_run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    for _ in range(8):
        changed = list(lines)
        place = draw.randrange(len(lines) - 1)
        changed[place] = draw.choice([b"{\n", b"\xff\xfe\n", b"[1]\n", b"\n", changed[place][5:]])
        add("record of a run", "metrics.jsonl", b"".join(changed), ("metrics.jsonl",))
    configuration = (good_run / ".hydra" / "config.yaml").read_bytes()
    broken = [b"", b"\xff\xfe\x00", b"a: [1", b"- 1\n- 2\n", b"text", b"seed: 0\n"]
    broken.append(configuration.replace(b"iterations: 4", b"iterations: many"))
    broken.append(configuration.replace(b"metadist.tasks.Glyphs", b"metadist.tasks.Griffins"))
    for content in broken:
        about = ("config.yaml", "trainer.iterations", "Griffins")
        add("configuration of a run", ".hydra/config.yaml", content, about)
    return cases


def recoveries(good_run: Path, scratch: Path, draw: random.Random) -> list[Case]:
    """A damaged newest checkpoint with a good one before it: the run goes on by itself."""
    newest = "checkpoints/iteration-00000004.pt"
    cases = []
    for number, damage in enumerate(ANYWHERE + REPLACED):
        run = scratch / f"recovery-{number}"
        content = damage((good_run / newest).read_bytes(), draw)
        make = partial(_copy_with, good_run, run, newest, content)
        words = (*SMALL, f"hydra.run.dir={run}", "resume=auto")
        name = damage.__name__
        cases.append(
            Case("newest checkpoint", name, words, recovers=True, prepare=make, folder=run)
        )
    return cases


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(content)


def _copy_with(good_run: Path, run: Path, file: str, content: bytes) -> None:
    shutil.copytree(good_run, run)
    (run / file).write_bytes(content)
