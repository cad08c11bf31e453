"""Fingerprint of a job: a run may resume only with the job that it began with."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from paceline.jobs.job import Job, trainable
from paceline.policies.learning_rate import LinearSchedule
from paceline.server.parameter_server import ParameterServer
from paceline.worker.data_loader import fetch
from paceline.worker.seeding import seeded

_LEFT_OUT = {"loader_workers", "prefetch", "ahead", "frozen"}  # of the time, and what a run may change
SHORT = 20  # a longer sequence is described by its length


def identity(job: Job, server: ParameterServer) -> dict[str, Any]:
    """Return the fingerprint of a job: its model, data, optimizer and settings."""
    return {**identity_of_replica(job, server.model), "optimizer": _optimizer(server.optimizer)}


def identity_of_replica(job: Job, model: nn.Module) -> dict[str, Any]:
    """Return the fingerprint without the optimizer, which every worker can compute."""
    return {
        **described(job),
        **_architecture(model),
        "data": _data(job),
    }


def model_in_short(model: nn.Module) -> str:
    """Return a one-line digest of parameters, buffers and layers of a model, without their values.

    >>> model_in_short(nn.Linear(2, 3))
    '9 parameters, layers 27ace091'
    """
    count = sum(parameter.numel() for parameter in trainable(model))
    digest = sha256(json.dumps(_architecture(model)).encode()).hexdigest()
    return f"{count} parameters, layers {digest[:8]}"


def described(job: Job) -> dict[str, Any]:
    """Return the fields of a job as plain values, without those that a resumed run may change."""
    told = {field.name: _described(getattr(job, field.name)) for field in fields(job) if field.name not in _LEFT_OUT}
    if job.eval_batch_size in (0, job.batch_size):  # so that runs of earlier versions have the same fingerprint
        del told["eval_batch_size"]
    return told


def described_defaults() -> dict[str, Any]:
    """Return the defaults of a job's fields as plain values, for those that the fingerprint of an earlier run lacks."""
    return {field.name: _described(field.default) for field in fields(Job) if field.default is not MISSING}


def _architecture(model: nn.Module) -> dict[str, Any]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "model": {name: _shape(tensor) for name, tensor in tensors.items()},
        "layers": {name: repr(layer) for name, layer in model.named_modules() if not any(layer.children())},
    }


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _data(job: Job) -> dict[str, Any]:
    """Return the number of samples and a digest of the first and the last sample, unless they are drawn anew."""
    if job.is_iterable:
        return {"kind": type(job.data).__name__}
    samples = len(job.data)  # type: ignore[arg-type]  # map-style
    digests = []
    for _ in range(2):
        with seeded(0, torch.device("cpu")):  # an augmentation must not change the digest
            digests.append(digest_of(fetch(job, np.array([0, samples - 1]))))
    digest = digests[0] if digests[0] == digests[1] else "drawn anew at each access"
    return {"kind": type(job.data).__name__, "samples": samples, "digest": digest}


def digest_of(content: object) -> str:
    """Return a digest of the tensors, arrays, images, texts and numbers in nested containers.

    >>> digest_of({"x": torch.ones(2)}) == digest_of({"x": torch.zeros(2)})
    False
    """
    digest = sha256()
    for leaf in pytree.tree_leaves(content):
        if isinstance(leaf, Tensor):
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, str | bytes | int | float):
            digest.update(repr(leaf).encode())
        elif hasattr(leaf, "tobytes") and getattr(leaf, "dtype", None) != np.dtype(object):  # which holds addresses
            digest.update(leaf.tobytes())
    return digest.hexdigest()[:16]


def _optimizer(optimizer: torch.optim.Optimizer) -> str:
    options = ", ".join(f"{name}={value}" for name, value in optimizer.defaults.items())
    return f"{type(optimizer).__name__}({options})"


def _described(value: object) -> object:
    """Return a description of a part of a job, the same in every process."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, partial):
        given = [str(_described(each)) for each in value.args]
        given += [f"{name}={_described(each)}" for name, each in value.keywords.items()]
        return f"{_described(value.func)}({', '.join(given)})"
    if isinstance(value, nn.Module | LinearSchedule):
        return str(value)
    if isinstance(value, list | tuple) and len(value) <= SHORT:
        return f"[{', '.join(str(_described(each)) for each in value)}]"
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    return f"{name} of {len(value)}" if hasattr(value, "__len__") else name
