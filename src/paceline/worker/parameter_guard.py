"""Detection of parameters that were changed outside the optimizer; in debug mode also by writes to their data."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.worker.allreduce.base import AllReduceAlgorithm
from paceline.worker.write_watch import WriteWatch

REMEDY = "only the job's optimizer may change parameters: do not assign, clamp or step them yourself"


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes; a change goes undetected with probability 2^-32.

    >>> import torch
    >>> checksum(torch.zeros(3)) == checksum(torch.tensor([0.0, 0.0, 1e-45]))
    False
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0


class ParameterGuard:
    """Guard that detects changed or replaced tensors, by checksum and address.

    Args:
        tensors: function that yields the current tensors by name.
    """

    def __init__(self, tensors: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        self._tensors = tensors
        self._marks: dict[str, tuple[int, int]] = {}

    @classmethod
    def for_parameters(cls, model: nn.Module) -> ParameterGuard:
        """Return a guard for the parameters of a model, including frozen ones."""
        return cls(model.named_parameters)

    @classmethod
    def for_model(cls, model: nn.Module) -> ParameterGuard:
        """Return a guard for the parameters and buffers of a model."""
        return cls(lambda: chain(model.named_parameters(), model.named_buffers()))

    @classmethod
    def for_algorithm(cls, algorithm: AllReduceAlgorithm) -> ParameterGuard:
        """Return a guard for the model and the weights of an all-reduce worker."""

        def tensors() -> Iterator[tuple[str, Tensor]]:
            model = algorithm.server.model
            yield from model.named_parameters()
            yield from model.named_buffers()
            if algorithm.weights is not algorithm.average:
                names = [f"{name} (its own)" for name, parameter in model.named_parameters() if parameter.requires_grad]
                yield from zip(names, algorithm.weights.parameters, strict=True)

        return cls(tensors)

    def snapshot(self) -> None:
        """Record the current tensors as correct."""
        self._marks = {name: _mark(tensor) for name, tensor in self._tensors()}

    def check(self, who: str, when: str) -> None:
        """Check that no tensor has changed since the last snapshot.

        Args:
            who: owner of the tensors, for the error.
            when: time of the change, for the error.

        Raises:
            UsageError: a tensor has changed.
        """
        now = {name: _mark(tensor) for name, tensor in self._tensors()}
        _check_none([name for name in {**self._marks, **now} if self._marks.get(name) != now.get(name)], who, when)

    @contextmanager
    def unchanged(self, who: str, when: str) -> Iterator[None]:
        """Check that no tensor changes inside this context."""
        self.snapshot()
        yield
        self.check(who, when)


@contextmanager
def unwritten(trained: WriteWatch | None, frozen: WriteWatch, who: str, when: str) -> Iterator[None]:
    """Check that the job does not write to a parameter inside this context.

    Frozen parameters stay in each replica, so the trained model would lack a change, as of a teacher; buffers travel.

    Args:
        trained: watch over the trainable parameters, None where they may be written.
        frozen: watch over the other parameters.
        who: owner of the parameters, for the error.
        when: time of the change, for the error.

    Raises:
        UsageError: a parameter was written to.
    """
    watches = [frozen] if trained is None else [trained, frozen]
    for watch in watches:
        watch.mark()
    yield
    if trained is not None:
        _check_none(trained.changed(), who, when)
    _check_none(
        frozen.changed(), who, when, "the trained model would lack the change of a frozen parameter: make it a buffer"
    )


def check_version(received: Tensor, expected: int | None, who: str, when: str) -> None:
    """Check a received version against the checksum of the server.

    Args:
        received: version as it was received.
        expected: checksum of the sent version, None for no check.
        who: receiver, for the error.
        when: time of the check, for the error.

    Raises:
        UsageError: the versions differ.
    """
    if expected is not None and checksum(received) != expected:
        raise UsageError(f"the parameters on {who} differ from the server's {when}; {REMEDY}")


def _check_none(changed: Sequence[str], who: str, when: str, remedy: str = REMEDY) -> None:
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise UsageError(f"{', '.join(changed[:3])}{more} changed on {who} {when}; {remedy}")


def _mark(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), checksum(tensor)
