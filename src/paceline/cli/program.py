"""The `paceline` program: its commands, its log and its error messages."""

from __future__ import annotations

import sys
import warnings
from importlib.metadata import version
from io import TextIOWrapper
from typing import Annotated, TextIO

import typer

from paceline.cli.compare import compare
from paceline.cli.docs import docs
from paceline.cli.doctor import doctor
from paceline.cli.flags import command_of, flags_of, in_flags, own_words
from paceline.cli.log_handler import logging_to_terminal, set_verbosity
from paceline.cli.lr_range_test import lr_range_test
from paceline.cli.options import check_not_empty
from paceline.cli.protocols import fetch, protocols
from paceline.cli.record import record
from paceline.cli.run import run
from paceline.cli.runs import advise, replay, report, trace
from paceline.cli.search_cost import search_cost
from paceline.cli.search_switch import search
from paceline.cli.terminal import fitted
from paceline.cli.theory import theory
from paceline.cli.token import token
from paceline.cli.train import train
from paceline.cli.watch import watch
from paceline.errors import PacelineError, PacelineWarning, UsageError
from paceline.utils.user_code import HEAD, place_of, report_of
from paceline.utils.wording import printable

FIRST_SCREEN = """\
paceline {version}: straggler-proof data-parallel training for PyTorch.

  paceline train digits      train a small model on two worker processes
  paceline compare digits --protocols "bsp, k_sync(k=3)" \\
      --cluster "4*exp(mean=1)" --stop loss=1 --seeds 2
                             compare protocols on a simulated cluster
  paceline run --nproc-per-node 4 train.py
                             run your script as ranks, which come back
  paceline protocols         list the protocols
  paceline doctor            check this machine

All commands: paceline --help. Options of one: paceline train --help.
"""

app = typer.Typer(pretty_exceptions_enable=False)
data_app = typer.Typer(help="Download data sets for the jobs mnist, cifar10 and cifar100.", no_args_is_help=True)
data_app.command()(fetch)
RUNS = (train, watch, compare, lr_range_test, search, search_cost, theory, report, trace, replay, advise)
for command in (*RUNS, protocols, doctor, token, docs):
    app.command()(command)
PASSING_ON = {"allow_interspersed_args": False}  # the words after the script or the program are its own
app.command(context_settings=PASSING_ON)(run)
app.command(context_settings=PASSING_ON)(record)
app.add_typer(data_app, name="data")


@app.callback(
    help="Straggler-proof data-parallel training for PyTorch.",
    epilog="Exit status: 0 success, 1 the run failed, 2 usage error, 130 interrupted.",
    invoke_without_command=True,
)
def options(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also log information, as joined workers.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Log errors only, and show no progress.")] = False,
) -> None:
    """Set which log records are shown; without a command, print the first screen."""
    set_verbosity(verbose=verbose, quiet=quiet)
    if show_version:
        print(f"paceline {version('paceline')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(FIRST_SCREEN.format(version=version("paceline")), end="")


def main() -> None:
    """Run the program; every error that paceline raises on purpose is one line."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="surrogateescape")  # for the name of a file that is not UTF-8
    with warnings.catch_warnings(), logging_to_terminal():
        warnings.showwarning = _show_warning
        sys.exit(_status())


def _status() -> int:
    try:
        check_not_empty(own_words(sys.argv[1:], (run.__name__, record.__name__)))
        status: int = command_of(app)(standalone_mode=False)
    except PacelineError as error:
        _print_error(error)
        status = 2 if isinstance(error, UsageError) else 1
    except typer.TyperException as error:
        if str(error):  # empty where the help was printed instead
            print(fitted(f"paceline: {_describe_usage(error)}", sys.stderr), file=sys.stderr)
        status = 2
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except Exception as error:
        _print_unexpected(error)
        status = 1
    return status


def _describe_usage(error: typer.TyperException) -> str:
    """Return a wrong command line as one line: the option, what was expected, and where to read on."""
    text = error.format_message().rstrip(".?").replace("Value error, ", "")
    context = getattr(error, "ctx", None)
    return f"{text}; see {context.command_path if context else 'paceline'} --help"


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning of paceline as one line, and any other warning with its place in the code."""
    is_ours = issubclass(category, PacelineWarning)
    stream = file or sys.stderr
    ours = fitted(f"paceline: {_in_flags(message)}", stream) + "\n"
    text = ours if is_ours else warnings.formatwarning(message, category, filename, lineno, line)
    stream.write(text)


def _print_error(error: PacelineError) -> None:
    details = getattr(error, "details", None)
    if details:
        print(details, file=sys.stderr)
    print(fitted(f"paceline: {_in_flags(error)}", sys.stderr), file=sys.stderr)


def _print_unexpected(error: Exception) -> None:
    """Print a failure of the user's code as its place and traceback, one of a file as one line; raise any other."""
    if place_of(error):
        print(f"{HEAD}{report_of(error)}", end="", file=sys.stderr)
    elif isinstance(error, OSError):
        named = f"{error.filename}: " if error.filename else ""
        print(f"{HEAD}{named}{error.strerror or error}", file=sys.stderr)
    else:
        raise error


def _in_flags(message: object) -> str:
    command, flags = flags_of(app, sys.argv[1:])
    return printable(in_flags(str(message), flags, command))
