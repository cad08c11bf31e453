"""`paceline watch`, and the page of `paceline train --serve`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import PageAddress
from paceline.errors import RunError, UsageError

if TYPE_CHECKING:
    from paceline.watch.address import Address

Page = Callable[[Path], AbstractContextManager[object]]


def watch(
    run: Annotated[Path, typer.Argument(help="Folder of a run of any process, going on or finished.")],
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve a page for browsers instead of the view in the terminal.")
    ] = False,
    address: PageAddress = None,
) -> None:
    """Watch a run while it trains: in the terminal, or in a browser with --serve."""
    from paceline.recording.run_folder import SavedRun
    from paceline.recording.script_runs import SCRIPT

    place = _address(address, serve=serve)
    SavedRun(run)
    if serve:
        from paceline.watch.run_page import serve_page

        serve_page(run, place, partial(print, flush=True))
    else:
        from rich.console import Console

        from paceline.watch.terminal import watch_in_terminal

        if watch_in_terminal(run, Console(file=sys.stdout, highlight=False)):
            configuration = SavedRun(run).configuration
            if SCRIPT in configuration:
                raise RunError("the run has stopped without an end; its script has its own checkpoints: start it again")
            where = ", if its standby has not gone on with it" if configuration.get("has_standby", False) else ""
            raise RunError(f"the run has stopped without an end; to continue it{where}: paceline train --resume {run}")


def page_while_training(address: str | None, *, serve: bool) -> Page:
    """Return the context in which a run with a given folder has a page, on rank 0 and if it is asked for.

    Raises:
        UsageError: the address is invalid, or given without ``--serve``.
    """
    from paceline.clusters.launch_env import is_rank_0

    place = _address(address, serve=serve)

    @contextmanager
    def page(folder: Path) -> Iterator[None]:
        from paceline.watch.run_page import served_beside

        with served_beside(folder, place) as url:
            print(f"page of this run: {url}", file=sys.stderr)
            yield

    return page if serve and is_rank_0(os.environ) else nullcontext


def _address(text: str | None, *, serve: bool) -> Address | None:
    from paceline.watch.address import Address

    if text is None:
        return None
    if not serve:
        raise UsageError("--address is the address of the page of --serve; add --serve")
    return Address.parse(text)
