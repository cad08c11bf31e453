"""Parser of call specifications of the command line, for example ``k_sync(k=12)``: a factory and its knobs."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from inspect import Parameter, signature
from typing import Any, TypeVar

from paceline.errors import UsageError, did_you_mean
from paceline.utils.argument_types import fits, is_checked, refuse_wrong_types

T = TypeVar("T")
Value = bool | int | float | str | list["Value"] | dict[str, "Value"] | None

DEEPEST = 21
_WORDS = {"true": True, "false": False, "none": None}
_CLOSER = {"(": ")", "[": "]", "{": "}"}
_CALL = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\((.*)\)\s*)?", re.DOTALL)
_WORD = re.compile(r"[\w./:~@-]+")


@dataclass(frozen=True)
class Call:
    """Parsed call: a name with keyword arguments."""

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def parse_call(text: str, example: str = "k_sync(k=12)") -> Call:
    """Parse ``name`` or ``name(knob=value, ...)``.

    A value is a number, ``inf``, ``true``, ``false``, ``none``, a bare word, a quoted string, a list in brackets, or
    ``{name=value}``.

    Args:
        text: call to parse.
        example: call of this kind for messages.

    >>> parse_call("k_sync(k=12)")
    Call(name='k_sync', kwargs={'k': 12})
    >>> parse_call("bsp")
    Call(name='bsp', kwargs={})
    """
    match = _CALL.fullmatch(text)
    if match is None:
        name, parenthesis, knobs = text.partition("(")
        meant = name.replace("-", "_") + parenthesis + knobs
        if _CALL.fullmatch(meant):
            raise UsageError(f"cannot read {text!r}; did you mean {meant!r}?")
        raise UsageError(f"cannot read {text!r}: type a name, or a name with its knobs, as in {example}")
    return Call(match[1], _arguments(match[2] or "", text, f"{match[1]}(...)", example))


def _arguments(inside: str, text: str, place: str, example: str) -> dict[str, Value]:
    kwargs: dict[str, Value] = {}
    for argument in split_top(inside, ",") if inside.strip() else []:
        knob, value = _argument(place, argument, example)
        if knob in kwargs:
            raise UsageError(f"{knob} is given twice in {text!r}: type it once")
        kwargs[knob] = value
    return kwargs


def _argument(place: str, text: str, example: str) -> tuple[str, Value]:
    knob, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not knob.isidentifier():
        raise UsageError(f"{text.strip()!r} has no name in {place}: type it as knob=value, as in {example}")
    return knob, _value(value)


def _value(text: str) -> Value:
    if text[:1] == "[" and text[-1:] == "]":
        inside = text[1:-1]
        return [_value(part.strip()) for part in split_top(inside, ",")] if inside.strip() else []
    if text[:1] == "{" and text[-1:] == "}":
        return _arguments(text[1:-1], text, "{...}", "{GPU=1}")
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    if len(text) > 1 and text[0] in "\"'" and text.find(text[0], 1) == len(text) - 1:
        return text[1:-1]
    if _WORD.fullmatch(text):
        return text
    raise UsageError(
        f"{text!r} is not a value: type a number, inf, true, false, none, a word, 'text' in quotes, [a, list], or "
        "{name=value}"
    )


def split_top(text: str, separator: str) -> list[str]:
    """Split a text at the separators outside brackets and quotes.

    >>> split_top("4*exp(mean=1e+5) + 4*exp(mean=5)", "+")
    ['4*exp(mean=1e+5) ', ' 4*exp(mean=5)']
    """
    parts, start, quote, awaited = [], 0, "", [""]
    for position, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in _CLOSER:
            awaited.append(_CLOSER[char])
            if len(awaited) > DEEPEST:
                raise UsageError(f"{text[:40]!r}... has more than {DEEPEST - 1} nested brackets: type fewer")
        elif char in _CLOSER.values():
            if char != awaited.pop():
                raise UsageError(f"unbalanced {char!r} in {text!r}: expected balanced brackets")
        elif len(awaited) == 1 and position >= start and text.startswith(separator, position):
            parts.append(text[start:position])
            start = position + len(separator)
    if quote or len(awaited) > 1:
        raise UsageError(f"{text!r} ends too early: type the missing {quote or awaited[-1]}")
    return [*parts, text[start:]]


def bind(call: Call, factories: Mapping[str, Callable[..., T]]) -> T:
    """Call the factory of a parsed call with its knobs, after a check against the signature.

    The unit of a knob is optional: ``mean`` stands for ``mean_s`` if the factory has only the latter.

    Raises:
        UsageError: the name or a knob is unknown, given twice, missing, or of a wrong type.

    >>> bind(parse_call("pair(left=1, wait=2)"), {"pair": lambda left, wait_s: (left, wait_s)})
    (1, 2)
    """
    if call.name not in factories:
        raise UsageError(f"{call.name!r} is not known{did_you_mean(call.name, factories)}")
    factory = factories[call.name]
    parameters = signature(factory).parameters
    bound: dict[str, Any] = {}
    typed: dict[str, str] = {}
    for knob, value in call.kwargs.items():
        name = _parameter(call.name, knob, parameters)
        if name in bound:
            raise UsageError(f"{name} is given twice to {call.name}: type it once")
        bound[name], typed[name] = value, knob
    missing = [n for n, p in parameters.items() if p.default is Parameter.empty and n not in bound]
    if missing:
        raise UsageError(f"{call.name} needs {', '.join(missing)}: type {call.name}({missing[0]}=...)")
    if is_checked(factory):
        bound = {name: _as_text(factory, name, value) for name, value in bound.items()}
        refuse_wrong_types(factory, (), bound, call.name, typed)
    try:
        return factory(**bound)
    except UsageError as error:
        name = str(error).partition("=")[0]
        if typed.get(name, name) == name:
            raise
        raise UsageError(f"{call.name}: {str(error).replace(f'{name}=', f'{typed[name]}=')}") from error


def _as_text(factory: Callable[..., Any], name: str, value: Any) -> Any:
    """Return a number as text if the parameter is a text, for example a folder named 2024."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_text = is_number and not fits(factory, name, value) and fits(factory, name, str(value))
    return str(value) if is_text else value


def _parameter(name: str, knob: str, parameters: Mapping[str, Parameter]) -> str:
    for candidate in (knob, f"{knob}_s"):
        if candidate in parameters:
            return candidate
    if not parameters:
        raise UsageError(f"{name} has no knobs, but was given {knob!r}: type {name}")
    raise UsageError(f"{name} has no knob {knob!r}{did_you_mean(knob, parameters)}")


def short_repr(instance: Any, name: str = "", without: Collection[str] = ()) -> str:
    """Return a dataclass as its call, without fields at their defaults.

    Args:
        instance: dataclass instance.
        name: name of the call; that of the class if empty.
        without: names of fields to omit.

    >>> short_repr(Call("bsp"))
    "Call(name='bsp')"
    """
    knobs = []
    for each in fields(instance):
        if not (each.init and each.repr) or each.name in without:
            continue
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        value = getattr(instance, each.name)
        if value != default:
            knobs.append(f"{each.name}={getattr(value, '__qualname__', None) or repr(value)}")
    return f"{name or type(instance).__name__}({', '.join(knobs)})"
