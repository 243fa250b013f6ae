"""Weights & Biases: offline runs, resuming, credentials."""

from urllib.parse import urlsplit

import pytest
from example_runs import example_run, log_run
from PIL import Image

from metadist.errors import UserError
from metadist.loggers import WandbLogger

KEY = "0123456789abcdef0123456789abcdef01234567"


def test_offline_run_resumes_with_its_id_and_does_not_store_the_api_key(
    tmp_path, monkeypatch, capfd
):
    import wandb

    monkeypatch.setenv("WANDB_API_KEY", KEY)
    configuration = {"task": {"ways": 5}}
    log_run(WandbLogger(), tmp_path, 0, 4, configuration)
    run_id = (tmp_path / "wandb_run_id").read_text()
    log_run(WandbLogger(tags=("a",)), tmp_path, 2, 6, configuration, finish=True)
    assert capfd.readouterr() == ("", "")

    assert (tmp_path / "wandb_run_id").read_text() == run_id
    runs = list((tmp_path / "wandb").glob("offline-run-*"))
    assert len(runs) == 2
    assert all(run_id.strip() in path.name for path in runs)
    wandb.teardown()  # its service writes the files
    contents = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"train/loss" in content for content in contents)  # they are not compressed
    assert any(b"test/accuracy" in content for content in contents)
    assert not any(KEY.encode() in content for content in contents)


@pytest.mark.parametrize("mode", ["offline", "online", "disabled"])
def test_the_run_has_the_options_of_the_logger(tmp_path, monkeypatch, mode):
    import wandb

    given = {}
    monkeypatch.setenv("WANDB_API_KEY", KEY)  # needed for online
    monkeypatch.setattr(wandb, "init", lambda **options: given.update(options))
    logger = WandbLogger(project="waves", entity="a team", mode=mode, tags=("a", "b"))
    logger.start(example_run(tmp_path, configuration={"seed": 3}))
    logger.close()
    assert given["mode"] == mode
    assert (given["project"], given["entity"], given["tags"]) == ("waves", "a team", ("a", "b"))
    assert given["config"] == {"seed": 3} and given["name"] == "maml"
    assert given["dir"] == tmp_path and given["notes"] == "MAML on glyphs"
    assert given["id"] == (tmp_path / "wandb_run_id").read_text().strip()
    assert given["resume"] == "allow"
    assert given["group"] is given["job_type"] is None
    first = given["id"]
    for start, same in ((2, True), (0, False)):  # a new run in an old directory is another run
        logger.start(example_run(tmp_path, start))
        assert (given["id"] == first) == same


def test_a_run_may_have_a_name_and_a_group_of_its_own(tmp_path, monkeypatch):
    import wandb

    given = {}
    monkeypatch.setattr(wandb, "init", lambda **options: given.update(options))
    options = {"name": "first", "group": "sweep", "job_type": "train", "notes": "with dropout"}
    logger = WandbLogger(**options)
    logger.start(example_run(tmp_path))
    logger.close()
    assert {name: given[name] for name in options} == options


class RecordedRun:
    """What a logger calls of a W&B run."""

    def __init__(self):
        self.logged, self.summary, self.finished = [], {}, []

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self, exit_code):
        self.finished.append(exit_code)


@pytest.mark.parametrize("finish", [False, True])
def test_metrics_have_their_iteration_and_a_run_without_results_has_failed(
    tmp_path, monkeypatch, finish
):
    import wandb

    run = RecordedRun()
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    log_run(WandbLogger(), tmp_path, 0, 2, finish=finish)
    first, second, validation, *images = run.logged
    assert first == (1, {"train/loss": 1.0, "train/s": "x"}) and second[0] == 2
    assert validation == (2, {"validation/accuracy": 0.5})
    assert [(step, list(values)) for step, values in images] == (
        [(6, ["test/accuracy", "learning_curves"])] if finish else []
    )
    results = {"test_accuracy": 0.75, "iterations": 6}
    assert run.summary == (results if finish else {})
    assert run.finished == [0 if finish else 1]


def test_disabled_mode_writes_no_run(tmp_path):
    log_run(WandbLogger(mode="disabled"), tmp_path, 0, 2, finish=True)
    assert not list(tmp_path.rglob("*run-*"))


def test_online_without_credentials_is_refused_without_a_prompt(tmp_path, monkeypatch):
    import wandb

    wandb.teardown()  # which forgets the login of another test
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    logger = WandbLogger(mode="online")
    with pytest.raises(UserError, match="no login for Weights & Biases"):
        logger.start(example_run(tmp_path))
    logger.close()


def test_a_malformed_key_is_one_sentence(tmp_path, monkeypatch):
    import wandb

    wandb.teardown()
    monkeypatch.setenv("WANDB_API_KEY", "short")
    with pytest.raises(UserError, match=r"could not initialize the run \(.*key"):
        WandbLogger(mode="online").start(example_run(tmp_path))


@pytest.mark.parametrize("way", ["netrc", "token file"])
def test_a_login_is_found_and_a_service_that_refuses_it_is_one_sentence(tmp_path, monkeypatch, way):
    import wandb

    wandb.teardown()
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if way == "netrc":
        url = wandb.setup(settings=wandb.Settings(silent=True)).settings.base_url
        login = f"machine {urlsplit(url).hostname} login user password {KEY}\n"
        (tmp_path / "netrc").write_text(login)
    else:
        monkeypatch.setenv("WANDB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))

    def refuse(**_):
        raise wandb.Error("permission\ndenied.")

    monkeypatch.setattr(wandb, "init", refuse)
    logger = WandbLogger(mode="online")
    with pytest.raises(UserError, match=r"initialize the run \(permission denied\): check the log"):
        logger.start(example_run(tmp_path))
    logger.close()


def test_validations_have_histograms_and_images(tmp_path, monkeypatch):
    import wandb

    run = RecordedRun()
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    logger = WandbLogger()
    logger.start(example_run(tmp_path))
    image = tmp_path / "validation_tasks.png"
    Image.new("RGB", (8, 6)).save(image)
    values = {"validation_accuracy": [0.25, 0.75, float("inf")], "validation_loss": [1e17]}
    values["validation_mse"] = [float("nan")]
    logger.log_panels(4, values, [image])
    ((step, panels),) = run.logged
    assert step == 4 and list(panels) == ["validation/tasks", "validation/accuracy_of_tasks"]
    assert isinstance(panels["validation/tasks"], wandb.Image)
    assert sum(panels["validation/accuracy_of_tasks"].histogram) == 2
