"""Seeding of all global random generators for one draw."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_CPU = torch.device("cpu")
# torch makes a tensor while it holds the generator's mutex, and the garbage collection that this may begin gives up the
# GIL: another thread that then waits for the mutex, holding the GIL, would wait for ever.
_LOCK = threading.Lock()


@contextmanager
def seeded(seed: int, device: torch.device = _CPU) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch in this context, and restore their states afterwards."""
    before = RandomStates()
    with torch.random.fork_rng([device], enabled=device.type == "cuda"):
        set_seed(seed, device)
        try:
            yield
        finally:
            before.restore()


def set_seed(seed: int, device: torch.device = _CPU) -> None:
    """Seed the global generators of Python, NumPy and torch."""
    # Without CUDA, `torch.manual_seed` would record a stack trace for each kind of device that is not initialised.
    with _LOCK:
        (torch if device.type == "cuda" else torch.default_generator).manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


class RandomStates:
    """Snapshot of the states of the global generators of Python, NumPy and torch on the CPU."""

    def __init__(self) -> None:
        self.python = random.getstate()
        self.numpy = np.random.get_state()
        with _LOCK:
            self.torch = torch.get_rng_state()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RandomStates):
            return NotImplemented
        return (
            self.python == other.python
            and all(map(np.array_equal, self.numpy, other.numpy))
            and torch.equal(self.torch, other.torch)
        )

    __hash__ = None  # type: ignore[assignment]  # not hashable

    def restore(self) -> None:
        """Set the generators to these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        with _LOCK:
            torch.set_rng_state(self.torch)
