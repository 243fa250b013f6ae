"""Instantiates the objects that the configuration describes.

`hydra.utils.instantiate` does not check values against the signature, and its errors span several
lines; here a wrong key or value is one sentence that names the configuration key.
"""

import inspect
import pydoc
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf, open_dict
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from metadist.errors import UserError

_TARGET = "_target_"


def instantiate(node: DictConfig | Mapping[str, Any], path: str, **given: Any) -> Any:
    """Call the target of a configuration node with its checked arguments.

    Args:
        node: `_target_`, the dotted path of a class or function, and values of its parameters.
        path: the node's dotted path in the configuration, for error messages ("trainer").
        given: arguments that do not come from the configuration. Those that the target does not
            accept are left out; keys of the node take precedence.

    Raises:
        UserError: the target cannot be imported, a key is unknown or missing, a value does not
            fit, or the target itself rejects its arguments.
    """
    target, arguments = bind_arguments(node, path, given)
    try:
        return target(**arguments)
    except UserError:
        raise
    # Also a size that exceeds the memory, or a division by zero.
    except (TypeError, ValueError, RuntimeError, MemoryError, ArithmeticError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{path}: {_name(target)} refuses its arguments: {reason}") from error


def bind_arguments(
    node: DictConfig | Mapping[str, Any], path: str, given: Mapping[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The target of a node and its checked arguments, without the call.

    Values that are nodes themselves are instantiated. Arguments and errors as of `instantiate`.
    """
    values: Any = node
    if OmegaConf.is_config(node):
        values = OmegaConf.to_container(node, resolve=True)
    if not isinstance(values, Mapping) or _TARGET not in values:
        raise UserError(
            f"{path} must name a {_TARGET} and its arguments, got {values!r}: choose one of the "
            f"options of {path}, as in {path}=NAME."
        )
    target = locate_target(str(values[_TARGET]), path)
    accepted = inspect.signature(target).parameters
    chosen = {
        key: _built(value, f"{path}.{key}") for key, value in values.items() if key != _TARGET
    }
    arguments = {key: value for key, value in given.items() if key in accepted} | chosen
    _check_keys(target, chosen, arguments, path)
    return target, arguments | _converted(target, chosen, path)


def locate_target(target: str, path: str) -> Any:
    """Import the class or function of a dotted path, also from the current directory.

    Args:
        target: the dotted path.
        path: of the node that names it, for error messages.

    Raises:
        UserError: it cannot be imported or is not callable.
    """
    if str(Path.cwd()) not in sys.path:  # a script has its own folder there instead
        sys.path.append(str(Path.cwd()))
    try:
        found = pydoc.locate(target)
        reason = "there is no such name"
    except pydoc.ErrorDuringImport as error:
        found, reason = None, f"{type(error.value).__name__}: {error.value}"
    if found is None:
        raise UserError(
            f"{path}.{_TARGET}={target} cannot be imported ({reason}): give the dotted path of a "
            "class or function."
        )
    if not callable(found):
        raise UserError(f"{path}.{_TARGET}={target} is not a class or function.")
    return found


def drop_stale_keys(configuration: DictConfig, overrides: Sequence[str]) -> None:
    """Delete, in place, keys of an option whose target the command line replaces.

    `algorithm._target_=my_module.MyAlgorithm` replaces the target of the option `algorithm=maml`:
    the option's other keys are deleted unless the new target accepts them. Keys that the command
    line sets are kept, so that a misspelt one is still an error.

    Args:
        configuration: composed by Hydra.
        overrides: the command-line overrides that it was composed with.

    Raises:
        UserError: a target that cannot be imported.
    """
    pairs = [override.lstrip("+~").partition("=") for override in overrides]
    set_keys = {key for key, _, _ in pairs}
    for key, _, target in pairs:
        path = key.removesuffix(f".{_TARGET}")
        node = OmegaConf.select(configuration, path) if path != key else None
        if not isinstance(node, DictConfig):
            continue
        accepted = inspect.signature(locate_target(target, path)).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted):
            continue
        kept = {_TARGET, *(parameter.name for parameter in accepted)}
        kept |= {each.removeprefix(f"{path}.").split(".")[0] for each in set_keys}
        with open_dict(node):
            for name in [name for name in node if name not in kept]:
                del node[name]


def _check_keys(
    target: Any, chosen: Mapping[str, Any], arguments: Mapping[str, Any], path: str
) -> None:
    parameters = inspect.signature(target).parameters
    has_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [key for key in chosen if key not in parameters]
    if unknown and not has_kwargs:
        options = ", ".join(parameters)
        raise UserError(
            f"{path}.{unknown[0]} is not an option of {_name(target)}: its options are {options}."
        )
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and name not in arguments
    ]
    if missing:
        raise UserError(
            f"{path}.{missing[0]} is missing: {_name(target)} requires it, as in "
            f"+{path}.{missing[0]}=VALUE."
        )


def _converted(target: Any, chosen: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The configured values, converted to the types of the signature."""
    function = target.__init__ if inspect.isclass(target) else target
    hints = get_type_hints(function, include_extras=True)
    converted = {}
    for key in chosen.keys() & hints.keys():
        try:
            converted[key] = _adapter(hints[key]).validate_python(chosen[key])
            # pydantic accepts true as the number 1.
            if isinstance(chosen[key], bool) and type(converted[key]) in (int, float):
                raise UserError(f"{path}.{key}={chosen[key]} does not fit: it must be a number.")
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise UserError(
                f"{path}.{key}={chosen[key]} does not fit: {reason[0].lower()}{reason[1:]}."
            ) from None
    return converted


def _adapter(hint: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # the type has a configuration of its own
        return TypeAdapter(hint)


def _built(value: Any, path: str) -> Any:
    """A value with its nodes instantiated, those in lists too."""
    if isinstance(value, Mapping) and _TARGET in value:
        return instantiate(value, path)
    if isinstance(value, list):
        return [_built(each, f"{path}.{index}") for index, each in enumerate(value)]
    return value


def _name(target: Any) -> str:
    return getattr(target, "__qualname__", str(target))
