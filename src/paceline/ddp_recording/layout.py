"""Files of a DDP recording: names and columns.

A recording is a folder with a ``host-NAME.json`` for each host on which `paceline record` ran, and a folder
``attempt-N`` for each start of the ranks by torchrun. Each rank writes three files there: ``rank-R.json`` (its header),
``rank-R.csv`` (a row a step) and ``rank-R.gradients.csv`` (norms and loss of every 50th step). Only the standard
library is imported here, because the ranks of the user import this module.
"""

from __future__ import annotations

from pathlib import Path

SCHEMA = 1  # of all files; a reader refuses a newer one
HOSTS = "host-*.json"
ATTEMPTS = "attempt-*"
FOLDER_VARIABLE = "PACELINE_RECORD_FOLDER"
SAMPLE_VARIABLE = "PACELINE_RECORD_SAMPLE"

PARTS = ("data", "forward", "backward")

# Durations between the end of a step's sums and the end of the next step's sums; they add up to the step.
#   data        outside forward and backward: data loading, optimizer, evaluation, own code
#   forward     from the first call of the model to the call of backward, with the loss
#   backward    own graph of the rank, without the wait for the sums
#   collectives other collectives, such as the broadcast of buffers
#   sync        from the end of the own graph until the sums of all gradients are there
STEP_COLUMNS = ("step", "begin_ns", *(f"{part}_ns" for part in PARTS), "collectives_ns", "sync_ns")
GRADIENT_COLUMNS = ("step", "loss", "local_squared_norm", "mean_squared_norm")

COLLECTIVE_COLUMNS = ("step", "group", "sequence", "created_ns")  # without a DDP model; wall clock of the host

FLUSH_ROWS = 256
FLUSH_S = 5.0
SAMPLE_EVERY = 50  # steps between two samples of the gradient
DEVICE_EVERY = 10  # steps between two measurements on a device


def host_file(folder: Path, host: str) -> Path:
    """Return the file that `paceline record` writes on a host."""
    return folder / f"host-{host}.json"


def attempt_folder(folder: Path, attempt: int) -> Path:
    """Return the folder of the ranks after that many restarts by torchrun."""
    return folder / f"attempt-{attempt}"


def header_file(attempt: Path, rank: int) -> Path:
    """Return the header of a rank."""
    return attempt / f"rank-{rank}.json"


def steps_file(attempt: Path, rank: int) -> Path:
    """Return the rows of a rank, one a step."""
    return attempt / f"rank-{rank}.csv"


def gradients_file(attempt: Path, rank: int) -> Path:
    """Return the sampled gradient norms and losses of a rank."""
    return attempt / f"rank-{rank}.gradients.csv"


def collectives_file(attempt: Path, rank: int) -> Path:
    """Return the collectives of a rank without a DDP model, from the flight recorder of torch."""
    return attempt / f"rank-{rank}.collectives.csv"
