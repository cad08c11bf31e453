"""Folders of DDP recordings, written by the code that the ranks run."""

import json
import os

import numpy as np

from paceline.ddp_recording import layout
from paceline.ddp_recording.recording import WARM_UP
from paceline.probe.rank_files import RankFiles

MODEL = {
    "class": "Net",
    "device": "cpu",
    "payload_bytes": 4_000_000,
    "parameters": 1_000_000,
    "bucket_bytes": [4_000_000],
}


def write_recording(folder, work_ms, *, sum_ms=5.0, part="backward", hosts=None, gradients=(), attempt=0):
    """Write the recording of ranks whose own work took these milliseconds: ranks x steps.

    The first steps, which are not read, are added. Data and forward take 1 ms each, except that the given
    part has all that is left of the work.
    """
    work_ms = np.asarray(work_ms, dtype=float)
    work_ms = np.concatenate([work_ms[:, :1]] * WARM_UP + [work_ms], axis=1)
    step_ms = work_ms.max(axis=0) + sum_ms
    host = "alpha"
    folder.mkdir(parents=True, exist_ok=True)
    layout.host_file(folder, host).write_text(json.dumps({"schema": layout.SCHEMA, "command": ["torchrun"]}))
    for rank, own_ms in enumerate(work_ms):
        write_rank(folder, rank, own_ms, step_ms, part, attempt)
        describe(folder, rank, attempt, world_size=len(work_ms), host=hosts[rank] if hosts else host)
    for rank, samples in enumerate(gradients):
        lines = [",".join(layout.GRADIENT_COLUMNS), *(",".join(map(repr, sample)) for sample in samples)]
        layout.gradients_file(layout.attempt_folder(folder, attempt), rank).write_text("\n".join(lines) + "\n")
    return folder


def write_rank(folder, rank, own_ms, step_ms, part, attempt):
    files = RankFiles(layout.attempt_folder(folder, attempt), rank, layout.SAMPLE_EVERY)
    files.open()
    begin_ms = 1000.0 * rank  # clocks of hosts need not agree
    for step, (own, whole) in enumerate(zip(own_ms, step_ms, strict=True)):
        parts = dict.fromkeys(layout.PARTS, 1.0)
        parts[part] = own - (len(parts) - 1)
        row = (begin_ms, *parts.values(), 0.0, whole - own)
        files.add_step((step, *(round(each * 1e6) for each in row)))
        begin_ms += whole
    files.flush()


def describe(folder, rank, attempt, **facts):
    header = layout.header_file(layout.attempt_folder(folder, attempt), rank)
    known = json.loads(header.read_text())
    header.write_text(json.dumps({**known, "models": [MODEL], "backend": "gloo", "pid": os.getpid(), **facts}))


def rewrite(folder, rank, change, attempt=0):
    """Change the text of the rows of a rank."""
    path = layout.steps_file(layout.attempt_folder(folder, attempt), rank)
    path.write_text(change(path.read_text()))
