"""Secrets stay in the environment."""

import pytest
from commands import run_command
from tiny import SMALL, compose
from worlds import run_world

from metadist.config import build_experiment
from metadist.config.plain import redact_secrets

KEY = "0123456789abcdef0123456789abcdef01234567"


def test_texts_that_hold_a_secret_are_blotted_out(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("MY_TOKEN", KEY[:10])
    monkeypatch.setenv("SHORT_KEY", "abc")
    found = redact_secrets({"a": [f"x {KEY} y", 3, None], KEY: {"b": ("abc", KEY[:10])}})
    assert found == {"a": ["x *** y", 3, None], "***": {"b": ["abc", "***"]}}


@pytest.mark.parametrize(
    "name",
    [
        *("WANDB_API_KEY", "HF_TOKEN", "CLIENT_SECRET", "DB_PASSWORD", "DB_PASS", "CREDENTIALS"),
        *("GH_PAT", "SENTRY_DSN", "SLACK_WEBHOOK_URL", "BASIC_AUTH", "SESSION_COOKIE"),
    ],
)
def test_which_variables_hold_secrets(monkeypatch, name):
    monkeypatch.setenv(name, "12345678")
    for harmless in ("DATA_PATH", "GIT_AUTHOR_NAME", "XAUTHORITY", "COMPASS_HOME"):
        monkeypatch.setenv(harmless, "abcdefgh")
    assert redact_secrets("12345678 abcdefgh") == "*** abcdefgh"
    monkeypatch.setenv(name, "1234567")  # too short to be a secret
    assert redact_secrets("1234567 abcdefgh") == "1234567 abcdefgh"
    monkeypatch.delenv(name)
    monkeypatch.setenv(name.lower(), "12345678")
    assert redact_secrets("12345678") == "***"


def test_a_secret_that_holds_another_one_is_redacted_as_a_whole(monkeypatch):
    monkeypatch.setenv("A_KEY", "12345678")
    monkeypatch.setenv("B_KEY", "1234567890")
    assert redact_secrets(["1234567890", "12345678"]) == ["***", "***"]


def test_the_name_of_a_class_is_no_secret(monkeypatch):
    monkeypatch.setenv("DB_PASSWORD", "metadist")
    found = redact_secrets({"_target_": "metadist.models.MLP", "note": "metadist"})
    assert found == {"_target_": "metadist.models.MLP", "note": "***"}


def configured(directory) -> str:
    overrides = ("strategy=local", "logger.tensorboard.directory=${oc.env:WANDB_API_KEY}")
    small = [override for override in SMALL if not override.startswith("logger")]
    return str(build_experiment(compose(*small, *overrides), directory, "maml").configuration)


def test_the_configuration_of_loggers_and_checkpoints_has_none(tmp_path):
    found = run_world(configured, 1, tmp_path, environment={"WANDB_API_KEY": KEY})[0]
    assert KEY not in found and "'directory': '***'" in found


def test_a_run_with_a_key_in_the_environment_writes_it_nowhere(tmp_path):
    outcomes = run_command(
        "maml.py",
        *SMALL,
        "logger=[console,jsonl,tensorboard]",
        "trainer.iterations=2",
        f"hydra.run.dir={tmp_path}/run",
        environment={"WANDB_API_KEY": KEY},
        timeout=180,
    )
    assert outcomes[0].status == 0, outcomes
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {".hydra", "checkpoints", "tensorboard"} <= {path.parent.name for path in files}
    for content in [*(path.read_bytes() for path in files), outcomes[0].out, outcomes[0].err]:
        assert KEY not in (content if isinstance(content, str) else content.decode("latin-1"))
    assert not any(KEY in str(path) for path in files)
