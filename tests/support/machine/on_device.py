"""Place of the models and batches of scripts that name no device: `DEVICE`, the CPU by default."""

import os
from functools import wraps

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.dataloader import _BaseDataLoaderIter

DEVICE = os.environ.get("DEVICE", "cpu")


def use_device():
    """Put each model that DDP takes on the device, and each batch of a loader."""
    if DEVICE != "cpu":
        DistributedDataParallel.__init__ = with_moved_model(DistributedDataParallel.__init__)
        _BaseDataLoaderIter.__next__ = with_moved_batch(_BaseDataLoaderIter.__next__)


def with_moved_model(original):
    @wraps(original)
    def init(model, module, *args, **kwargs):
        original(model, module.to(DEVICE), *args, **kwargs)

    return init


def with_moved_batch(original):
    @wraps(original)
    def next_batch(iterator):
        return moved(original(iterator))

    return next_batch


def moved(value):
    if isinstance(value, Tensor):
        return value.to(DEVICE)
    return type(value)(map(moved, value)) if isinstance(value, list | tuple) else value
