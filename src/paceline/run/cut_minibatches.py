"""Whether the minibatches of a job can be cut into pieces, where its protocol does that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from paceline.clusters.torchrun import Torchrun
from paceline.jobs.job import Job
from paceline.jobs.model_checks import batch_norm_of, note_on_pieces
from paceline.policies.controllers.auto import chooses_shares, with_whole_minibatches
from paceline.policies.controllers.balance import balances_of
from paceline.run.config import RunConfig
from paceline.utils.rank_logger import RankLogger
from paceline.worker.loss_check import check_loss_of_pieces, why_not_in_pieces

LOG = RankLogger(__name__)


def with_cut_minibatches(config: RunConfig, model: nn.Module) -> RunConfig:
    """Return the configuration of a run whose protocol computes pieces of minibatches, if its job allows that.

    Else `auto` leaves minibatches whole, and other protocols are refused. Layers that normalize by their batch see
    smaller ones: `auto` leaves minibatches whole then, and with other protocols there is a note.

    Args:
        config: configuration as it was given.
        model: model of the job at the beginning of the run.

    Raises:
        UsageError: the loss of a minibatch is not the mean of those of its pieces.
    """
    job, plan, cluster = config.job, config.checked_plan, config.cluster
    sizes = sorted({each.sizes(job.batch_size).size for each in balances_of(plan)})
    if chooses_shares(config.plan):
        if reason := config.why_not_cut or _why_whole(job, model, sizes):
            LOG.info("%s leaves minibatches whole, and begins with fresh gradients of them: %s", plan, reason)
            return replace(config, plan=with_whole_minibatches(config.plan))
    elif not isinstance(cluster, Torchrun) or cluster.is_server:
        for size in sizes:
            check_loss_of_pieces(job, model, size, plan)
            if note := note_on_pieces(model, plan, size):
                LOG.warning(note)
    return config


def _why_whole(job: Job, model: nn.Module, sizes: Sequence[int]) -> str:
    """Return why minibatches are better left whole than computed in pieces of these sizes; empty if they are not."""
    if norm := batch_norm_of(model):
        return f"its layer {norm} would normalize by pieces of a minibatch"
    return next(filter(None, (why_not_in_pieces(job, model, size) for size in sizes)), "")
