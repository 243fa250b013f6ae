"""From a node of the configuration to an object: found, checked against its signature, called."""

import inspect
import pydoc
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from metadist.errors import UserError

_TARGET = "_target_"


def build(node: DictConfig | Mapping[str, Any], path: str, **given: Any) -> Any:
    """Build the object that a node of the configuration describes.

    Args:
        node: `_target_`, the dotted path of a class or function, and the values for its
            parameters.
        path: where the node is in the configuration, for messages ("trainer").
        given: arguments that do not come from the configuration, for those of these names that
            the target takes; keys of the node win.

    Raises:
        UserError: no such target, a key that it does not take, one that it lacks, a value that
            does not fit, or what the target itself has to say against its arguments.
    """
    target, arguments = bind(node, path, given)
    try:
        return target(**arguments)
    except UserError:
        raise
    # Besides what is raised against values: a size that no memory holds, a division by zero.
    except (TypeError, ValueError, RuntimeError, MemoryError, ArithmeticError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{path}: {_name(target)} refuses its arguments: {reason}") from error


def bind(
    node: DictConfig | Mapping[str, Any], path: str, given: Mapping[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What `build` would call, and with which arguments; nodes among the values are built.

    Args: as of `build`.
    """
    values = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    if not isinstance(values, Mapping) or _TARGET not in values:
        raise UserError(
            f"{path} must name a {_TARGET} and its arguments, got {values!r}: choose one of the "
            f"options of {path}, as in {path}=NAME."
        )
    target = find_target(str(values[_TARGET]), path)
    accepted = inspect.signature(target).parameters
    chosen = {
        key: build(value, f"{path}.{key}") if _is_node(value) else value
        for key, value in values.items()
        if key != _TARGET
    }
    arguments = {key: value for key, value in given.items() if key in accepted} | chosen
    _check_keys(target, chosen, arguments, path)
    return target, arguments | _converted(target, chosen, path)


def find_target(target: str, path: str) -> Any:
    """The class or function of a dotted path; modules in the current directory count.

    Raises:
        UserError: it cannot be imported, or is nothing to call.
    """
    if str(Path.cwd()) not in sys.path:  # a script's own folder stands there instead
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
        raise UserError(f"{path}.{_TARGET}={target} is no class or function.")
    return found


def _check_keys(
    target: Any, chosen: Mapping[str, Any], arguments: Mapping[str, Any], path: str
) -> None:
    parameters = inspect.signature(target).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [key for key in chosen if key not in parameters]
    if unknown and not open_ended:
        options = ", ".join(parameters)
        raise UserError(f"{path}.{unknown[0]} is no option of {_name(target)}: it takes {options}.")
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and name not in arguments
    ]
    if missing:
        raise UserError(
            f"{path}.{missing[0]} is missing: {_name(target)} needs it, as in "
            f"+{path}.{missing[0]}=VALUE."
        )


def _converted(target: Any, chosen: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The configured values as the signature's types have them."""
    function = target.__init__ if inspect.isclass(target) else target
    hints = get_type_hints(function, include_extras=True)
    converted = {}
    for key in chosen.keys() & hints.keys():
        try:
            converted[key] = _adapter(hints[key]).validate_python(chosen[key])
            # A flag passes for a number elsewhere.
            if isinstance(chosen[key], bool) and type(converted[key]) in (int, float):
                raise UserError(f"{path}.{key}={chosen[key]} does not fit: it must be a number.")
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise UserError(
                f"{path}.{key}={chosen[key]} does not fit: {reason[0].lower()}{reason[1:]}."
            ) from None
    return converted


def _adapter(hint: Any) -> TypeAdapter:
    try:
        return TypeAdapter(hint, config=_CONFIG)
    except PydanticUserError:  # the type brings a configuration of its own
        return TypeAdapter(hint)


_CONFIG = ConfigDict(arbitrary_types_allowed=True)


def _is_node(value: Any) -> bool:
    return isinstance(value, Mapping) and _TARGET in value


def _name(target: Any) -> str:
    return getattr(target, "__qualname__", str(target))
