"""Pieces of the batches of a loop, under protocols that cut them."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from paceline.errors import UsageError
from paceline.policies.controllers.balance import balances_of
from paceline.protocols.protocol import Plan
from paceline.user_loop.data.loop_data import LoopData
from paceline.utils.wording import counted


def check_pieces(plan: Plan, loader: DataLoader[Any], accumulate: int) -> None:
    """Check that the minibatches of a loop can be cut, if the protocol cuts them.

    Args:
        plan: protocol of each phase.
        loader: DataLoader of the user.
        accumulate: batches of each step, >= 1.

    Raises:
        UsageError: the last minibatch of an epoch is smaller than the others, or a piece is not of whole batches.
    """
    if not plan.sets_shares:
        return
    data = LoopData.of_loader(loader, accumulate, "")
    left = (data.samples if data.drawn is None else data.drawn) % data.batch_size
    if left and not data.drop_last:
        raise UsageError(
            f"{plan} cuts minibatches of {data.batch_size} samples, and the last one of an epoch has {left}: give the "
            "DataLoader drop_last=True, or type bsp"
        )
    for controller in balances_of(plan):
        piece = controller.sizes(data.batch_size).size
        if piece % accumulate:
            raise UsageError(
                f"{plan} cuts a minibatch into pieces of {counted(piece, 'sample')}, which accumulate={accumulate} "
                f"batches cannot share evenly: give an m that divides the batch size {data.batch_size // accumulate}"
            )
