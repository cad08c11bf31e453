"""Debug mode: whether parameters are what they should be, and who has changed them if they are not."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.worker.allreduce import AllReduceAlgorithm

WHAT_TO_DO = "leave the parameters to the job's optimizer: no assignment, clamping or step of one's own"


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes: one that was changed keeps it with probability 2^-32.

    >>> import torch
    >>> checksum(torch.zeros(3)) == checksum(torch.tensor([0.0, 0.0, 1e-45]))
    False
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0


class ParameterGuard:
    """Notices when tensors change, or when others are put in their place.

    Args:
        tensors: gives them by name, as they are now.
    """

    def __init__(self, tensors: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        self._tensors = tensors
        self._marks: dict[str, tuple[int, int]] = {}

    @classmethod
    def for_parameters(cls, model: nn.Module) -> ParameterGuard:
        """Return one on the parameters of a model, frozen ones too."""
        return cls(model.named_parameters)

    @classmethod
    def for_model(cls, model: nn.Module) -> ParameterGuard:
        """Return one on the parameters and buffers of a model."""

        def tensors() -> Iterator[tuple[str, Tensor]]:
            yield from model.named_parameters()
            yield from model.named_buffers()

        return cls(tensors)

    @classmethod
    def for_algorithm(cls, worker: AllReduceAlgorithm) -> ParameterGuard:
        """Return one on everything that a worker without a server has learned."""

        def tensors() -> Iterator[tuple[str, Tensor]]:
            model = worker.server.model
            yield from model.named_parameters()
            yield from model.named_buffers()
            if worker.weights is not worker.average:
                names = [f"{name} (its own)" for name, parameter in model.named_parameters() if parameter.requires_grad]
                yield from zip(names, worker.weights.parameters, strict=True)

        return cls(tensors)

    def snapshot(self) -> None:
        """Let the tensors be right as they are."""
        self._marks = {name: _mark(tensor) for name, tensor in self._tensors()}

    def check(self, who: str, when: str) -> None:
        """Refuse tensors that have changed since.

        Args:
            who: has them.
            when: since when it was to leave them alone.

        Raises:
            UsageError: they have changed.
        """
        now = {name: _mark(tensor) for name, tensor in self._tensors()}
        changed = [name for name in {**self._marks, **now} if self._marks.get(name) != now.get(name)]
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise UsageError(f"{', '.join(changed[:3])}{more} changed on {who} {when}; {WHAT_TO_DO}")

    @contextmanager
    def unchanged(self, who: str, when: str) -> Iterator[None]:
        """Refuse changes inside of this context."""
        self.snapshot()
        yield
        self.check(who, when)


def check_version(travelling: Tensor, expected: int | None, who: str, when: str) -> None:
    """Refuse a version that is not what the server has sent.

    Args:
        travelling: the version as it travels.
        expected: its checksum at the server; None where nothing is checked.
        who: has received it.
        when: it is about to be used.

    Raises:
        UsageError: it is another one.
    """
    if expected is not None and checksum(travelling) != expected:
        raise UsageError(f"the parameters on {who} differ from the server's {when}; {WHAT_TO_DO}")


def _mark(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), checksum(tensor)
