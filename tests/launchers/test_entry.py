"""Whose process it is that an experiment's command ends."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from metadist.launchers.entry import _is_program


@pytest.mark.parametrize(
    ("started", "program"), [("a/maml.py", True), ("a/b/../maml.py", True), ("wrapper.py", False)]
)
def test_a_script_is_the_program_or_is_called_by_one(tmp_path, monkeypatch, started, program):
    (tmp_path / "a" / "b").mkdir(parents=True)
    script = (tmp_path / "a" / "maml.py").resolve()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=started))
    assert _is_program(script) is program
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace())  # python -c, or interactive
    assert not _is_program(Path(script))
