"""`attach`: the user's own loop on the ranks of a launcher, with a server beside rank 0 or with all-reduce."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from paceline.catalogue.parser import parse_plan
from paceline.clusters.launch_env import started_by_torchrun
from paceline.clusters.parser import is_torchrun, parse_cluster
from paceline.clusters.rank_checks import why_not_summed
from paceline.clusters.torchrun import Torchrun
from paceline.core.stop import Stop
from paceline.errors import UsageError
from paceline.jobs.model_checks import why_not_trained
from paceline.jobs.shared_memory import why_not_apart
from paceline.policies.controllers.auto import with_whole_minibatches
from paceline.protocols.protocol import Phase, Plan, Protocol, as_plan
from paceline.user_loop.attached_run import AttachedRun
from paceline.user_loop.data.loader_checks import check_loader
from paceline.user_loop.data.loop_data import UserLoop
from paceline.user_loop.data.loop_digests import digests_of
from paceline.user_loop.data.pieces import check_pieces, log_pieces
from paceline.user_loop.data.replica_ranks import check_shards, group_size_of
from paceline.user_loop.rank_part import RankPart
from paceline.user_loop.run_options import RunOptions
from paceline.user_loop.server.served_part import ServedPart
from paceline.user_loop.several_optimizers import SeveralOptimizers, as_module, as_one, check_several, with_one_lease
from paceline.user_loop.shared_run import SharedRun
from paceline.user_loop.single_run import SingleRun
from paceline.user_loop.worker.allreduce_part import AllReducePart
from paceline.utils.argument_types import checked_types
from paceline.utils.rank_logger import RankLogger
from paceline.utils.spec_parser import parse_call
from paceline.utils.validation import check_range

LOG = RankLogger(__name__)
AnyProtocol = str | Protocol | Phase | Plan
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
SUPPORTED = {  # values of the arguments of `Torchrun` that have one value only
    "device": "cpu",
    "standby_sync": False,
}
on_shards: list[Callable[[], object]] = []  # called before a sharded model is attached
attached: list[SharedRun] = []  # the run of this process, also if the script has dropped it (decision 0031)


@checked_types
def attach(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loader: DataLoader[Any] | None,
    *,
    protocol: AnyProtocol,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    stop: str | Stop | None = None,
    clip_norm: float | None = None,
    accumulate: int = 1,
    cluster: str | Torchrun | None = None,
    group: Any = None,
    seed: int = 0,
    out: str | Path | None = None,
    **options: Any,
) -> AttachedRun:
    """Attach the loop of every rank to one run.

    Every rank that ``paceline run`` or torchrun has started is a worker. Before each ``optimizer.step()`` its gradient
    is handed in, and the step itself finds no gradient; after it the parameters are those of the version that the
    protocol gives this rank next. Where all gradients of a protocol are fresh (bsp, balanced, k_sync), the ranks sum
    those that count, and each steps a copy of its optimizer; else, and with ``torchrun(server=true)``, they go to a
    server, a process beside rank 0. With local steps ("bsp + local_steps(H=16)") the optimizer of each rank steps, and
    the change of H steps is sent. Under all_reduce, local_sgd, s3gd and dc_s3gd the optimizer of each rank steps, and
    the ranks average. Without a launcher the loop trains alone.

    Args:
        model: model without DistributedDataParallel, equal on all ranks; that of rank 0 is the first version. Or
            several models, as [generator, critic].
        optimizer: optimizer whose ``step()`` needs gradients only, so not LBFGS. Its learning rates are those of the
            run, so that schedulers work as before. The run begins with its state at rank 0. A copy has that state
            until the end, where ``state_dict()`` reads it; with a server that is so at rank 0 only. With local steps
            each rank has its own state. Or several optimizers of different parameters, as [opt_g, opt_d], which the
            loop steps in turn: each step is an update of its parameters, and an iteration makes several updates.
        loader: DataLoader without a DistributedSampler. Of map-style data the ranks are dealt the minibatches of
            ``batch_size * accumulate`` samples, each once per epoch; without ``drop_last``, the last one is smaller.
            Samples too few for ``accumulate`` batches are left out. A sampler of your own gives the order, or whole
            batches, on all ranks with the same random numbers. Under ``balanced`` a batch is a lease of samples, whose
            number varies, and ``run.stepped`` tells whether a step made an update. An IterableDataset is read by each
            rank itself, and with None the loop draws its data, and iterates over ``run.steps(1000)``: a gradient that
            is dropped is then a dropped batch.
        protocol: protocol, phase or plan, as ``pl.k_sync(k=3)``, or its text: "k_sync(k=3)", "all_reduce".
        scheduler: learning-rate scheduler of the optimizer, which the loop steps as before, or several. In a loop over
            ``run.loader`` it goes to W / n steps after W gradients of n ranks, so that all ranks agree whatever their
            speed; between two such loops it steps once per epoch. Its length is that of one rank, as with
            DistributedDataParallel. Without a server the loop steps it, as all ranks make the same number of steps.
        stop: conditions that end the run, as "loss=0.2,epochs=10"; ``run.epochs(10)`` sets the epochs by default. A
            loop without ``run.epochs`` needs it: each iteration over ``run.loader`` is then the next epoch.
        clip_norm: largest norm of the mean gradient, in place of ``clip_grad_norm_`` in the loop; with local steps, of
            the gradient of each step.
        accumulate: calls of ``backward`` for each ``optimizer.step()``, >= 1; losses are divided by it in the loop.
        cluster: how the processes reach each other, as the text "torchrun(address=10.0.0.1)", which a process alone
            ignores, or as ``pl.Torchrun(...)``, which needs torchrun.
        group: mesh over which ``fully_shard`` has sharded the model; None to find it. The ranks of the mesh are then
            one worker, and each has batches of its own. Without a server only.
        seed: seed of the order of the data, >= 0.
        out: folder in which rank 0 records the run.
        options: ``overwrite``, ``resume``, ``checkpoint_every``, ``keep_checkpoints``, ``worker_timeout_s`` and
            ``measure_steps``, as in `pl.train`; ``lr_rule`` and ``lr_of``, as in `Job`; ``metrics``, a port or
            "HOST:PORT" for `Prometheus`; ``on_end="return"`` for a loop that reads ``run.stopped_by`` after a run that
            has diverged or was interrupted, in place of the exceptions below; ``callbacks``, which run in the process
            of the coordinator.

    Raises:
        UsageError: the arguments cannot work.

    The run itself raises in the loop:
        RunError: the run has failed, or training diverged.
        SystemExit: the run was interrupted, with status 130; or this rank was asked to leave.

    Example:
        >>> import paceline as pl
        >>> data = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.zeros(8, 1))
        >>> model = nn.Linear(2, 1)
        >>> optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=4)
        >>> run = pl.attach(model, optimizer, loader, protocol="balanced(m=2)")
        >>> for epoch in run.epochs(2):
        ...     for x, y in run.loader:
        ...         optimizer.zero_grad()
        ...         loss = nn.functional.mse_loss(model(x), y)
        ...         loss.backward()
        ...         optimizer.step()
        >>> run.over
        True
    """
    check_range("[1, inf)", accumulate=accumulate)
    model, optimizer = as_module(model), as_one(optimizer)
    plan = with_whole_minibatches(parse_plan(protocol) if isinstance(protocol, str) else as_plan(protocol))
    if isinstance(optimizer, SeveralOptimizers):
        plan = with_one_lease(plan)
    callbacks = tuple(options.pop("callbacks", ()))
    chosen = RunOptions.of({**options, "seed": seed, "out": out})
    _check_model(model)
    if loader is not None:
        check_loader(loader)
    loop = UserLoop(model=model, optimizer=optimizer, loader=loader, accumulate=accumulate, clip_norm=clip_norm)
    check_pieces(plan, loop)
    stop = Stop.parse(stop) if isinstance(stop, str) else stop
    if isinstance(optimizer, SeveralOptimizers):
        check_several(plan, stop, accumulate)
    if isinstance(cluster, str):
        _check_text(cluster)
    if not started_by_torchrun(os.environ):
        LOG.warning(
            "no launcher has started this process, as paceline run does: the loop trains alone, without a protocol, "
            "stop conditions or a recorded run"
        )
        return SingleRun(optimizer, loader, clip_norm)
    if attached and not attached[-1].over:
        raise UsageError("this process has an attached run already: call its finish() before attach")
    steps_here = plan.allreduce is not None or plan.local_steps is not None
    reason = why_not_trained(model) or why_not_apart(model, with_frozen=steps_here)
    if reason:
        raise UsageError(reason)
    for ended in attached:
        ended.release()  # else its hooks would refuse the steps of the next run
    cluster = _ranks(cluster)
    size = group_size_of(model, group, cluster.ranks.launch_rank)
    cluster = _joined_groups(cluster, size)
    chosen.check_folder(cluster)
    loop = loop._replace(group_size=size)
    if size > 1:
        check_shards(plan, loop)
        for call in on_shards:
            call()
    loop = loop._replace(digests=digests_of(model, loader, plan))
    part: RankPart
    if plan.allreduce is not None:
        cluster = cluster.fitted_to(plan)
        _check_cluster(cluster, debug=False, shards=1, standby=0, workers="process")
        part = AllReducePart(loop, plan, cluster, chosen, callbacks)
    else:
        _check_cluster(cluster)
        cluster = _with_server_if_needed(cluster, plan, size)
        part = ServedPart(loop, plan, cluster, cluster.ranks, options=chosen, callbacks=callbacks)
    if not cluster.ranks.launch_rank:
        log_pieces(plan, loop)
    run = SharedRun(loop, stop, part, returns=chosen.on_end == "return")
    for each in [scheduler] if isinstance(scheduler, LRScheduler) else scheduler or ():
        run.set_scheduler(each)
    attached[:] = [run]
    return run


def _check_model(model: nn.Module) -> None:
    if isinstance(model, DistributedDataParallel):
        raise UsageError("the model is a DistributedDataParallel: give the model itself, as attach(ddp.module, ...)")
    for name, module in model.named_modules():
        if type(module).__name__ in WRAPPERS:  # their import is slow
            raise UsageError(
                f"the model has a {type(module).__name__} ({name or 'the model itself'}), which exchanges gradients "
                "too: attach the model without it"
            )


def _check_text(cluster: str) -> None:
    if not is_torchrun(cluster):
        raise UsageError(
            f"cluster={cluster!r}, but attach is for processes that torchrun starts: give text as "
            '"torchrun(encrypt=false)", or omit it'
        )
    parse_call(cluster, "torchrun(encrypt=false)")


def _ranks(cluster: str | Torchrun | None) -> Torchrun:
    """Return the ranks that torchrun has started."""
    if isinstance(cluster, str):
        parsed = parse_cluster(cluster)
        assert isinstance(parsed, Torchrun)
        return parsed
    return cluster or Torchrun()


def _joined_groups(cluster: Torchrun, size: int) -> Torchrun:
    """Return the ranks of this launcher as a part of those of all groups.

    Args:
        cluster: how the processes reach each other.
        size: ranks that hold a replica of the model together.

    Raises:
        UsageError: this launcher has started more than one group, or the groups do not find each other.
    """
    groups, ranks = cluster.groups, cluster.ranks
    if groups == 1:
        return cluster
    if size != ranks.world_size:
        raise UsageError(
            f"groups={groups}, but the model is sharded over {size} of the {ranks.world_size} ranks of this one: call "
            "fully_shard(model) without a mesh"
        )
    if cluster.port is None:
        raise UsageError(
            f"groups={groups} with address={cluster.address!r}: the groups have launchers of their own, so they find "
            "each other by a port only: give every one the same, as address='10.0.0.1:29511'"
        )
    ranks = replace(ranks, rank=cluster.group * size + ranks.rank, world_size=groups * size)
    return replace(cluster, ranks=ranks, groups=1, group=0)


def _with_server_if_needed(cluster: Torchrun, plan: Plan, group_size: int) -> Torchrun:
    """Return ranks without a server, unless one was asked for, or a stale gradient or an option needs it."""
    if group_size > 1:
        return replace(cluster, server=bool(cluster.server), group_size=group_size)  # a server has whole models
    is_asked_for = cluster.server is not None or cluster.tls_cert is not None or cluster.workers == "node"
    is_stale = any(phase.protocol.max_staleness > 0 for phase in plan.phases)
    needs_server = is_asked_for or is_stale or why_not_summed(plan, vars(cluster))
    return cluster if needs_server else replace(cluster, server=False)


def _check_cluster(cluster: Torchrun, **also: Any) -> None:
    for name, expected in {**SUPPORTED, **also}.items():
        if getattr(cluster, name) != expected:
            raise UsageError(f"cluster has {name}={getattr(cluster, name)!r}, which attach does not support: omit it")
