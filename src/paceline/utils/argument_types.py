"""Runtime checks of argument types by their annotations."""

import ast
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial, wraps
from importlib import import_module
from itertools import chain
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from reprlib import Repr
from types import FunctionType, NoneType, UnionType
from typing import (
    Any,
    Literal,
    NamedTuple,
    SupportsFloat,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from paceline.errors import UsageError, did_you_mean
from paceline.utils.wording import counted, join_words

T = TypeVar("T")

NAMESPACES = ("plans", "timing", "controllers", "callbacks", "results")  # of public names; the last ones import torch

_CONTAINERS = (tuple, list, Sequence, Mapping, Iterable, Collection)
_WORDS: Mapping[object, tuple[str, str]] = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    SupportsFloat: ("a number", "numbers"),
    bool: ("true or false", "true or false"),
    str: ("text", "texts"),
    Path: ("a path", "paths"),
    NoneType: ("None", "None"),
    Callable: ("a function", "functions"),
}
_EXAMPLES: Mapping[str, str] = {
    "Callback": "pl.callbacks.PerfettoTrace('run.json')",
    "Cluster": "pl.Cluster(4)",
    "Compensator": "pl.dc_asgd(lambda0=0.04)",
    "Distribution": "pl.timing.Exponential(mean_s=1.0)",
    "Duration": "pl.plans.Duration('updates', 100)",
    "Fault": "pl.Fault(worker=0, draw=3)",
    "Job": "pl.jobs.digits()",
    "Phase": "pl.bsp().until(0.25)",
    "Protocol": "pl.bsp()",
    "Stop": "pl.Stop(updates=100)",
    "TraceRow": "the rows of pl.timing.Trace.from_csv('times.csv')",
}


class _Misfit(NamedTuple):
    """Value that its annotation does not accept; ``path`` is its place in the argument, for example ``[0]``."""

    path: str
    value: object
    hint: object


class _Parameters(NamedTuple):
    """Parameters of a call, with their annotations and defaults."""

    positional: tuple[str, ...]
    by_name_only: tuple[str, ...]  # those without a default
    names: frozenset[str] | None  # of all arguments that can be given by name; None if any name is accepted
    variadic: str  # name of the parameter after a star; empty without one
    hints: Mapping[str, object]
    defaults: Mapping[str, object]


@overload
def checked_types(target: T, /) -> T: ...
@overload
def checked_types(**advice: str) -> Callable[[T], T]: ...
def checked_types(target: Any = None, /, **advice: str) -> Any:
    """Decorate a public function or class so that arguments of a wrong type raise a UsageError.

    The annotations define the types. An int is a float, a bool is not a number, numpy scalars are numbers, text is not
    a sequence, and every element of a container is checked.

    Args:
        target: function or class to decorate.
        advice: text after "expected TYPE" in the message, by name of the argument.

    >>> @checked_types
    ... def scale(factor: float, workers: Sequence[int] = ()) -> float:
    ...     return factor
    >>> scale(2)
    2
    >>> scale("2")
    Traceback (most recent call last):
    paceline.errors.UsageError: scale: factor='2', expected a number
    >>> scale(2, workers=[0, "a"])
    Traceback (most recent call last):
    paceline.errors.UsageError: scale: workers[1]='a', expected a whole number
    """
    if target is None:
        return partial(_decorated, advice=advice)
    return _decorated(target, {})


def _decorated(target: Any, advice: Mapping[str, str]) -> Any:
    target.__paceline_advice__ = advice
    if not isinstance(target, type):
        return _checked(target, target, skipped=0)
    maker = "__new__" if issubclass(target, tuple) else "__init__"  # of a named tuple, or of any other class
    setattr(target, maker, _checked(getattr(target, maker), target, skipped=1))
    return target


def _checked(function: Callable[..., Any], target: object, skipped: int) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _refuse_wrong_names(target, args[skipped:], kwargs)
        refuse_wrong_types(target, args[skipped:], kwargs)
        return function(*args, **kwargs)

    return call


def _refuse_wrong_names(target: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raise a TypeError, as Python does, for an unknown argument and for positional arguments that need a name."""
    parameters = _parameters(target)
    if parameters.names is not None and not kwargs.keys() <= parameters.names:
        unknown = next(name for name in kwargs if name not in parameters.names)
        advice = did_you_mean(unknown, parameters.names) if parameters.names else "; it takes no arguments"
        raise TypeError(f"{target.__name__} has no argument {unknown!r}{advice}")
    most = len(parameters.positional)
    if len(args) > most and parameters.by_name_only and not parameters.variadic:
        names = join_words([f"{name}=..." for name in parameters.by_name_only])
        limit = f"at most {counted(most, 'argument')}" if most else "no arguments"
        raise TypeError(f"{target.__name__} takes {limit} without a name, but {len(args)} were given; type {names}")


def refuse_wrong_types(
    target: Any,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    called: str = "",
    names: Mapping[str, str] | None = None,
) -> None:
    """Raise a UsageError at the first argument of a wrong type.

    Args:
        target: decorated function or class.
        args: positional arguments.
        kwargs: keyword arguments.
        called: name of the target in the message; its own name if empty.
        names: names of arguments in the message, by parameter name.
    """
    parameters = _parameters(target)
    beyond = [(parameters.variadic, value) for value in args[len(parameters.positional) :]]
    for name, value in chain(zip(parameters.positional, args, strict=False), beyond, kwargs.items()):
        misfit = _misfit(value, parameters.hints.get(name, Any))
        if misfit is not None:
            shown = (names or {}).get(name, name)
            advice = target.__paceline_advice__.get(name) or _advice(shown, misfit, parameters.defaults.get(name))
            raise UsageError(
                f"{called or target.__name__}: {shown}{misfit.path}={truncated_repr(misfit.value)}, "
                f"expected {describe_type(_without_none(misfit.hint))}{advice}"
            )


def is_checked(target: object) -> bool:
    """Return whether a function or class is decorated."""
    return hasattr(target, "__paceline_advice__")


def fits(target: Any, name: str, value: object) -> bool:
    """Return whether a value has the type of an argument of a decorated function or class."""
    return _misfit(value, _parameters(target).hints.get(name, Any)) is None


def _advice(name: str, misfit: _Misfit, default: object) -> str:
    if isinstance(misfit.value, FunctionType | type):
        return f"; call it: {misfit.value.__name__}(...)"
    if example := _example(misfit.hint):
        return f", for example {example}"
    return "" if default is None or misfit.path else f", as {name}={truncated_repr(default)}"


def _example(hint: Any) -> str:
    """Return an example of a public class, or of a list of its instances; empty for other types."""
    if isinstance(hint, type) and get_origin(hint) is None:
        return _EXAMPLES.get(vars(hint).get("public_name", hint.__name__), "")
    found = next(filter(None, map(_example, get_args(hint))), "")
    return f"[{found}]" if found.startswith("pl.") and get_origin(hint) in _CONTAINERS else found


def _without_none(hint: Any) -> Any:
    """Return the other types of an optional argument, for messages on other values."""
    choices = [each for each in get_args(hint) if each is not NoneType]
    is_optional = isinstance(hint, UnionType) or get_origin(hint) is Union
    return Union[tuple(choices)] if is_optional else hint  # noqa: UP007  # of a number of types


@cache
def _parameters(target: Any) -> _Parameters:
    """Return the parameters of a function or class; the annotations are resolved at the first call."""
    signature = inspect.signature(target)
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    variadic = [name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_POSITIONAL]
    return _Parameters(
        positional=tuple(name for name, kind in kinds.items() if kind in by_position),
        by_name_only=tuple(
            name
            for name, parameter in signature.parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.default is inspect.Parameter.empty
        ),
        names=None
        if inspect.Parameter.VAR_KEYWORD in kinds.values()
        else frozenset(name for name, kind in kinds.items() if kind in by_name),
        variadic=variadic[0] if variadic else "",
        hints={name: hint for name, hint in _hints(target).items() if name in kinds},
        defaults={n: p.default for n, p in signature.parameters.items() if p.default is not inspect.Parameter.empty},
    )


def _hints(target: Any) -> Mapping[str, object]:
    is_plain_class = isinstance(target, type) and "__init__" in vars(target) and not hasattr(target, "_fields")
    if is_plain_class and not hasattr(target, "__dataclass_fields__"):
        target = target.__init__
    try:
        return get_type_hints(target)
    except NameError:
        return get_type_hints(target, localns=_names_for_type_checkers(target.__module__))


def _names_for_type_checkers(module: str) -> dict[str, Any]:
    """Return the names that a module imports or defines under ``if TYPE_CHECKING``."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    names = dict(vars(sys.modules[module]))
    for block in tree.body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            exec(compile(ast.Module(block.body, type_ignores=[]), module, "exec"), names)
    return names


def _misfit(value: object, hint: Any) -> _Misfit | None:
    """Return the part of a value that an annotation does not accept; None if it accepts all."""
    if type(value) is hint or hint is Any or hint is object:
        return None
    origin = get_origin(hint)
    if origin is Union or origin is UnionType:
        return _misfit_of_union(value, get_args(hint), hint)
    if isinstance(hint, TypeVar):
        return _misfit_of_union(value, hint.__constraints__ or (hint.__bound__ or Any,), hint)
    if origin is Literal:
        is_choice = any(isinstance(value, type(choice)) and value == choice for choice in get_args(hint))
        return None if is_choice else _Misfit("", value, hint)
    if origin in _CONTAINERS:
        return _misfit_of_container(value, hint, origin)
    if origin is type:
        is_class = isinstance(value, type) and issubclass(value, get_args(hint)[0])
        return None if is_class else _Misfit("", value, hint)
    return None if _is_one(value, origin or hint) else _Misfit("", value, hint)


def _misfit_of_union(value: object, choices: Sequence[object], hint: object) -> _Misfit | None:
    misfits = [_misfit(value, choice) for choice in choices]
    if None in misfits:
        return None
    inner = [misfit for misfit in misfits if misfit is not None and misfit.path]
    return inner[0] if inner else _Misfit("", value, hint)


def _misfit_of_container(value: object, hint: Any, origin: Any) -> _Misfit | None:
    kind = Sequence if origin in (tuple, list) else origin
    if isinstance(value, str | bytes) or not isinstance(value, kind) or (kind is not Mapping and type(value) is dict):
        return _Misfit("", value, hint)
    kinds = get_args(hint)
    is_fixed = origin is tuple and kinds[-1] is not ...
    if is_fixed and isinstance(value, Sequence) and len(value) != len(kinds):
        return _Misfit("", value, hint)
    for path, each, item in _parts(value, kinds):
        misfit = _misfit(each, item)
        if misfit is not None:
            return misfit._replace(path=path + misfit.path)
    return None


def _parts(value: object, kinds: Sequence[object]) -> Iterator[tuple[str, object, object]]:
    """Yield the place of each element of a container, the element, and its annotation; nothing for an iterator."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield " key", key, kinds[0]
            yield f"[{truncated_repr(key)}]", each, kinds[1]
    elif isinstance(value, Sequence):
        for i, each in enumerate(value):
            yield f"[{i}]", each, kinds[i] if i < len(kinds) and kinds[-1] is not ... else kinds[0]


def _is_one(value: object, kind: Any) -> bool:
    if kind is int or kind is float:
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if kind is Path:
        return isinstance(value, PathLike)
    if kind is Callable:
        return callable(value)
    if getattr(kind, "_is_protocol", False) and isinstance(value, str | bytes | dict | type):
        return False  # these have the methods of many protocols by accident
    return isinstance(value, kind)


def describe_type(hint: Any, *, several: bool = False) -> str:
    """Return a text for an annotation.

    >>> describe_type(str | Sequence[float] | None)
    'text, a list of numbers or None'
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is Union or origin is UnionType:
        return _listed([describe_type(each, several=several) for each in args])
    if isinstance(hint, TypeVar):
        return _listed([describe_type(each, several=several) for each in hint.__constraints__ or (hint.__bound__,)])
    if origin is Literal:
        return _listed([repr(choice) for choice in args])
    if origin is type:
        return f"{'classes' if several else 'a class'} of {describe_type(args[0], several=True)}"
    if origin is Mapping:
        return f"{'dicts' if several else 'a dict'} from {describe_type(args[0])} to {describe_type(args[1])}"
    if origin is tuple and args[-1] is not ...:
        return f"({', '.join(describe_type(each) for each in args)})"
    if origin in _CONTAINERS:
        return f"{'lists' if several else 'a list'} of {describe_type(args[0], several=True)}"
    if (origin or hint) in _WORDS:
        return _WORDS[origin or hint][several]
    name = _title(origin or hint)
    return name if several else f"{'an' if name[0] in 'AEIOUn' else 'a'} {name}"  # an ndarray


def _title(kind: type) -> str:
    name: str = vars(kind).get("public_name", kind.__name__)
    if kind.__module__.startswith("paceline."):
        for space in ("paceline", *(f"paceline.{each}" for each in NAMESPACES)):
            if name in import_module(space).__all__:
                return f"{space}.{name}".replace("paceline", "pl", 1)
    return name


def _listed(words: Sequence[str]) -> str:
    return join_words(dict.fromkeys(words), "or")


def truncated_repr(value: object) -> str:
    """Return the repr of a value, cut to about 60 characters."""
    short = Repr()
    short.maxstring = short.maxother = short.maxlong = 60
    line = short.repr(value)
    return " ".join(line.split()) if "\n" in line else line
