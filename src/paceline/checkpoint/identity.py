"""What a job is, in words and numbers that can be compared: a run may go on only with the job that it began with."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from paceline.data import fetch
from paceline.engines.replica import seeded
from paceline.job import Job
from paceline.server import ParameterServer

_SETTINGS = (
    "batch_size",
    "clip_norm",
    "lr_is",
    "lr_rule",
    "microbatches",
    "on_drop",
    "sampling",
    "schedule_unit",
    "sharding",
)


def identity(job: Job, server: ParameterServer) -> dict[str, Any]:
    """Return what makes two runs runs of the same job: its model, data, optimizer and settings."""
    tensors = {**dict(server.model.named_parameters()), **dict(server.model.named_buffers())}
    return {
        "name": job.name,
        "model": {name: _shape(tensor) for name, tensor in tensors.items()},
        "data": _data(job),
        "optimizer": _optimizer(server.optimizer),
        "scheduler": server.scheduler_name,
        **{name: getattr(job, name) for name in _SETTINGS},
    }


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _data(job: Job) -> dict[str, Any]:
    """Return the number of samples and a digest of the first and the last one."""
    if job.is_iterable:
        return {"kind": type(job.data).__name__}
    samples = len(job.data)  # type: ignore[arg-type]  # map-style
    with seeded(0, torch.device("cpu")):  # an augmentation must not make a digest of its own
        batch = fetch(job, np.array([0, samples - 1]))
    digest = sha256()
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, str | bytes | int | float):
            digest.update(repr(leaf).encode())
    return {"kind": type(job.data).__name__, "samples": samples, "digest": digest.hexdigest()[:16]}


def _optimizer(optimizer: torch.optim.Optimizer) -> str:
    options = ", ".join(f"{name}={value}" for name, value in optimizer.defaults.items())
    return f"{type(optimizer).__name__}({options})"
