"""`metadist replay`: the options of its command line."""

import sys
from types import SimpleNamespace

import pytest

from metadist.cli import replay
from metadist.cli.command import exit_status


@pytest.mark.parametrize("trusted", [False, True])
def test_options_are_those_of_the_command_line(monkeypatch, tmp_path, trusted):
    given = []

    def record(experiment, key, checkpoint):
        given.append((experiment, key.tolist(), checkpoint))
        return SimpleNamespace(lines=list)

    monkeypatch.setattr(replay, "replay", record)
    monkeypatch.setattr(replay, "load_experiment", lambda *given, trust_code: (*given, trust_code))
    options = ["--key", "7,train,17,3", "--checkpoint", str(tmp_path / "a.pt")]
    trust = ["--trust-code", "--device", "cpu"] if trusted else []
    monkeypatch.setattr(sys, "argv", ["metadist replay", str(tmp_path), *options, *trust])
    assert exit_status(replay.main) == 0
    overrides = ["device=cpu"] if trusted else []
    loaded = (tmp_path.resolve(), *overrides, trusted)
    assert given == [(loaded, [7, 0, 17, 3], tmp_path / "a.pt")]
