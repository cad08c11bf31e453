"""Checks of a machine: what paceline can do on it, and what to do about the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import gettempdir

from paceline.diagnostics.check import Check, Status
from paceline.diagnostics.host import check_clock, check_cores, check_files, check_folder, check_memory, check_sharing
from paceline.diagnostics.network import check_addresses, check_loopback, check_token
from paceline.diagnostics.software import check_devices, check_extras, check_versions
from paceline.diagnostics.trials import check_gloo, check_workers

__all__ = ["Check", "Status", "checks"]


def checks(folder: Path, *, quick: bool = False) -> Iterator[Check]:
    """Yield the result of each check of this machine, the cheap ones first.

    Args:
        folder: folder in which runs will be written.
        quick: whether to leave out the checks that start processes, which take seconds.
    """
    cheap: list[Callable[[], Check]] = [
        check_versions,
        check_extras,
        check_devices,
        check_cores,
        check_memory,
        check_sharing,
        check_files,
        lambda: check_folder("disk", folder),
        lambda: check_folder("temp files", Path(gettempdir())),
        check_clock,
        check_loopback,
        check_addresses,
        check_token,
    ]
    for check in cheap if quick else [*cheap, check_gloo, check_workers]:
        yield check()
