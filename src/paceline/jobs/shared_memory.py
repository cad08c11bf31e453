"""Parameters that share memory without being one parameter; they would come apart, because each gets its own memory."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, combinations

import torch
from torch import Tensor, nn

from paceline.jobs.local_shards import local_of


def why_not_apart(model: nn.Module, *, with_frozen: bool = True) -> str:
    """Return why trained parameters of a model have no memory of their own, empty if they have.

    Args:
        model: model; layers without memory yet are left out.
        with_frozen: whether a frozen parameter may not share the memory of a trained one.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> why_not_apart(model)
    ''
    >>> model[1].weight.data = model[0].weight.data
    >>> why_not_apart(model).partition(":")[0]
    '0.weight and 1.weight share memory, but are two tensors'
    """
    parameters = (pair for pair in model.named_parameters() if with_frozen or pair[1].requires_grad)
    in_storage = defaultdict(list)
    for name, whole in chain(parameters, model.named_buffers()):
        tensor = local_of(whole)
        has_memory = (
            tensor.layout is torch.strided and not nn.parameter.is_lazy(tensor) and tensor.device.type != "meta"
        )
        if has_memory and tensor.numel():
            in_storage[tensor.untyped_storage().data_ptr()].append((name, tensor, whole.requires_grad))
    for members in in_storage.values():
        for (name, one, is_trained), (other_name, other, other_is_trained) in combinations(members, 2):
            if (is_trained or other_is_trained) and _overlap(one, other):
                return (
                    f"{name} and {other_name} share memory, but are two tensors: make them one parameter, as in "
                    "model.b.weight = model.a.weight, or compute one from the other in forward()"
                )
    return ""


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors in one storage, perhaps of different types, have a byte in common."""
    (start, end), (other_start, other_end) = _span(one), _span(other)
    return start < other_end and other_start < end and bool(torch.isin(_bytes(one), _bytes(other)).any())


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the range of bytes of the storage in which a tensor lies."""
    start = int(tensor.storage_offset())
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * tensor.itemsize, (start + steps + 1) * tensor.itemsize


def _bytes(tensor: Tensor) -> Tensor:
    """Return the numbers of the bytes of a tensor in its storage."""
    numbers = torch.tensor(tensor.storage_offset())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numbers = numbers[..., None] + stride * torch.arange(size)
    return (numbers[..., None] * tensor.itemsize + torch.arange(tensor.itemsize)).reshape(-1)
