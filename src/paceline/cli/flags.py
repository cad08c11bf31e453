"""Translation of library messages for the command line: arguments become the flags of a command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import dropwhile, takewhile
from typing import Any

import typer

RECORDING = {"measure_steps": "--measure-steps", "out": "--out", "sample": "--sample"}  # of commands that record
FUNCTIONS = {"search": "search_switch", "search_cost": "search_costs", "report": "write_report"}
# Names of protocol arguments, durations and stop conditions too; options only at the start of a message.
AMBIGUOUS = {"k", "updates", "seconds", "first", "then", "target"}

LONGEST = 2000  # characters, since the time of the pattern grows with the square of the length

_TEXT = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_QUOTED = rf"(?<!\w)(?:{_TEXT})"  # an apostrophe in or after a word is not a quote
_IN_BRACKETS = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_CALL = rf"[\w.*:]*\w{_IN_BRACKETS}"
_OF_USER = r"\braised \w+: .*"  # message of the user's own code
_NUMBER = r"-?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|inf)\b(?![\w*(])"
_WORD = r"\.\.\.|\w[\w/%+-]*(?:[.:*][\w/%+-]+)*(?!\()"
_VALUE = rf"(?P<quoted>{_TEXT})|(?P<list>\[[^\[\]]*\])|(?P<call>{_CALL})|(?P<plain>{_NUMBER}|{_WORD})"


def in_flags(message: str, options: Mapping[str, str], command: str = "") -> str:
    """Replace the arguments that a message names as ``name=value`` by the flags of a command.

    Quoted text, arguments in brackets, arguments without a flag and messages of the user's own code stay unchanged.

    Args:
        message: text of an error or a warning of the library.
        options: flag by argument, for each argument that the command has a flag for.
        command: name of the command, which replaces the name of its function at the start of the message.

    >>> in_flags("run exists already; give overwrite=True", {"overwrite": "--overwrite"})
    'run exists already; give --overwrite'
    >>> in_flags('k_sync(k=4): give cluster="trace:FILE"', {"cluster": "--cluster", "k": "--k"})
    'k_sync(k=4): give --cluster trace:FILE'
    """
    head, rest = message[:LONGEST], message[LONGEST:]
    if rest:
        return in_flags(head, options, command) + rest
    function = FUNCTIONS.get(command, command)
    subject = re.match(r"(\w+): (\w+)[^\s=]*=", message)
    if subject and subject[1] == function:
        return f"{command.replace('_', '-')}: {in_flags(message.partition(': ')[2], options, command)}"
    known = {name: flag for name, flag in options.items() if name not in AMBIGUOUS or _begins_with(message, name)}
    if subject:  # an argument of something else, as in "k_sync: k=2.5, expected ..."
        known.pop(subject[2], None)
    if not known:
        return message
    names = "|".join(map(re.escape, known))
    argument = rf"(?<![\w.\-/@%:=])(?P<name>{names})(?:=(?!=)|(?P<spaced> = ))(?:{_VALUE})?"
    pattern = re.compile(rf"{_OF_USER}|{argument}|{_QUOTED}|{_CALL}", re.DOTALL)
    return pattern.sub(lambda found: _flag(found, known), message)


def _begins_with(message: str, name: str) -> bool:
    return re.match(rf"{re.escape(name)}(?:=| = )", message) is not None


def _flag(found: re.Match[str], flags: Mapping[str, str]) -> str:
    name, value = found["name"], _shell_value(found)
    if name is None or value == "False" or (found["spaced"] and not _is_subject(found)):
        return found[0]
    return flags[name] if value in ("", "True", "true") else f"{flags[name]} {value}"


def _is_subject(found: re.Match[str]) -> bool:
    return not found.start() or found.string[: found.start()].endswith(" and ")


def _shell_value(found: re.Match[str]) -> str:
    """Return a value in the syntax of the shell."""
    if found["quoted"]:
        is_plain = shlex.quote(found["quoted"][1:-1]) == found["quoted"][1:-1]
        return found["quoted"][1:-1] if is_plain else found["quoted"]
    if found["list"]:
        return found["list"][1:-1].replace(" ", "")
    return shlex.quote(found["call"]) if found["call"] else found["plain"] or ""


@cache
def command_of(app: typer.Typer) -> Any:
    """Return the command tree of a program, which takes 30 ms to build."""
    return typer.main.get_command(app)


def flags_of(app: typer.Typer, words: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the function name of the command that these words call, and its flags by argument."""
    command = command_of(app)
    name = ""
    for word in dropwhile(lambda word: word.startswith("-"), words):
        inner = getattr(command, "commands", {})
        if word not in inner:
            break
        command, name = inner[word], word.replace("-", "_")
    options = (each for each in command.params if each.param_type_name == "option")
    return name, RECORDING | {each.name: max(each.opts, key=len) for each in options if each.name}


def own_words(words: Sequence[str], passing_on: Sequence[str]) -> Sequence[str]:
    """Return the words of a command line that are of paceline: those after the name of some commands are another's.

    >>> own_words(["--quiet", "run", "train.py", ""], ("run",))
    ['--quiet', 'run']
    """
    own = list(takewhile(lambda word: word.startswith("-"), words))
    is_passed_on = list(words[len(own) : len(own) + 1]) != [] and words[len(own)] in passing_on
    return [*own, words[len(own)]] if is_passed_on else words
