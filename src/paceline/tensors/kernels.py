"""Kernels of a GPU that a thread has launched, and that another thread or stream must not overtake."""

from __future__ import annotations

import torch


def await_kernels(device: torch.device) -> None:
    """Wait until the kernels in the stream of this thread have ended; on the CPU there are none."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
