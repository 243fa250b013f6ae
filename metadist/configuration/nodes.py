"""From a node of the configuration to an object: found, checked against its signature, called."""

import inspect
from collections.abc import Mapping
from typing import Any, get_type_hints

import hydra.utils
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
        given: arguments that do not come from the configuration; keys of the node win.

    Raises:
        UserError: no such target, a key that it does not take, one that it lacks, a value that
            does not fit, or what the target itself has to say against its arguments.
    """
    values = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    if not isinstance(values, Mapping) or _TARGET not in values:
        raise UserError(
            f"{path} must name a {_TARGET} and its arguments, got {values!r}: choose one of the "
            f"options of {path}, as in {path}=NAME."
        )
    target = find_target(str(values[_TARGET]), path)
    arguments = {
        key: build(value, f"{path}.{key}") if _is_node(value) else value
        for key, value in values.items()
        if key != _TARGET
    }
    accepted = inspect.signature(target).parameters
    arguments = {
        **{key: value for key, value in given.items() if key in accepted},
        **arguments,
    }
    check(target, arguments, path, checked=set(values))
    arguments.update(_converted(target, arguments, path, set(values)))
    try:
        return target(**arguments)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {values[_TARGET]} refuses its arguments: {error}") from error


def find_target(target: str, path: str) -> Any:
    """The class or function of a dotted path.

    Raises:
        UserError: it cannot be imported, or is nothing to call.
    """
    try:
        found = hydra.utils.get_object(target)
    except Exception as error:
        raise UserError(
            f"{path}.{_TARGET}={target} cannot be imported "
            f"({str(error).splitlines()[0]}): give the dotted path of a class or function."
        ) from None
    if not callable(found):
        raise UserError(f"{path}.{_TARGET}={target} is no class or function.")
    return found


def check(target: Any, arguments: Mapping[str, Any], path: str, checked: set[str]) -> None:
    """Hold a node's keys against a signature.

    Args:
        target: what would be called.
        arguments: all arguments that it would get.
        path: where the node is in the configuration.
        checked: the keys that the user can change; only these are named in messages.

    Raises:
        UserError: a key too many or one too few.
    """
    parameters = inspect.signature(target).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [key for key in arguments if key in checked and key not in parameters]
    if unknown and not open_ended:
        options = ", ".join(name for name in parameters if name not in ("self", "args", "kwargs"))
        raise UserError(
            f"{path}.{unknown[0]} is no option of {_name(target)}: it takes {options}."
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
            f"{path}.{missing[0]} is missing: {_name(target)} needs it, as in "
            f"+{path}.{missing[0]}=VALUE."
        )


def _converted(
    target: Any, arguments: Mapping[str, Any], path: str, checked: set[str]
) -> dict[str, Any]:
    """The user's values as the signature's types have them."""
    function = target.__init__ if inspect.isclass(target) else target
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError):
        return {}
    converted = {}
    for key in checked & arguments.keys() & hints.keys():
        try:
            adapter = TypeAdapter(hints[key], config=_CONFIG)
        except PydanticUserError:
            adapter = TypeAdapter(hints[key])
        try:
            converted[key] = adapter.validate_python(arguments[key])
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise UserError(
                f"{path}.{key}={arguments[key]} does not fit: {reason[0].lower()}{reason[1:]}."
            ) from None
    return converted


_CONFIG = ConfigDict(arbitrary_types_allowed=True)


def _is_node(value: Any) -> bool:
    return isinstance(value, Mapping) and _TARGET in value


def _name(target: Any) -> str:
    return getattr(target, "__qualname__", str(target))
