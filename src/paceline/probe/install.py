"""Installation of the probe in a rank: after torch has been imported, and never with an error for the script."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paceline.ddp_recording.layout import FOLDER_VARIABLE, SAMPLE_EVERY, SAMPLE_VARIABLE, attempt_folder
from paceline.utils.after_import import call_after_import


def install() -> None:
    """Arrange that the import of torch installs the probe; without a folder to record to, do nothing."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        call_after_import("torch", lambda: _start_probe(Path(folder)))


def _start_probe(folder: Path) -> None:
    from paceline.probe.patches import start_probe

    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    sample_every = int(os.environ.get(SAMPLE_VARIABLE, SAMPLE_EVERY))
    try:
        start_probe(attempt_folder(folder, attempt), int(os.environ["RANK"]), sample_every)
    except Exception as error:  # the script runs as without the probe
        print(f"paceline: this rank is not recorded: {type(error).__name__}: {error}", file=sys.stderr)
