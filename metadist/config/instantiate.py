"""Instantiates the objects that the configuration describes.

`hydra.utils.instantiate` does not check values against the signature, and its errors span several
lines; here a wrong key or value is one sentence that names the configuration key.
"""

import contextlib
import functools
import inspect
import pydoc
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from metadist.config.schema import NOT_IN_DEFAULTS
from metadist.errors import UserError, did_you_mean, one_line, user_frame

_TARGET = "_target_"
_PARTIAL = "_partial_"
_UNSUPPORTED = {"_args_", "_recursive_", "_convert_"}
"""Keys of `hydra.utils.instantiate` that would bypass the check of the arguments."""

_LIBRARIES = ("metadist", "torch", "torchvision", "timm")
"""Packages whose classes are not the user's own."""

OwnDefaults = dict[str, dict[str, bool | int | float | str]]
"""For each node of a class of the user's own, by its path: the defaults of the class's options that
are numbers, texts or booleans, by name."""


def instantiate(
    node: DictConfig | Mapping[str, Any],
    path: str,
    *,
    locate: Callable[[str, str], Any] | None = None,
    own_defaults: OwnDefaults | None = None,
    **given: Any,
) -> Any:
    """Call the target of a configuration node with its checked arguments.

    Args:
        node: `_target_`, the dotted path of a class or function, and values of its parameters.
            With `_partial_: true` the result is a `functools.partial` of the target.
        path: the node's dotted path in the configuration, for error messages ("trainer").
        locate: imports the target of a node and of the nodes in its values. Default:
            `locate_target`.
        own_defaults: gets the defaults of the options of the node's class if the class is the
            user's own, except those that this function would refuse or convert as values.
        given: arguments that do not come from the configuration. Those that the target does not
            accept are left out; keys of the node take precedence.

    Raises:
        UserError: the target cannot be imported, a key is unknown or missing, a value does not
            fit, or the target itself rejects its arguments. Other errors in the user's own code
            keep their type.
    """
    target, arguments = bind_arguments(node, path, given, locate, own_defaults)
    if node.get(_PARTIAL):
        return functools.partial(target, **arguments)
    try:
        return target(**arguments)
    except UserError:
        raise
    # The last two: a size that exceeds the memory, or a division by zero.
    except (TypeError, ValueError, RuntimeError, MemoryError, ArithmeticError) as error:
        reason = one_line(error)
        if location := user_frame(error):
            if not _was_raised(error):
                raise  # a bug in the user's code, not a refusal of the arguments
            reason += f" ({location})"
        raise UserError(f"{path}: invalid arguments for {_name(target)}: {reason}") from error


def _was_raised(error: BaseException) -> bool:
    """Whether a `raise` statement raised the error, and not the evaluation of an expression."""
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    return line.startswith("raise")


def bind_arguments(
    node: DictConfig | Mapping[str, Any],
    path: str,
    given: Mapping[str, Any],
    locate: Callable[[str, str], Any] | None = None,
    own_defaults: OwnDefaults | None = None,
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The target of a node and its checked arguments, without the call.

    Values that are nodes themselves are instantiated, also in lists and dictionaries. `locate`
    imports a target, given its dotted path and the node's path. The other arguments and the errors
    are those of `instantiate`.
    """
    locate = locate or locate_target
    values: Any = _values(node, path) if OmegaConf.is_config(node) else node
    if not isinstance(values, Mapping) or _TARGET not in values:
        advice = f"name its class, as in +{path}.{_TARGET}=CLASS"
        if "." not in path:
            group = path.removeprefix("default_")  # +partition=NAME replaces default_partition
            plus = "+" if group in NOT_IN_DEFAULTS else ""
            advice = f"choose one of the options of {group}, as in {plus}{group}=NAME"
        raise UserError(
            f"{path} must name a {_TARGET} and its arguments, got {values!r}: {advice}."
        )
    if unsupported := [key for key in values if key in _UNSUPPORTED]:
        raise UserError(f"{path}.{unsupported[0]} is not supported: give the arguments by name.")
    partial = values.get(_PARTIAL, False)
    if not isinstance(partial, bool):
        raise UserError(f"{path}.{_PARTIAL}={partial} does not fit: write true or false.")
    target = locate(str(values[_TARGET]), path)
    accepted = _signature(target, path)
    chosen = {
        key: _instantiate_nodes(value, f"{path}.{key}", locate)
        for key, value in values.items()
        if key not in (_TARGET, _PARTIAL)
    }
    names = _accepted_names(target, accepted)
    arguments = {key: value for key, value in given.items() if key in names} | chosen
    _check_keys(target, accepted, chosen, given, path)
    if not partial:
        _check_missing(target, accepted, arguments, path)
    if own_defaults is not None and str(values[_TARGET]).partition(".")[0] not in _LIBRARIES:
        options = {name: accepted[name].default for name in accepted if name not in given}
        own_defaults[path] = _plain_defaults(target, options, path)
    return target, arguments | _converted(target, chosen, path)


def _plain_defaults(
    target: Any, options: Mapping[str, Any], path: str
) -> dict[str, bool | int | float | str]:
    """The defaults that are plain values and that `instantiate` would pass on unchanged."""
    defaults = {}
    for name, default in options.items():
        if isinstance(default, bool | int | float | str):
            with contextlib.suppress(UserError):
                option = {name: default}
                if option | _converted(target, option, path) == option:
                    defaults[name] = default
    return defaults


def _values(node: Any, path: str) -> Any:
    """A node's values as plain containers.

    Raises:
        UserError: a mandatory value (`???`) was not given.
    """
    try:
        return OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        missing = str(error.full_key or path)
        raise UserError(f"{missing} is missing: give it a value, as in {missing}=VALUE.") from None


def _instantiate_nodes(value: Any, path: str, locate: Callable[[str, str], Any]) -> Any:
    """Instantiate all nodes in a value, at any depth of lists and dictionaries."""
    if isinstance(value, Mapping):
        if _TARGET in value:
            return instantiate(value, path, locate=locate)
        return {
            key: _instantiate_nodes(item, f"{path}.{key}", locate) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            _instantiate_nodes(item, f"{path}.{index}", locate) for index, item in enumerate(value)
        ]
    return value


def locate_target(target: str, path: str) -> Any:
    """Import the class or function of a dotted path, also from the current directory.

    Args:
        target: the dotted path.
        path: the path of the node that names the target, for error messages.

    Raises:
        UserError: the target cannot be imported or is not callable.
    """
    if str(Path.cwd()) not in sys.path:  # a script has its own folder there instead
        sys.path.append(str(Path.cwd()))
    try:
        located = pydoc.locate(target)
    except pydoc.ErrorDuringImport as error:
        reason = f"{type(error.value).__name__}: {error.value}"
        if error.value is not None and (location := user_frame(error.value)):
            reason = f"{location}: {reason}"
        raise UserError(
            f"{path}.{_TARGET}={target} cannot be imported ({reason}): correct that module, or "
            "install what it imports."
        ) from error.value
    if located is None:
        raise UserError(f"{path}.{_TARGET}={target} cannot be imported: {_missing(target)}")
    if not callable(located):
        raise UserError(f"{path}.{_TARGET}={target} is not a class or function.")
    return located


def _missing(target: str) -> str:
    """Say which part of a dotted path does not exist: the module, or a name in it."""
    parts = target.split(".")
    for count in range(len(parts) - 1, 0, -1):
        parent, name = ".".join(parts[:count]), parts[count]
        owner = pydoc.locate(parent)
        if owner is not None:
            kind = "module" if inspect.ismodule(owner) else "class"
            names = [
                attribute
                for attribute in dir(owner)
                if not attribute.startswith("_")
                and not inspect.ismodule(inspect.getattr_static(owner, attribute, None))
            ]
            return f"the {kind} {parent} has no {name}{did_you_mean(name, names)}."
    if len(parts) == 1:
        return "give the dotted path of a class or function, as in my_module.MyClass."
    return (
        f"there is no module {parts[0]}: install it, or start the command in the folder that "
        f"contains {parts[0]}{'.py' if len(parts) == 2 else ''}, or put that folder in PYTHONPATH."
    )


def _signature(target: Any, path: str) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(target).parameters
    except ValueError:
        raise UserError(
            f"{path}.{_TARGET}={_name(target)} has no signature to check arguments against: wrap "
            "it in a function."
        ) from None


def _accepted_names(target: Any, accepted: Mapping[str, inspect.Parameter]) -> set[str]:
    """The names of the signature; if a class has **kwargs, also the names of its base classes."""
    names = set(accepted)
    if inspect.isclass(target) and any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        for base in target.__mro__[1:]:
            if "__init__" in vars(base):
                names |= inspect.signature(vars(base)["__init__"]).parameters.keys()
    return names


def _check_keys(
    target: Any,
    accepted: Mapping[str, inspect.Parameter],
    chosen: Mapping[str, Any],
    given: Mapping[str, Any],
    path: str,
) -> None:
    unknown = [key for key in chosen if key not in accepted]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        options = [name for name in accepted if name not in given]
        raise UserError(
            f"{path}.{unknown[0]} is not an option of {_name(target)}"
            f"{did_you_mean(unknown[0], options)}: "
            f"{'its options are ' + ', '.join(options) if options else 'it has no options'}."
        )


def _check_missing(
    target: Any, accepted: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any], path: str
) -> None:
    missing = [
        name
        for name, parameter in accepted.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and name not in arguments
    ]
    if missing:
        uncalled = "" if inspect.isclass(target) else f"; +{path}._partial_=true takes it uncalled"
        raise UserError(
            f"{path}.{missing[0]} is missing: {_name(target)} requires it, as in "
            f"++{path}.{missing[0]}=VALUE{uncalled}."
        )


_TEXT_ERRORS = ("string_type", "path_type")
"""pydantic's errors of values that are neither a text nor a path."""


def _converted(target: Any, chosen: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The configured values, converted to the types of the signature."""
    hints = _type_hints(target)
    converted = {}
    for key, value in chosen.items():
        if key not in hints:
            continue
        try:
            converted[key] = _adapter(hints[key]).validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            reason = f"{first['msg'][0].lower()}{first['msg'][1:]}"
            if first["type"] == "list_type" or first.get("ctx", {}).get("class") == "Sequence":
                reason = f"it must be a list, as in {path}.{key}=[{value}]"
            elif first["type"] == "tuple_type":
                reason = "it must be a list, in square brackets"
            elif isinstance(value, int | float) and first["type"] in _TEXT_ERRORS:
                reason = f"it must be a text, as in '{path}.{key}=\"{value}\"'"
            for other in error.errors()[1:]:  # of `int | Literal["auto"]`
                if other["type"] == "literal_error":
                    reason += f", or {other['ctx']['expected']}"
            raise UserError(f"{path}.{key}={value} does not fit: {reason}.") from None
        # pydantic accepts true as the number 1.
        if isinstance(value, bool) and type(converted[key]) in (int, float):
            raise UserError(f"{path}.{key}={value} does not fit: it must be a number.")
    return converted


def _type_hints(target: Any) -> dict[str, Any]:
    """The types of a signature, without types that cannot be resolved.

    Such types are, for example, names that are imported for type checkers only.
    """
    if isinstance(target, functools.partial):
        target = target.func
    function = inspect.unwrap(target.__init__ if inspect.isclass(target) else target)
    if not inspect.isroutine(function):
        function = type(function).__call__
    hints: dict[str, Any] = {}
    for name, hint in getattr(function, "__annotations__", {}).items():
        holder = SimpleNamespace(__annotations__={name: hint})
        scope = getattr(function, "__globals__", {})
        with contextlib.suppress(Exception):
            hints |= get_type_hints(holder, globalns=scope, include_extras=True)
    return hints


def _adapter(hint: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # the type has a configuration of its own
        return TypeAdapter(hint)


def _name(target: Any) -> str:
    return getattr(target, "__qualname__", str(target))
