"""Saved runs and checkpoints: loaded without their dataset, and nothing of them is executed."""

import gc
import os
import pickle
import shutil
import weakref
from dataclasses import replace

import pytest
import torch
import yaml
from commands import run_command
from omegaconf import OmegaConf
from tiny import SMALL, build, compose
from torchvision.models import resnet18
from worlds import run_world

from metadist.algorithms import MAML
from metadist.config import image_preprocessing, load_experiment, load_learner
from metadist.config.trusted import check_interpolations, locate_trusted, resolve_external
from metadist.distributed import batch_partitioner, mean_reducer
from metadist.errors import UserError
from metadist.models import Torchvision
from metadist.tasks import DecodedImages, Glyphs
from metadist.training import Trainer
from metadist.training.checkpoints import read_checkpoint, write_checkpoint


class OwnGlyphs(Glyphs):
    """A dataset of the user."""


def finished_run(directory, own: str) -> None:
    x = build(
        directory, "strategy=local", "trainer.test_checkpoint=best", f"dataset._target_={own}"
    )
    Trainer(x).run()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run whose dataset can no longer be built."""
    directory = tmp_path_factory.mktemp("saved") / "run"
    run_world(finished_run, 1, directory, f"{__name__}.OwnGlyphs")
    return directory


def test_the_learner_needs_no_dataset(run, monkeypatch):
    monkeypatch.setattr(Glyphs, "__init__", None)
    before = torch.get_rng_state()
    saved = load_learner(str(run))
    assert torch.equal(torch.get_rng_state(), before)
    contents = read_checkpoint(saved.checkpoint)
    assert saved.checkpoint.name.startswith("best-")
    assert saved.iteration == contents["iteration"] and saved.configuration["task"]["ways"] == 3
    assert (saved.input_shape, saved.outputs, saved.regression) == ((1, 28, 28), 3, False)
    state = saved.learner.state_dict()
    assert state.keys() == contents["learner"].keys()
    assert all(torch.equal(state[name], contents["learner"][name]) for name in state)


def test_a_checkpoint_alone_is_enough(run, tmp_path):
    newest = run / "checkpoints" / "iteration-00000004.pt"
    saved = load_learner(shutil.copy(newest, tmp_path / "any.pt"))
    assert saved.iteration == 4
    with pytest.raises(UserError, match="holds no checkpoint"):
        load_learner(tmp_path)
    for name in ("none", "none.safetensors"):
        with pytest.raises(UserError, match=rf"{name} does not exist: give a run's directory, a"):
            load_learner(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "weights", "options"),
    [
        ("resnet18", "DEFAULT", {}),
        ("googlenet", "IMAGENET1K_V1", {"transform_input": True}),
        ("vit_b_16", "IMAGENET1K_SWAG_E2E_V1", {"image_size": 384}),
    ],
)
def test_pretrained_weights_are_not_downloaded_again(
    run, tmp_path, monkeypatch, name, weights, options
):
    asked = []
    monkeypatch.setattr(
        "torchvision.models.get_model",
        lambda name, weights, **options: asked.append((weights, options)) or resnet18(),
    )
    contents = read_checkpoint(run / "checkpoints" / "iteration-00000004.pt")
    learner = MAML(Torchvision((1, 28, 28), 3, name, weights=weights))
    node = {"_target_": "metadist.models.Torchvision", "name": name, "weights": weights}
    path = tmp_path / "pretrained.pt"
    changed = {"learner": learner.state_dict()}
    changed["configuration"] = {**contents["configuration"], "model": node}
    write_checkpoint(path, {**contents, **changed})
    state = load_learner(path).learner.state_dict()
    assert asked == [(weights, {}), (None, options)]
    assert all(torch.equal(each, state[name]) for name, each in learner.state_dict().items())


MARKER = "metadist_was_here"
EVIL = [
    "os.system",
    "builtins.eval",
    "subprocess.Popen",
    "metadist.config.saved.os.system",
    "metadist.config.load_experiment",
    "metadist.config.saved.Path",
    "metadist.launchers.torchrun.TorchrunLauncher",
    "metadist.training.saved_state.load_learner_state",
    "metadist.training.Trainer",
    "metadist.algorithms.learner.torch.load",
    "metadist.algorithms.nn.Module",
    "metadist.models.conv4.nn.Linear",
    "metadist.models.nn",
    "metadist.models.Conv4.__init__",
    "metadist.models.__class__",
    "metadist.tasks.task_keys",
    "metadist.distributed.remote_sync_call",
    "metadist.__main__.main",
    "metadist",
    "",
    "torch.load",
    "torch.optim.adam.torch.load",
    "torch.optim.functional.adam",
    "torch.optim.swa_utils.AveragedModel",
    "torch.optim.lr_scheduler.partial",
    "torch.hub.load",
    "torchvision.datasets.MNIST",
    "torchvision.io.read_file",
    "torchvision.transforms.v2.functional.normalize",
]
GOOD = [
    "metadist.algorithms.MAML",
    "metadist.algorithms.maml.MAML",
    "metadist.models.Conv4",
    "metadist.tasks.Glyphs",
    "metadist.tasks.Normalize",
    "metadist.distributed.dim_partitioner",
    "metadist.distributed.reducers.MeanReducer",
    "metadist.training.TrainerConfig",
    "metadist.training.LocalStrategy",
    "torch.optim.Adam",
    "torch.optim.adam.Adam",
    "torch.optim.lr_scheduler.StepLR",
    "torchvision.transforms.v2.RandomAffine",
]


@pytest.mark.parametrize("target", EVIL)
def test_other_targets_are_refused_by_name(target):
    with pytest.raises(UserError, match="trust_code=True") as caught:
        locate_trusted(target, "model")
    assert f"model._target_={target} " in str(caught.value)


@pytest.mark.parametrize("target", GOOD)
def test_classes_that_are_made_to_be_built_are_found(target):
    path = "dataset" if target == "metadist.tasks.Glyphs" else "model"
    assert locate_trusted(target, path).__name__ == target.rpartition(".")[2]


@pytest.mark.parametrize("path", ["model.filters", "dataset.normalize", "algorithm", "optimizer"])
def test_a_dataset_is_built_in_its_own_place_alone(path):
    with pytest.raises(UserError, match=f"{path}._target_=metadist.tasks.Omniglot is not"):
        locate_trusted("metadist.tasks.Omniglot", path)  # it would download


@pytest.mark.parametrize(
    "text",
    [
        "${oc.env:HOME}",
        "a${oc.env:HOME,x}",
        "\\${oc.env:HOME}",
        "${oc.create:{a:1}}",
        "${oc.decode:x}",
        "${ oc.env:HOME}",
        "${${name}:HOME}",
        "${hydra:runtime.cwd}",
        "$${seed}{oc.env:HOME}",
        "${oc.select:x,${oc.env:HOME}}",
        "${fraction:0.1,${oc.env:HOME}}",
    ],
)
def test_interpolations_that_read_the_environment_are_refused(text):
    for values in ({"model": {"hidden": [text]}}, {"model": {text: 1}}):
        with pytest.raises(UserError, match="reads something outside"):
            check_interpolations(values)


def test_values_of_the_users_own_may_read_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOTS", "2")
    saved_configuration(tmp_path, lambda values: values["task"].update(queries="${oc.env:SHOTS}"))
    given = ("task.shots=${oc.env:SHOTS}", "task.queries=${oc.env:SHOTS}")
    with pytest.raises(UserError, match=r"task\.queries=.* of the saved run reads something"):
        load_experiment(tmp_path, given[0])
    assert load_experiment(tmp_path, *given).tasks.protocol()["shots"] == 2


def test_interpolations_of_conf_are_accepted():
    values = ["${trainer.iterations}", "${fraction:0.1,${trainer.iterations}}", "${oc.select:a,1}"]
    spaced = ["${ seed }", "${ fraction:0.1,${ seed }}", "${ oc.select: seed, 1 }"]
    check_interpolations({"a": values, "b": spaced})
    configuration = OmegaConf.create({"seed": 3, "b": spaced})
    saved = OmegaConf.to_container(resolve_external(configuration), resolve=False)
    assert saved == {"seed": 3, "b": spaced}


def saved_configuration(directory, change) -> None:
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(compose(*SMALL, "strategy=local"))
    change(values)
    (directory / ".hydra").mkdir(parents=True)
    (directory / ".hydra" / "config.yaml").write_text(yaml.safe_dump(values))


COMMAND = {"_target_": "os.system", "command": f"touch {MARKER}"}
CHANGES = {
    "target": lambda v: v["algorithm"].update(COMMAND),
    "nested": lambda v: v["dataset"].update(normalize=COMMAND),
    "in a list": lambda v: v["model"].update(filters=[[COMMAND]]),
    "in a dictionary": lambda v: v["model"].update(filters={"a": {"b": COMMAND}}),
    "partial": lambda v: v.update(scheduler={**COMMAND, "_partial_": True}),
    "arguments": lambda v: v["model"].update(_args_=[COMMAND]),
    "interpolated": lambda v: (
        v["model"].update(_target_="${dataset.seed}") or v["dataset"].update(seed="os.system")
    ),
    "from the environment": lambda v: v["dataset"].update(seed="${oc.env:HOME}"),
    "resolved twice": lambda v: v["model"].update(
        filters="\\${oc.create:{_target_:os.system,command:x}}"
    ),
    "a module of the run": lambda v: v["algorithm"].update(_target_="evil.Algorithm"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_run_directory_executes_nothing(tmp_path, monkeypatch, change):
    saved_configuration(tmp_path, change)
    (tmp_path / "evil.py").write_text(f"open({MARKER!r}, 'w')")
    overrides = ["algorithm._target_=evil.Algorithm", "hydra.searchpath=[pkg://evil]"]
    (tmp_path / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    (tmp_path / ".hydra" / "hydra.yaml").write_text("hydra: {searchpath: ['pkg://evil']}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError):
        load_experiment(tmp_path)
    assert not (tmp_path / MARKER).exists()


def test_a_run_directory_reads_no_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("POOLING", "max")
    change = {"pooling": "${oc.env:POOLING}"}
    saved_configuration(tmp_path, lambda values: values["model"].update(change))
    with pytest.raises(UserError, match=r"model\.pooling=.* reads something outside"):
        load_experiment(tmp_path)
    trusted = load_experiment(tmp_path, trust_code=True)
    assert trusted.configuration["model"]["pooling"] == "max"


@pytest.mark.parametrize("tag", ["python/object/apply:os.system", "python/name:os.system"])
def test_tags_of_a_run_directory_execute_nothing(tmp_path, monkeypatch, tag):
    saved_configuration(tmp_path, lambda values: None)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / ".hydra" / "config.yaml"
    path.write_text(path.read_text() + f"evil: !!{tag} ['touch {MARKER}']\n")
    with pytest.raises(UserError, match="corrupt"):
        load_experiment(tmp_path)
    assert not (tmp_path / MARKER).exists()


class Payload:
    def __reduce__(self):
        return os.system, (f"touch {MARKER}",)


def test_a_checkpoint_executes_nothing(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    contents = read_checkpoint(run / "checkpoints" / "iteration-00000004.pt")
    for number, changed in enumerate(
        (
            {"configuration": {**contents["configuration"], "model": COMMAND}},
            {"configuration": {**contents["configuration"], "algorithm": {"_args_": [COMMAND]}}},
            {"configuration": Payload()},
            {"learner": Payload()},
        )
    ):
        path = tmp_path / f"{number}.pt"
        write_checkpoint(path, {**contents, **changed})
        with pytest.raises(UserError):
            load_learner(path)
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(UserError):
        load_learner(tmp_path / "raw.pt")
    assert not (tmp_path / MARKER).exists()


def test_the_preprocessing_of_a_checkpoint_executes_nothing(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = load_learner(run)
    with pytest.raises(UserError, match=r"dataset\._target_=.*OwnGlyphs .*trust_code=True"):
        image_preprocessing(saved)
    assert image_preprocessing(saved, trust_code=True).input_shape == saved.input_shape
    dataset = {"_target_": "metadist.tasks.Glyphs", "normalize": COMMAND}
    changed = replace(saved, configuration={**saved.configuration, "dataset": dataset})
    with pytest.raises(UserError, match=r"dataset\.normalize\._target_=os\.system "):
        image_preprocessing(changed)
    assert not (tmp_path / MARKER).exists()


def test_code_is_executed_for_those_who_trust_it(tmp_path):
    change = {"_target_": f"{__name__}.OwnGlyphs"}
    saved_configuration(tmp_path, lambda values: values["dataset"].update(change))
    with pytest.raises(UserError, match=r"dataset\._target_=.*OwnGlyphs .*trust_code=True"):
        load_experiment(tmp_path)
    x = load_experiment(str(tmp_path), "seed=5", trust_code=True)
    assert isinstance(x.tasks.dataset, OwnGlyphs) and x.seed == 5
    (shown,) = run_command("metadist", "replay", str(tmp_path), "--key", "0,train,1,0")
    assert shown.status == 2 and "OwnGlyphs" in shown.err and shown.err.count("\n") == 1


def test_a_relative_root_is_found_from_elsewhere(tmp_path, monkeypatch):
    data = {"_target_": "metadist.tasks.Omniglot", "root": "images"}
    saved_configuration(tmp_path / "run", lambda values: values.update(dataset=data))
    started = {"hydra": {"runtime": {"cwd": str(tmp_path)}}}
    (tmp_path / "run" / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump(started))
    (tmp_path / "images").mkdir()
    (tmp_path / "elsewhere").mkdir()
    roots = []

    def load(self, root):
        roots.append(str(root))
        raise UserError("seen")

    monkeypatch.setattr(DecodedImages, "_load", load)
    monkeypatch.chdir(tmp_path / "elsewhere")
    for overrides in ([], ["dataset.root=mine"]):
        with pytest.raises(UserError, match="seen"):
            load_experiment(tmp_path / "run", *overrides)
    assert roots == [str(tmp_path / "images"), "mine"]


def test_a_key_is_deleted(tmp_path):
    saved_configuration(tmp_path, lambda values: values["algorithm"].update(inner_steps=3))
    assert load_experiment(tmp_path).learner.inner_steps == 3
    assert load_experiment(tmp_path, "~algorithm.inner_steps").learner.inner_steps == 1
    with pytest.raises(UserError, match=r"~algorithm\.steps deletes no key"):
        load_experiment(tmp_path, "~algorithm.steps")


def test_an_experiment_is_loaded_for_one_process_that_leaves_the_run_as_it_is(tmp_path):
    def of_two_ranks(values):
        strategy = {"_target_": "metadist.training.RpcStrategy"}
        values.update(strategy=strategy, resume="auto", init_from="gone")
        for name in ("partition", "default_partition", "reducer"):
            values[name] = {"_target_": f"evil.{name}", "workers": [0, 1]}
        values.update(callbacks={"mine": {"_target_": "evil.Callback"}})

    saved_configuration(tmp_path, of_two_ranks)
    x = load_experiment(tmp_path)
    assert (x.strategy.name, x.resume, x.state.iteration, x.callbacks) == ("local", None, 0, {})
    assert (x.strategy.partitioner, x.strategy.reducer) == (batch_partitioner, mean_reducer)
    Trainer(x).train_step(1)  # logs nothing
    assert [path.name for path in tmp_path.iterdir()] == [".hydra"]
    (tmp_path / ".hydra" / "config.yaml").write_text("seed: 0")
    with pytest.raises(UserError, match=r"corrupt \(it has no trainer\)"):
        load_experiment(tmp_path)


def test_the_tasks_of_a_loaded_experiment_are_freed_with_it(tmp_path):
    saved_configuration(tmp_path, lambda values: None)
    experiment = load_experiment(tmp_path)
    mapper, tasks = experiment.evaluate_mapper, weakref.ref(experiment.tasks)
    del experiment
    gc.collect()
    assert mapper.tasks.value is tasks()  # whoever has the mapper can use it
    del mapper
    gc.collect()
    assert tasks() is None


def test_options_in_a_package_are_found_if_the_run_is_trusted(tmp_path, monkeypatch):
    options = tmp_path / "code" / "own_options" / "dataset"
    options.mkdir(parents=True)
    for directory in (options.parent, options):
        (directory / "__init__.py").touch()
    (options / "mine.yaml").write_text("_target_: metadist.tasks.Glyphs\nexamples: 33\n")
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    saved = tmp_path / "run" / ".hydra"
    saved.mkdir(parents=True)
    OmegaConf.save(compose(*SMALL, "strategy=local"), saved / "config.yaml")
    sources = [{"path": "own_options", "schema": "pkg", "provider": "command-line"}]
    record = {"hydra": {"runtime": {"config_sources": sources}}}
    (saved / "hydra.yaml").write_text(yaml.safe_dump(record))
    experiment = load_experiment(saved.parent, "dataset=mine", trust_code=True)
    assert experiment.configuration["dataset"]["examples"] == 33
    with pytest.raises(UserError, match="mine"):
        load_experiment(saved.parent, "dataset=mine")
