"""Every YAML of conf/: its head's command, its targets, its keys."""

import inspect
import re
import shlex
from pathlib import Path

import pytest
import tiny
from omegaconf import DictConfig, OmegaConf
from tiny import CONF

from metadist.config.instantiate import bind_arguments, locate_target
from metadist.errors import UserError

FILES = sorted(CONF.rglob("*.yaml"))
NAMES = [str(path.relative_to(CONF)) for path in FILES]

# What the program gives to targets beside their configured keys.
GIVEN = dict.fromkeys(
    (
        "dataset",
        "input_shape",
        "outputs",
        "model",
        "regression",
        "params",
        "optimizer",
        "partitioner",
        "reducer",
    ),
    inspect.Parameter.empty,
)


# Where a group has other defaults than its class: what the group has. References aside.
OTHER_DEFAULTS = {
    "algorithm/anil": {"inner_lr": 0.5, "eval_inner_steps": 5},
    "algorithm/fomaml": {"eval_inner_steps": 3, "first_order": True},
    "algorithm/imaml": {"eval_inner_steps": 16, "cg_damping": 1.0},
    "algorithm/maml": {"eval_inner_steps": 3},
    "algorithm/maml_plus_plus": {"eval_inner_steps": 5},
    "algorithm/meta_sgd": {"eval_inner_steps": 1},
    "algorithm/pretrained": {"inner_lr": 0.01, "inner_steps": 0, "eval_inner_steps": 10},
    "algorithm/reptile": {"eval_inner_batch_size": 5},
    "model/timm": {"options": {}},
    "model/torchvision": {"options": {}},
    "optimizer/adam": {"fused": True},
    "optimizer/reptile": {"lr": 1.0},
    "optimizer/sgd": {"lr": 0.1, "momentum": 0.9},
    "partition/dim0": {"exclusive": True, "keepdim": False},
    "reducer/sum": {"of_items": True},
    "scheduler/linear": {"start_factor": 1.0, "end_factor": 0.0},
    "scheduler/none": {"factor": 1.0, "total_iters": 0},
    "scheduler/step": {"gamma": 0.5},
    "task/few_shot": {"queries": 5},
    "trainer/supervised": {
        "iterations": 1000,
        "meta_batch_size": 8,
        "eval_every": 200,
        "checkpoint_every": 200,
    },
}


def load(path: Path) -> dict:
    """The content of a file, with that of the file of its group that it starts from."""
    tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    bases = tree.pop("defaults", [])
    if path.parent == CONF or path.parent.name == "experiment":
        return tree
    for base in bases:
        if base != "_self_" and isinstance(base, str):
            tree = load(path.with_name(f"{base}.yaml")) | tree
    return tree


def command(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    head = lines[lines[0].startswith("# @package")]
    assert head.startswith("# "), f"{path} must begin with a command that uses it"
    return shlex.split(head[2:])


def nodes(tree, path=""):
    """Every node with a `_target_`, with its path."""
    if isinstance(tree, dict):
        if "_target_" in tree:
            yield path, tree
        for key, value in tree.items():
            yield from nodes(value, f"{path}.{key}" if path else key)
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from nodes(value, f"{path}[{index}]")


def compose(arguments: list[str]) -> DictConfig:
    script = next(argument for argument in arguments if argument.startswith("experiments/"))
    overrides = [
        argument for argument in arguments[arguments.index(script) + 1 :] if "=" in argument
    ]
    return tiny.compose(*overrides, name=Path(script).stem)


def test_there_are_files():
    assert len(FILES) > 15


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_the_head_is_a_command_that_composes_and_uses_the_file(path):
    arguments = command(path)
    if path.parent.name == "experiment":  # `test_presets` composes and builds it
        assert f"+experiment={path.stem}" in arguments
        return
    configuration = compose([argument.replace("=DIR", "=somewhere") for argument in arguments])
    # What the file is composed into fits its targets too, with every value resolved.
    for where, node in nodes(OmegaConf.to_container(configuration, resolve=True)):
        bind_arguments(node, where, GIVEN)
    group = path.parent.relative_to(CONF)
    if str(group) != ".":
        used = [
            argument
            for argument in arguments
            if re.match(rf"\+?{group}=\[?.*\b{path.stem}\b", argument)
        ]
        assert used or str(group) in configuration, f"{path}'s command does not use it"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_targets_take_their_keys(path):
    found = list(nodes(load(path)))
    if path.parent != CONF and path.parent.name != "experiment":
        assert found, f"{path} configures nothing"
    for where, node in found:
        open_values = {key for key, value in node.items() if "${" in str(value)}
        values = {key: value for key, value in node.items() if key not in open_values}
        given = GIVEN | dict.fromkeys(open_values, inspect.Parameter.empty)
        target, _ = bind_arguments(values, where or path.stem, given)
        assert callable(target)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_a_misspelt_key_is_refused(path):
    for where, node in nodes(load(path)):
        if any(
            p.kind is p.VAR_KEYWORD
            for p in inspect.signature(locate_target(node["_target_"], where)).parameters.values()
        ):
            continue
        with pytest.raises(UserError, match="not an option"):
            bind_arguments({**node, "misspelt": 1}, where or path.stem, GIVEN)


def test_groups_have_the_defaults_of_their_classes():
    found: dict[str, dict] = {}
    for path in FILES:
        if path.parent == CONF or path.parent.name == "experiment":
            continue
        for where, node in nodes(load(path)):
            parameters = inspect.signature(locate_target(node["_target_"], where)).parameters
            for key, value in node.items():
                default = getattr(parameters.get(key), "default", inspect.Parameter.empty)
                default = list(default) if isinstance(default, tuple) else default
                nested = isinstance(value, dict) and "_target_" in value
                if default not in (inspect.Parameter.empty, value) and not (
                    nested or "${" in str(value)
                ):
                    group = str(path.relative_to(CONF).with_suffix(""))
                    found.setdefault(group, {})[key] = value
    assert found == OTHER_DEFAULTS
