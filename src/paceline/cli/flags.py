"""Options of the command line in place of the arguments that an error names: ``--out`` for ``out=``."""

import re
from shlex import quote

_OPTIONS = ("allow_change", "censored", "cluster", "measure_steps", "out", "overwrite", "resume", "take_all")
_CALL = r"pl\.[\w.]+\((?:[^()]|\([^()]*\))*\)"  # what is to be done in Python stays as it is
_ARGUMENT = re.compile(rf"{_CALL}|(?<![\w.-])({'|'.join(_OPTIONS)})=(True\b|'[^']*'|\"[^\"]*\")?")


def with_flags(text: str) -> str:
    """Return an error of the Python API as the command line says it.

    Only arguments that are options of every command that can raise such an error are replaced; knobs of a typed
    protocol or cluster, as ``k=``, stay.

    >>> with_flags("give another folder with out=, or overwrite=True")
    'give another folder with --out, or --overwrite'
    >>> with_flags("resume='my runs/a' goes on with it; k=True")
    "--resume 'my runs/a' goes on with it; k=True"
    >>> with_flags("resume it there, with pl.train(job, resume=...)")
    'resume it there, with pl.train(job, resume=...)'
    """
    return _ARGUMENT.sub(_flag, text)


def _flag(argument: re.Match[str]) -> str:
    name, value = argument.groups()
    if name is None:
        return argument[0]
    flag = f"--{name.replace('_', '-')}"
    return flag if value in (None, "True") else f"{flag} {quote(value[1:-1])}"
