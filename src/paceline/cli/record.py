"""`paceline record`: recording of an unmodified DistributedDataParallel script."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import free_folder
from paceline.ddp_recording.layout import SAMPLE_EVERY


def record(
    command: Annotated[list[str], typer.Argument(help="Command that starts the ranks, for example torchrun ... x.py.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the recording. Default: runs/record-1, -2, ...")] = None,
    sample: Annotated[
        int, typer.Option(min=0, help="Steps between two samples of the gradient's noise; 0 for none.")
    ] = SAMPLE_EVERY,
) -> None:
    """Record where an unmodified DDP script waits: paceline record -- torchrun --nproc-per-node 4 train.py."""
    from paceline.probe.launch import launch

    folder = out or free_folder("record")
    status = launch(command, folder, sample)
    print(_summary(folder), file=sys.stderr)
    raise typer.Exit(status)


def _summary(folder: Path) -> str:
    """Return what was recorded in one line, or why nothing can be read."""
    from paceline.ddp_recording.recording import DDPRecording
    from paceline.ddp_recording.waiting import time_shares
    from paceline.errors import UsageError
    from paceline.experiments.advise.shares_prediction import predict_shares
    from paceline.policies.controllers.balance import Balance

    try:
        recording = DDPRecording(folder)
    except UsageError as error:
        return f"paceline: {error}"
    share = time_shares(recording).waiting_share
    found = f"{recording.steps} steps of {recording.ranks} ranks, {share:.1%} of the rank-time was waiting"
    balanced = "" if recording.is_coarse else f"\npaceline: {predict_shares(recording, Balance()).sentence}"
    return f"paceline: {folder}: {found}; for details: paceline advise {folder}{balanced}"
