"""Digests of the parts of a loop, by which ranks that have other ones are noticed."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from paceline.protocols.protocol import Plan
from paceline.user_loop.data.dealt_batches import order_digest
from paceline.user_loop.data.frozen_parameters import frozen_digest
from paceline.user_loop.data.loop_data import LoopDigests
from paceline.user_loop.data.sample_digest import sample_digest


def digests_of(model: nn.Module, loader: DataLoader[Any] | None, plan: Plan) -> LoopDigests:
    """Return the digests of a loop; under `all_reduce` and its kin rank 0 sends its frozen parameters."""
    frozen = "" if plan.allreduce is not None else frozen_digest(model)
    if loader is None:
        return LoopDigests(frozen=frozen)
    return LoopDigests(sample_digest(loader), order_digest(loader), frozen)
