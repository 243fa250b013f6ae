"""Corrupted checkpoints, records and configurations of a run."""

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

from fuzzing.case import SMALL, Case
from fuzzing.corruption import PARTIAL, REPLACEMENTS, truncated

_PRINT = "print('CODE WAS RUN')"


class _Code:
    """Unpickles to a call of any function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple:
        return self.call


def corrupted_checkpoints(intact_run: Path, scratch: Path, rng: random.Random) -> list[Case]:
    """Cases for `resume=`, from the newest checkpoint of a finished small run."""
    intact = intact_run / "checkpoints" / "iteration-00000004.pt"
    data = intact.read_bytes()
    cases = []

    def add(name: str, content: bytes) -> None:
        number = len(cases)
        run = scratch / f"run-{number}"
        path = run / "checkpoints" / "iteration-00000004.pt"
        # The only checkpoint of its folder, or requested by path: no earlier one to fall back on.
        resume = "auto" if number % 2 else path
        run_directory = run if number % 2 else scratch / f"other-{number}"
        arguments = (*SMALL, f"hydra.run.dir={run_directory}", f"resume={resume}")
        expected = (str(path.parent),)
        prepare = partial(_write, path, content)
        cases.append(Case("checkpoint", name, arguments, expected, prepare=prepare, folder=run))

    for corruption in PARTIAL:
        for _ in range(24 if corruption is truncated else 18):
            add(corruption.__name__, corruption(data, rng))
    for corruption in REPLACEMENTS:
        for _ in range(3):
            add(corruption.__name__, corruption(data, rng))
    contents = torch.load(intact, weights_only=True)
    for name, content in _with_valid_digest(contents):
        add(name, content + b"metadist-sha256:" + hashlib.sha256(content).hexdigest().encode())
    add("without a digest", data[:-80])
    add("twice", data + data)
    return cases


def _with_valid_digest(contents: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Invalid contents with a valid digest."""
    for function, argument in ((os.system, "echo CODE WAS RUN"), (exec, _PRINT), (eval, _PRINT)):
        yield "code in a zip", _saved({**contents, "learner": _Code(function, argument)})
        yield "code in a pickle", pickle.dumps(_Code(function, argument))
        legacy = _saved(_Code(function, argument), _use_new_zipfile_serialization=False)
        yield "code in an old file", legacy
    yield "a class", _saved({**contents, "learner": Path("x")})
    for number in (0, 1, 3, "2", None):
        yield "another format", _saved({**contents, "format": number, "version": "0.0.9"})
    for name in contents:
        if name not in ("version", "protocol"):  # which older checkpoints lack
            yield "a part missing", _saved({k: v for k, v in contents.items() if k != name})
    for name in ("learner", "optimizer", "scheduler", "iteration", "configuration", "buffers"):
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


def corrupted_runs(intact_run: Path, scratch: Path, rng: random.Random) -> list[Case]:
    """Cases of the other files of a run: its metrics, and its configuration for a replay."""
    cases = []

    def add(kind: str, file: str, content: bytes, expected: tuple[str, ...]) -> None:
        run = scratch / f"other-files-{len(cases)}"
        arguments: tuple[str, ...] = (*SMALL, f"hydra.run.dir={run}", "resume=auto")
        script = "experiments/maml.py"
        if kind == "configuration of a run":
            arguments = ("replay", str(run), "--key", "0,train,1,0")
            script = "metadist/__main__.py"
        prepare = partial(_copy_with, intact_run, run, file, content)
        cases.append(Case(kind, "corrupted", arguments, expected, script, False, prepare, run))

    lines = (intact_run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    for _ in range(8):
        changed = list(lines)
        index = rng.randrange(len(lines) - 1)
        changed[index] = rng.choice([b"{\n", b"\xff\xfe\n", b"[1]\n", b"\n", changed[index][5:]])
        add("record of a run", "metrics.jsonl", b"".join(changed), ("metrics.jsonl",))
    configuration = (intact_run / ".hydra" / "config.yaml").read_bytes()
    broken = [b"", b"\xff\xfe\x00", b"a: [1", b"- 1\n- 2\n", b"text", b"seed: 0\n"]
    broken.append(configuration.replace(b"iterations: 4", b"iterations: many"))
    broken.append(configuration.replace(b"metadist.tasks.Glyphs", b"metadist.tasks.Griffins"))
    for content in broken:
        expected = ("config.yaml", "trainer.iterations", "Griffins")
        add("configuration of a run", ".hydra/config.yaml", content, expected)
    return cases


def recoveries(intact_run: Path, scratch: Path, rng: random.Random) -> list[Case]:
    """A corrupted newest checkpoint after an intact one: the run resumes from the latter."""
    newest = "checkpoints/iteration-00000004.pt"
    cases = []
    for number, corruption in enumerate(PARTIAL + REPLACEMENTS):
        run = scratch / f"recovery-{number}"
        content = corruption((intact_run / newest).read_bytes(), rng)
        prepare = partial(_copy_with, intact_run, run, newest, content)
        arguments = (*SMALL, f"hydra.run.dir={run}", "resume=auto")
        name = corruption.__name__
        cases.append(
            Case("newest checkpoint", name, arguments, recovers=True, prepare=prepare, folder=run)
        )
    return cases


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(content)


def _copy_with(intact_run: Path, run: Path, file: str, content: bytes) -> None:
    shutil.copytree(intact_run, run)
    (run / file).write_bytes(content)
