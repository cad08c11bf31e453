"""Loaders whose batches a script trains on, told apart from those that it evaluates with."""

from __future__ import annotations

from weakref import ref

from paceline.shares.handed_out import Loader


class TrainingLoaders:
    """Loaders of training batches, with the size of their batches under equal shares.

    A loader trains if a backward pass computes its batch, or if it hands out batches before two backward passes in a
    row, as each of several in a loop does. A loader for evaluation does neither.
    """

    def __init__(self) -> None:
        self._sizes: dict[ref[Loader], int] = {}
        self._now: dict[ref[Loader], int] = {}  # since the last backward pass
        self._before: dict[ref[Loader], int] = {}  # before it

    def handed_out(self, loader: Loader, size: int) -> None:
        """Note that a loader has handed out a batch of a size under equal shares."""
        self._now[ref(loader)] = size

    def backward_began(self, read: Loader | None, size: int) -> None:
        """Note a backward pass, which computes a batch of a loader (None for an own batch) and a size."""
        found = {loader: size for loader, size in self._now.items() if loader in self._before}
        for loader, each in (found if read is None else {**found, ref(read): size}).items():
            self._sizes.setdefault(loader, each)
        if self._now:
            self._before, self._now = self._now, {}

    def batch_size(self, loader: Loader) -> int | None:
        """Return the samples of a rank's batch with equal shares; None for a loader that does not train."""
        return self._sizes.get(ref(loader))

    def trains(self, loader: Loader | None) -> bool:
        """Return whether a loader is known to train, or the script makes its batches itself."""
        return loader is None or ref(loader) in self._sizes
