"""Models that cannot be trained, whatever the protocol and the engine."""

from __future__ import annotations

from torch import nn


def why_not_trained(model: nn.Module) -> str:
    """Return why a model cannot be trained, empty if it can."""
    return _why_without_values(model) or _why_not_averaged(model) or _why_not_synchronized(model)


def _why_without_values(model: nn.Module) -> str:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            return (
                f"{name} of the model has no shape yet, because its layer is lazy: call the model on a batch before, "
                "or give the sizes of every layer"
            )
        if tensor.is_meta:
            return (
                f"{name} of the model is on the meta device, so it has no values: call model.to_empty(device='cpu'), "
                "and initialize it, before"
            )
    return ""


def _why_not_averaged(model: nn.Module) -> str:
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    for name, tensor in (*trained, *model.named_buffers()):
        if tensor.is_floating_point() and tensor.itemsize == 1:
            return (
                f"{name} of the model is of {tensor.dtype}, whose numbers torch cannot add: make it bfloat16, or "
                "a frozen parameter"
            )
    return ""


def _why_not_synchronized(model: nn.Module) -> str:
    for name, module in model.named_modules():
        if any(base.__name__ == "SyncBatchNorm" for base in type(module).__mro__):  # of torch, or of another library
            return (
                f"the model has a {type(module).__name__} ({name or 'the model itself'}), which would normalize by the "
                "minibatch of one rank: build it with BatchNorm, or with a norm of single samples, as nn.GroupNorm"
            )
    return ""
