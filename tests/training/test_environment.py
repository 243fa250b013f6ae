"""The recorded environment: the commit of the directory in which a run was started."""

import os
import subprocess
from pathlib import Path

import pytest

from metadist.training.environment import commit


def git(directory: Path, *arguments: str) -> str:
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main")
    command = ["git", "-C", str(directory), *author, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path) -> Path:
    directory = tmp_path / "repository"
    directory.mkdir()
    git(directory, "init")
    (directory / "a").write_text("1")
    git(directory, "add", "a")
    git(directory, "commit", "-m", "a")
    return directory


def test_the_commit_and_whether_files_differ_from_it(repository, tmp_path):
    head = git(repository, "rev-parse", "HEAD")
    assert commit(repository) == {"commit": head}
    (repository / "untracked").touch()
    commit.cache_clear()
    assert commit(repository) == {"commit": head}
    (repository / "a").write_text("2")
    commit.cache_clear()
    assert commit(repository) == {"commit": f"{head}-dirty"}
    assert commit(tmp_path) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("core.fsmonitor", "touch {0}; false"),
        ("filter.evil.clean", "touch {0}; cat"),
        ("filter.evil.process", "touch {0}"),
        ("filter.a=b.clean", "touch {0}; cat"),
        ("diff.evil.textconv", "touch {0}; cat"),
        ("diff.external", "touch {0}; true"),
    ],
)
def test_programs_of_the_repositorys_configuration_are_not_run(repository, tmp_path, key, value):
    executed = tmp_path / "executed"
    driver = key.removeprefix("filter.").rpartition(".")[0] if "filter" in key else "evil"
    (repository / ".git" / "info").mkdir(exist_ok=True)
    (repository / ".git" / "info" / "attributes").write_text(f"* filter={driver} diff=evil\n")
    git(repository, "config", key, value.format(executed))
    git(repository, "config", "diff.trustExitCode", "true")  # for Git from 2.46 on
    (repository / "a").write_text("2")  # of the same size, so that Git compares the contents
    assert commit(repository)["commit"].endswith("-dirty") and not executed.exists()


def test_a_hook_of_the_repository_is_not_run(repository, tmp_path):
    hook = repository / ".git" / "hooks" / "post-index-change"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path / 'executed'}\n")
    hook.chmod(0o755)
    os.utime(repository / "a", (1, 1))  # Git would write the new time into its index
    assert not commit(repository)["commit"].endswith("-dirty")
    assert not (tmp_path / "executed").exists()


def test_the_users_own_git_configuration_stays(repository, tmp_path, monkeypatch):
    (repository / ".gitattributes").write_text("a filter=own\n")
    git(repository, "add", ".gitattributes")
    git(repository, "commit", "-m", "attributes")
    (repository / "a").write_text("2")
    assert commit(repository)["commit"].endswith("-dirty")
    commit.cache_clear()
    (tmp_path / "config").write_text('[filter "own"]\nclean = tr 2 1\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "0")
    assert not commit(repository)["commit"].endswith("-dirty")
