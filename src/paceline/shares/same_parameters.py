"""Check that the parameters of all ranks stay the same while their batches have unequal sizes."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, nan
from zlib import crc32

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import UsageError
from paceline.shares.texts import refusal_of_parameters

MOST_LOOKED_AT = 16  # parameters, and of each one its middle element
LOOK_EVERY = 100  # exchanges, on a device, for which a look waits


class SameParameters:
    """Checksum of parameters that a reducer keeps the same on all ranks.

    A step that follows from the size of a rank's own batch makes them differ: a learning rate by the samples that a
    script has counted, or an unlike number of backward passes. They may differ before the first unequal batch, too;
    then it is the script's own doing.

    Args:
        model: model; only one in DistributedDataParallel has whole parameters.
        is_host: whether looking at them waits for nothing.
    """

    def __init__(self, model: nn.Module, *, is_host: bool) -> None:
        is_whole = isinstance(model, DistributedDataParallel)
        trained = [each for each in model.parameters() if each.requires_grad and each.numel()] if is_whole else []
        self._parameters = trained[:: -(-len(trained) // MOST_LOOKED_AT) or 1]
        self._every = 1 if is_host else LOOK_EVERY
        self._looks = 0

    def checksum(self) -> float:
        """Return a number that is the same on ranks with the same parameters; nan where it is not looked at them."""
        self._looks += 1
        if not self._parameters or self._looks % self._every:
            return nan
        values = [each.detach().view(-1)[each.numel() // 2].double() for each in self._parameters]
        return float(crc32(torch.stack(values).cpu().numpy().tobytes()))

    def check(self, checksums: Sequence[float], *, has_changed: bool) -> None:
        """Check that the checksums of the ranks are the same.

        Args:
            checksums: checksum of each rank; nan for one that is lost or has not looked.
            has_changed: whether batches have had unequal sizes.

        Raises:
            UsageError: they were, and are not since batches have unequal sizes.
        """
        if len({each for each in checksums if not isnan(each)}) > 1:
            if has_changed:
                raise UsageError(refusal_of_parameters())
            self._parameters = []
