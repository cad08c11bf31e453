"""Models that cannot be trained, whatever the protocol and the engine."""

from __future__ import annotations

from torch import nn

from paceline.utils.wording import counted


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


def batch_norm_of(model: nn.Module) -> str:
    """Return the name of the first layer that normalizes by its batch; empty without any.

    >>> batch_norm_of(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))), batch_norm_of(nn.Linear(2, 2))
    ('1', '')
    """
    norms = (name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
    return next(norms, "")


def note_on_pieces(model: nn.Module, protocol: object, piece: int) -> str:
    """Return what to know of a model whose minibatches are computed in pieces of this size; empty for nothing.

    >>> note_on_pieces(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "balanced(m=8)", 4)
    'balanced(m=8): the layer 1 of the model normalizes by pieces of 4 samples'
    """
    norm = batch_norm_of(model)
    if not norm:
        return ""
    few = ", which it may refuse: give a smaller m" if piece == 1 else ""
    return f"{protocol}: the layer {norm} of the model normalizes by pieces of {counted(piece, 'sample')}{few}"


def _why_not_synchronized(model: nn.Module) -> str:
    for name, module in model.named_modules():
        if any(base.__name__ == "SyncBatchNorm" for base in type(module).__mro__):  # of torch, or of another library
            return (
                f"the model has a {type(module).__name__} ({name or 'the model itself'}), which would normalize by the "
                "minibatch of one rank: build it with BatchNorm, or with a norm of single samples, as nn.GroupNorm"
            )
    return ""
