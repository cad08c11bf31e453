"""Pieces of the batches of a loop, under protocols that cut them."""

from __future__ import annotations

from paceline.errors import UsageError
from paceline.jobs.model_checks import note_on_pieces
from paceline.policies.controllers.balance import balances_of
from paceline.protocols.protocol import Plan
from paceline.user_loop.data.loader_checks import draws_itself, stacks_samples
from paceline.user_loop.data.loop_data import LoopData, UserLoop
from paceline.user_loop.several_optimizers import SeveralOptimizers
from paceline.utils.rank_logger import RankLogger
from paceline.utils.wording import counted

LOG = RankLogger(__name__)


def check_pieces(plan: Plan, loop: UserLoop) -> None:
    """Check that the minibatches of a loop can be cut, if the protocol cuts them.

    Args:
        plan: protocol of each phase.
        loop: parts of the loop.

    Raises:
        UsageError: the samples are not dealt one by one, the last minibatch of an epoch is smaller than the others, or
            a piece is not of whole batches.
    """
    if not plan.sets_shares:
        return
    loader, accumulate = loop.loader, loop.accumulate
    if loader is None or draws_itself(loader) or not stacks_samples(loader):
        reason = "are of each rank" if loader is None or draws_itself(loader) else "are those of a batch sampler"
        raise UsageError(f"{plan} cuts minibatches into pieces, but the batches {reason}: type bsp")
    data = LoopData.of_loop(loop)
    left = (data.samples if data.drawn is None else data.drawn) % data.batch_size
    if left and not data.drop_last:
        raise UsageError(
            f"{plan} cuts minibatches of {data.batch_size} samples, and the last one of an epoch has {left}: give the "
            "DataLoader drop_last=True, or type bsp"
        )
    for controller in balances_of(plan):
        piece = controller.sizes(data.batch_size).size
        batches = accumulate * loop.group_size
        if piece % batches:
            those = f"accumulate={accumulate} batches" if loop.group_size == 1 else f"{batches} batches of its ranks"
            raise UsageError(
                f"{plan} cuts a minibatch into pieces of {counted(piece, 'sample')}, which {those} cannot share "
                f"evenly: give an m that divides the batch size {data.batch_size // batches}"
            )


def check_hosts(plan: Plan, loop: UserLoop, ranks: int) -> None:
    """Check that the ranks of a host can share each minibatch of a loop.

    Args:
        plan: protocol of each phase.
        loop: parts of the loop.
        ranks: ranks of a host, >= 1.

    Raises:
        UsageError: a rank may have no sample of a minibatch, or the loop hands in more than one gradient of it.
    """
    if ranks == 1:
        return
    instead = "omit workers='node', so that each rank is a worker"
    if plan.local_steps is not None or plan.sets_shares:
        raise UsageError(f"{plan} with workers='node': a host hands in one gradient of each minibatch; {instead}")
    if isinstance(loop.optimizer, SeveralOptimizers):
        raise UsageError(f"several optimizers with workers='node': {instead}")
    loader, least = loop.loader, ranks * loop.accumulate
    if loader is None or draws_itself(loader):
        return
    data = LoopData.of_loop(loop)
    left = (data.samples if data.drawn is None else data.drawn) % data.batch_size
    if not stacks_samples(loader) or data.batch_size < least or (0 < left < least and not data.drop_last):
        raise UsageError(
            f"workers='node': {ranks} ranks of a host share each minibatch, which needs {least} samples of one order: "
            f"give the DataLoader a larger batch_size and drop_last=True, or {instead}"
        )


def log_pieces(plan: Plan, loop: UserLoop) -> None:
    """Log what to know of a model whose minibatches the protocol cuts.

    Args:
        plan: protocol of each phase.
        loop: parts of the loop.
    """
    batch_size = LoopData.of_loop(loop).batch_size
    for size in sorted({each.sizes(batch_size).size // loop.accumulate for each in balances_of(plan)}):
        if note := note_on_pieces(loop.model, plan, size):
            LOG.warning(note)
