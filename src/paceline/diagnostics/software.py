"""Checks of installed versions, optional packages and devices."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec

from paceline.diagnostics.check import Check, Status
from paceline.utils.wording import counted

EXTRAS = {"digits": "sklearn", "figures": "matplotlib", "metrics": "prometheus_client", "tensorboard": "tensorboard"}


def check_versions() -> Check:
    """Return the versions that all ranks of a job must share."""
    names = ("paceline", "torch", "numpy")
    shown = ", ".join([f"python {platform.python_version()}", *(f"{name} {version(name)}" for name in names)])
    return Check(subject="versions", status=Status.OK, finding=f"{shown}; equal on every host of a job")


def check_extras() -> Check:
    """Return which optional packages are installed."""
    return judge_extras({extra: find_spec(package) is not None for extra, package in EXTRAS.items()})


def judge_extras(installed: Mapping[str, bool]) -> Check:
    """Judge the optional packages: whether the packages of each extra are installed."""
    missing = [extra for extra, is_there in installed.items() if not is_there]
    there = ", ".join(extra for extra, is_there in installed.items() if is_there) or "none"
    if not missing:
        return Check(subject="extras", status=Status.OK, finding=there)
    advice = f"pip install '.[{','.join(missing)}]' in a clone of paceline"
    return Check(
        subject="extras", status=Status.WARNING, finding=f"{there}; not installed: {', '.join(missing)}", advice=advice
    )


def check_devices() -> Check:
    """Return the devices of torch."""
    import torch

    count = torch.cuda.device_count()
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    return judge_devices(names, cuda_build=torch.version.cuda, threads=torch.get_num_threads())


def judge_devices(gpus: Sequence[str], *, cuda_build: str | None, threads: int) -> Check:
    """Judge the devices of torch.

    Args:
        gpus: name of each visible GPU.
        cuda_build: version of CUDA that torch was built with; None for a build without CUDA.
        threads: threads of torch in one process.
    """
    finding = f"CPU with {counted(threads, 'thread')}"
    if gpus:
        advice = "a server's traffic may cost more than a GPU saves: compare a short run with DDP first"
        return Check(
            subject="devices",
            status=Status.WARNING,
            finding=f"{finding}; {counted(len(gpus), 'GPU')}: {gpus[0]}",
            advice=advice,
        )
    if cuda_build:
        advice = "torch has CUDA but sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES, if there should be one"
        return Check(
            subject="devices",
            status=Status.WARNING,
            finding=f"{finding}; CUDA {cuda_build} without a GPU",
            advice=advice,
        )
    return Check(subject="devices", status=Status.OK, finding=f"{finding}; torch is built without CUDA")
