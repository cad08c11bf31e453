"""Start of a command whose ranks are recorded."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import FrameType

from paceline.ddp_recording import layout
from paceline.errors import UsageError
from paceline.utils.files import replace_file, writing

INJECTED = Path(__file__).parent / "injected"


def launch(command: Sequence[str], folder: Path, sample_every: int) -> int:
    """Run a command with the probe in its ranks, and return its exit status.

    Args:
        command: program and its arguments.
        folder: folder to record to; hosts may share it, but none may have recorded to it before.
        sample_every: steps between two samples of the gradient; 0 for none.

    Raises:
        UsageError: there is no such command, or the folder exists.
        RunError: the folder cannot be written.
    """
    if shutil.which(command[0]) is None:
        raise UsageError(f"there is no command {command[0]!r}; give one as: paceline record -- torchrun train.py")
    about = layout.host_file(folder, socket.gethostname())
    _check_free(folder, about)
    facts = {
        "schema": layout.SCHEMA,
        "command": list(command),
        "paceline": version("paceline"),
        "started_unix_s": time.time(),
    }
    with writing(about, "; give another folder with out="):
        folder.mkdir(parents=True, exist_ok=True)
        _write(about, facts)
    process = subprocess.Popen(command, env=_environment(folder, sample_every))
    status = _wait(process)
    with writing(about):
        _write(about, {**facts, "exit_status": status, "ended_unix_s": time.time()})
    return status if status >= 0 else 128 - status


def _check_free(folder: Path, about: Path) -> None:
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; give another one with out=")
    others = [entry.name for entry in folder.iterdir() if not entry.match(layout.HOSTS)]
    is_shared = about not in folder.iterdir() and all(Path(name).match(layout.ATTEMPTS) for name in others)
    if not is_shared:
        raise UsageError(f"{folder} exists already; give another folder with out=")


def _environment(folder: Path, sample_every: int) -> dict[str, str]:
    return {
        **os.environ,
        **injection(),
        layout.FOLDER_VARIABLE: str(folder.absolute()),
        layout.SAMPLE_VARIABLE: str(sample_every),
    }


def injection() -> dict[str, str]:
    """Return the variable by which Python imports the module of `INJECTED` at its start."""
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(INJECTED), *([before] if before else [])])}


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process, to which SIGTERM is passed on; the terminal itself sends Ctrl-C to both."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue
    finally:
        signal.signal(signal.SIGTERM, before)


def _write(path: Path, facts: object) -> None:
    replace_file(path, (json.dumps(facts, indent=2) + "\n").encode())
