"""Detection of writes to parameters that only an optimizer may change: by version counters, and by samples."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

SAMPLE = 64  # elements of a tensor
FIRST_STEPS, PERIOD = 10, 100  # the first steps compare samples, and then each 100th


class WriteWatch:
    """Detection of writes between a call of `mark` and one of `changed`, which make one step.

    A write through ``.data`` does not raise the version counter of a tensor. So up to 64 evenly spaced elements of each
    tensor are compared as well, though not at every step: on a GPU a comparison waits for the device.

    Args:
        tensors: tensors by name.
        always: whether every step compares elements.

    >>> weight, bias = torch.zeros(2), torch.zeros(2)
    >>> watch = WriteWatch({"weight": weight, "bias": bias})
    >>> watch.mark()
    >>> _ = bias.data.add_(1)
    >>> watch.changed()
    ['bias']
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, always: bool = False) -> None:
        self._tensors = dict(tensors)
        self._always = always
        self._step = 0
        self._versions: list[int] = []
        self._samples: dict[torch.device, Tensor] = {}  # empty at a step that does not compare

    def mark(self) -> None:
        """Take the tensors as they are now, at the start of a step."""
        self._step += 1
        is_due = self._always or self._step <= FIRST_STEPS or self._step % PERIOD == 0
        self._versions = list(map(_VERSION, self._tensors.values()))
        self._samples = _samples_of(self._tensors.values()) if is_due else {}

    def changed(self) -> list[str]:
        """Return the names of the tensors that were written since `mark`."""
        versions = list(map(_VERSION, self._tensors.values()))
        samples = _samples_of(self._tensors.values()) if self._samples else {}
        if versions == self._versions and all(_are_same(samples[each], self._samples.get(each)) for each in samples):
            return []
        found, starts = [], dict.fromkeys(samples, 0)
        for (name, tensor), now, before in zip(self._tensors.items(), versions, self._versions, strict=True):
            is_changed = now != before
            if samples:
                start, device = starts[tensor.device], tensor.device
                starts[device] = end = start + min(tensor.numel(), SAMPLE)
                old = self._samples.get(device)
                is_changed |= old is None or not _are_same(samples[device][start:end], old[start:end])
            if is_changed:
                found.append(name)
        return found


_VERSION = operator.attrgetter("_version")


@torch.no_grad()
def _samples_of(tensors: Iterable[Tensor]) -> dict[torch.device, Tensor]:
    """Return evenly spaced elements of all tensors, one vector for each device."""
    parts = defaultdict(list)
    for tensor in tensors:
        parts[tensor.device].append(sample_of(tensor))
    return {device: torch.cat(each) for device, each in parts.items()}


def sample_of(tensor: Tensor) -> Tensor:
    """Return evenly spaced elements, without a copy of dense tensors in any order of their dimensions."""
    if tensor.is_contiguous():  # three times as fast
        count = tensor.numel()
        return tensor.as_strided((min(count, SAMPLE),), (max(1, count // SAMPLE),))
    largest_first = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    flat = tensor.permute(largest_first).reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLE)][:SAMPLE]


def _are_same(one: Tensor, other: Tensor | None) -> bool:
    """Return whether two vectors have the same bits, so that NaN is equal to itself."""
    return (
        other is not None
        and (one.shape, one.dtype) == (other.shape, other.dtype)
        and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    )
