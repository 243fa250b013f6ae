"""Errors of Hydra, OmegaConf and the operating system, each as one sentence."""

import hydra
import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tiny import CONF

from metadist.config.hydra_errors import describe_error, raised_by_hydra


class Anything:
    """Takes any arguments."""

    def __init__(self, one: int = 1, **others: int) -> None:
        pass


ANYTHING = f"+callbacks.mine._target_={__name__}.Anything"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["hydra/launcher=submitit_x"], "hydra/launcher=submitit_x is not installed: pip install"),
        (["hydra/sweeper=optuna_x"], "hydra/sweeper=optuna_x is not installed: pip install -e"),
        (["dataset=/a/b"], "dataset=/a/b is a path: write dataset=folder dataset.root=/a/b."),
        (["model=/a/b"], "/a/b is not an option of model: choose one of conv4, mlp, resnet12, "),
        (
            ["algorithm=mine.alfa.ALFA"],
            "; a class of your own is given by algorithm._target_=mine.alfa.ALFA",
        ),
        (["optimizer=adamw"], "any other class by optimizer._target_=module.Class."),
        (
            ["launcher.nproc_per_node=2"],
            "is not a key of the chosen launcher, but of launcher=torchrun: choose this option.",
        ),
        (["algorithm=prototypical", "algorithm.inner_steps=3"], "of algorithm=anil or fomaml or "),
        (
            [f"dataset._target_={__name__}.Anything", "dataset.root=DIR"],
            "write +dataset.root=VALUE to add it.",
        ),
        (
            [*("+logger.mine._target_=a.B", "logger.wandb.mode=online")],
            "logger=wandb: write 'logger=[console,tensorboard,wandb]'.",
        ),
        (["model.name=vit"], "but of model=timm or torchvision: choose one of these."),
        (["logger.wandb.mode=online"], "logger=wandb: write 'logger=[console,tensorboard,wandb]'."),
        (["logger=console,wandb"], "write 'logger=[console,wandb]' for all of them in one run."),
        (["lr=1"], "(did you mean optimizer.lr?): check its spelling"),
        (["logger=[consol]"], "consol is not an option of logger (did you mean console?): choose "),
        (
            ["callbacks=none"],
            "choose one of early_stopping, ema; write callbacks=[] for none; a directory of your",
        ),
        (["+experiment=mine"], "choose one of the 5"),
        (
            ["+partition=dim0", "+partition=batch"],
            "in the defaults list: write partition=batch, without the plus; in a file, `override",
        ),
        (["dataset.size=9"], "not in conf/, but it is an option: write +dataset.size=VALUE to"),
        (["dataset.sise=9"], "is not a key of the configuration (did you mean size?): the keys of"),
        (
            ["algorithm.regression=true"],
            "algorithm.regression is not a key of the configuration: the",
        ),
        (
            ["task.sampled_splits=[train]"],
            "task.sampled_splits is not a key of the configuration: ",
        ),
        (["logger.console.x=3"], "the keys of logger.console are refresh_seconds."),
        (
            ["+dataset.size=9", "+seed=1"],
            "seed is a key of the configuration: write seed=VALUE, wi",
        ),
        (["sweep.retries=3"], "the keys of sweep are on_failure."),
        ([ANYTHING, "callbacks.mine.two=2"], ", or write +callbacks.mine.two=VALUE to add it."),
        (["+partition=dim0", "partition.dmi=1"], "(did you mean dim?): the keys of partition are"),
        (["partition=dim0"], "partition is not in the defaults list: write +partition=VALUE to"),
        (
            ["partition._target_=a.B"],
            "is not in the defaults list: write +partition._target_=VALUE",
        ),
        (
            ["callbacks.ema.decay=0.9"],
            "choose the callback too, as in callbacks=early_stopping, or",
        ),
        (["sede=1"], "sede is not a key or group of the configuration (did you mean seed?): check"),
        (
            ["running_statistics=true"],
            "is not set in this configuration: write +running_statistics",
        ),
        (
            ["scheduler=null"],
            "the command line gives a group a value other than the name of an option: write GROUP=",
        ),
        (
            ["trainer=3"],
            "a group a value other than the name of an option: write GROUP=NAME, as in",
        ),
        (["logger=none"], "mlflow, tensorboard, wandb; write logger=[] for none; a directory of"),
        (["trainer.lr=1"], "is not a key of the configuration (did you mean optimizer.lr?): the"),
        (["dataset.ways=5"], "is not a key of the configuration (did you mean task.ways?): the"),
        (
            ["strategy.timeout_seconds=5"],
            "(did you mean timeout_seconds?): the keys of strategy are gradient, fanout, ",
        ),
        (["trainer.seed=5"], "is not a key of the configuration (did you mean seed?): the keys"),
        (["~logger"], "~logger deletes no option of the defaults list: write logger=[] for none."),
        (["b"], "the override 'b' cannot be read: write KEY=VALUE, as in seed=1, with quotes"),
        (["mine=a=b"], "the override 'mine=a=b' cannot be read: write 'mine=\"a=b\"'."),
        (["init_from=a,b"], "has several values: add -m to sweep over them, or write 'init_from="),
        (["hydra.run.dir=null"], "hydra.run.dir=null does not fit: give a value of the type"),
        (["seed=[1"], "the override 'seed=[1' cannot be read: write KEY=VALUE, as in seed=1."),
        (["@=1"], "a group a value other than the name of an option: write GROUP=NAME, as in"),
        (["seed=???"], "Missing mandatory value: seed: give it a value on the command line."),
        (["+reducer=mean"], "reducer appears more than once in the defaults list: write reducer="),
        (
            ["seed=${oc.env:NO_SUCH_NAME}"],
            "Environment variable 'NO_SUCH_NAME' not found, which seed reads: set it, or give a "
            "default, as in ${oc.env:NO_SUCH_NAME,DEFAULT}.",
        ),
    ],
)
def test_a_wrong_command_line_is_one_sentence(overrides, sentence):
    with pytest.raises(Exception) as caught:  # noqa: PT011, PT012  (of many classes)
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            configuration = hydra.compose("maml", overrides)
        OmegaConf.to_container(configuration, resolve=True, throw_on_missing=True)
    described = describe_error(caught.value)
    assert sentence in described and "\n" not in described
    of_hydra = isinstance(caught.value, HydraException | OmegaConfBaseException)
    assert of_hydra or raised_by_hydra(caught.value)


@pytest.mark.parametrize(
    ("path", "override", "text", "sentence"),
    [
        (
            "model/mine.yaml",
            "model=mine",
            "a: 1\n\tb: 2\n",
            "mine.yaml, line 2, column 1, is",
        ),
        (
            "experiment/mine.yaml",
            "+experiment=mine",
            "defaults:\n  - override /dataset: omniglot\n",
            "let its file begin with the line `# @package _global_`.",
        ),
        (
            "mine.yaml",
            "seed=0",
            "defaults: [maml, {override /logger: [console]}, {partition: dim0}, _self_]\n",
            "a defaults list cannot be read: entries with `override` come last in it.",
        ),
    ],
)
def test_a_wrong_file_of_options_is_one_sentence(tmp_path, path, override, text, sentence):
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(text)
    (tmp_path / "main.yaml").write_text("defaults: [maml]\n")
    primary = "main" if "mine" in override else "mine"
    with (
        pytest.raises(Exception) as caught,  # noqa: PT011  (of many classes)
        hydra.initialize_config_dir(str(tmp_path), version_base="1.3"),
    ):
        hydra.compose(primary, [f"hydra.searchpath=[file://{CONF}]", override])
    assert sentence in describe_error(caught.value)


def test_an_error_of_the_operating_system_names_the_file_and_the_remedy():
    described = describe_error(PermissionError(13, "Permission denied", "/a/b"))
    assert described.startswith("Permission denied (/a/b): choose another directory with hydra.run")
    assert "of a sweep: hydra.sweep.dir=DIR" in described
    assert describe_error(OSError("odd")).startswith("odd: the output or the run's directory")


def test_the_text_of_any_other_error_stays():
    assert describe_error(ValueError("one\n  two")) == "one two"
    assert not raised_by_hydra(ValueError("never raised"))
    with pytest.raises(ZeroDivisionError) as caught:
        1 / 0  # noqa: B018
    assert not raised_by_hydra(caught.value)


def test_a_directory_without_a_primary_configuration_is_one_sentence(tmp_path):
    with (
        hydra.initialize_config_dir(str(tmp_path), version_base="1.3"),
        pytest.raises(HydraException) as caught,
    ):
        hydra.compose("maml")
    described = describe_error(caught.value)
    assert described.startswith(f"{tmp_path} holds no maml.yaml: write one with hydra.searchpath: ")


def test_a_relative_path_of_a_primary_configuration_is_one_sentence():
    with (
        hydra.initialize_config_module("metadist.cli.own", version_base="1.3"),
        pytest.raises(HydraException) as caught,
    ):
        hydra.compose("maml")
    assert describe_error(caught.value).startswith("--config-path needs an absolute directory, as")
