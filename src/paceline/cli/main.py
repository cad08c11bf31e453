"""The program with its commands, and what it says when something goes wrong."""

from __future__ import annotations

import sys
import warnings
from typing import TextIO

import typer

from paceline.cli.compare import compare
from paceline.cli.flags import flags_of, in_flags
from paceline.cli.lr_range_test import knee
from paceline.cli.protocols import fetch, protocols
from paceline.cli.runs import advise, replay, report, trace
from paceline.cli.search_cost import search_cost
from paceline.cli.search_switch import search
from paceline.cli.terminal import fitted
from paceline.cli.theory import theory
from paceline.cli.train import train
from paceline.errors import PacelineError, PacelineWarning, UsageError
from paceline.utils.user_code import HEAD, place_of, report_of

app = typer.Typer(
    help="Straggler-proof data-parallel training for PyTorch.",
    epilog="Exit status: 0 done, 1 the run failed, 2 it cannot work as asked, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Data sets of the jobs mnist, cifar10 and cifar100.", no_args_is_help=True)
data_app.command()(fetch)
for command in (train, compare, knee, search, search_cost, theory, report, trace, replay, advise, protocols):
    app.command()(command)
app.add_typer(data_app, name="data")


def main() -> None:
    """Run the program; every error that paceline raises on purpose is one line."""
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        sys.exit(_status())


def _status() -> int:
    status = 0
    try:
        status = app(standalone_mode=False)
    except UsageError as error:
        _say(error)
        status = 2
    except PacelineError as error:
        _say(error)
        status = 1
    except typer.TyperException as error:
        if str(error):  # without arguments, the help is all there is to say
            print(f"paceline: {error} (paceline --help tells more)", file=sys.stderr)
        status = 2
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except Exception as error:
        _say_unforeseen(error)
        status = 1
    return status


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Say it in one line; where in the code it was raised helps only with warnings of others."""
    is_ours = issubclass(category, PacelineWarning)
    stream = file or sys.stderr
    ours = fitted(f"paceline: {_in_flags(message)}", stream) + "\n"
    text = ours if is_ours else warnings.formatwarning(message, category, filename, lineno, line)
    stream.write(text)


def _say(error: PacelineError) -> None:
    details = getattr(error, "details", None)
    if details:
        print(details, file=sys.stderr)
    print(fitted(f"paceline: {_in_flags(error)}", sys.stderr), file=sys.stderr)


def _say_unforeseen(error: Exception) -> None:
    """Say where the user's code failed, above its traceback, or which file failed; raise what is neither."""
    if place_of(error):
        print(f"{HEAD}{report_of(error)}", end="", file=sys.stderr)
    elif isinstance(error, OSError):  # of a file or a folder that no other code answers for
        named = f"{error.filename}: " if error.filename else ""
        print(f"{HEAD}{named}{error.strerror or error}", file=sys.stderr)
    else:
        raise error


def _in_flags(message: object) -> str:
    command, flags = flags_of(app, sys.argv[1:])
    return in_flags(str(message), flags, command)
