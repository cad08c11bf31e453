"""Roles of the processes of a distributed run: each leads it, works, serves a shard, follows a leader, or stands by."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from math import inf
from typing import Any

import torch
from torch import nn

from paceline.core.wire import parse_wire
from paceline.engines.distributed.allreduce.rank_run import RankRun
from paceline.engines.distributed.node_worker.follower import follow
from paceline.engines.distributed.parameter_server.remote_workers import RemoteWorkers
from paceline.engines.distributed.parameter_server.shard_clients import ShardClients
from paceline.engines.distributed.parameter_server.shard_server import serve_shard
from paceline.engines.distributed.parameter_server.worker_process import work
from paceline.engines.distributed.rank import Rank
from paceline.engines.distributed.rendezvous.handshake import RunFinished
from paceline.engines.distributed.rendezvous.session import FinalState
from paceline.engines.distributed.rendezvous.sidecar import STOP_TIMEOUT_S
from paceline.engines.distributed.standby.standby import Standby
from paceline.engines.distributed.transport.messages import End
from paceline.engines.loop import RunLoop
from paceline.errors import UsageError
from paceline.jobs.job import trainable
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout
from paceline.worker.allreduce import make_algorithm
from paceline.worker.torch_utils import build_model


def make_engine(
    rank: Rank, server: ParameterServer, layout: FlatLayout, shards: ShardClients, stop: str
) -> RunLoop | Standby | RankRun:
    """Return what runs at rank 0 or its standby under a protocol with a server, or at any rank under one without.

    Args:
        rank: settings of this process.
        server: server of the parameters, or of their first shard.
        layout: layout of what the server holds.
        shards: clients of the servers of the other shards.
        stop: stop conditions of the run, as text.
    """
    allreduce = rank.plan.allreduce
    if rank.cluster.is_standby:
        return Standby(rank, server, layout, stop)
    if allreduce is None:
        return RemoteWorkers(rank, server, layout, shards).loop()
    if server.device.type != "cpu" and parse_wire(rank.cluster.wire) is not None:
        raise UsageError(
            f"wire={rank.cluster.wire!r}: sums on {server.device} are in float32; omit wire, or give device='cpu'"
        )
    settings: dict[str, Any] = {"device": server.device, "debug": rank.cluster.debug, "shards": allreduce.fragments}
    replica = rank.host.make_replica(rank.job, rank.seed, rank.cluster.n, **settings)
    return RankRun(rank, allreduce, replica, make_algorithm(allreduce, server, layout))


def take_part(rank: Rank, train: Callable[[], tuple[nn.Module, End]]) -> tuple[nn.Module, End]:
    """Take part in the run of rank 0 until it ends; return the trained model, and why the run ended.

    Args:
        rank: settings of this process, which is not rank 0.
        train: runs the engine of this process under a protocol without a server.

    Raises:
        UsageError: rank 0 has other settings, or the job cannot work.
        RunError: the run has failed.
        RunFinished: the run ended before this process took part.
    """
    while True:
        try:
            result = _take_part(rank) if rank.plan.allreduce is None else train()
        except RunFinished:
            if not rank.host.lifecycle.has_taken_part:
                raise
            time.sleep(rank.transport.poll_s)  # the notice of the previous run, which rank 0 has not removed yet
        else:
            rank.host.lifecycle.has_taken_part = True
            return result


def _take_part(rank: Rank) -> tuple[nn.Module, End]:
    with closing(rank):
        model = build_model(rank.job, rank.seed)
        job_spec = rank.make_job_spec(model)
        if rank.cluster.shard is not None:
            return model, serve_shard(rank, model, job_spec)
        if isinstance(rank.job.model, nn.Module):
            del model  # a copy of it: another one at the end leaves the run its memory
            final = _work_or_follow(rank, job_spec)
            model = build_model(rank.job, rank.seed)
        else:
            final = _work_or_follow(rank, job_spec)
        _load(model, final.parameters)
        return model, final.end


def _work_or_follow(rank: Rank, job_spec: dict[str, Any]) -> FinalState:
    """Compute gradients, alone or with the other processes of a host, and end the processes beside this one."""
    cluster = rank.cluster
    sidecars = [rank.host.start_sidecar(number) for number in cluster.sidecars_here]
    try:
        final = (follow if cluster.rank_in_node else work)(rank, job_spec)
    except SystemExit:  # this worker leaves, and its host may go away
        for standby in sidecars if cluster.standby else ():
            standby.terminate()  # it saves the run if it has become the server
            standby.wait(None)
        raise
    for sidecar in sidecars:
        if final.end.has_failed:
            sidecar.kill()  # it may be the process that hangs, and only this process waits for it
        # A standby that has become the server still evaluates and saves the model.
        sidecar.stop(inf if cluster.standby else STOP_TIMEOUT_S)
    return final


def _load(model: nn.Module, final: FlatBuffers) -> None:
    with torch.no_grad():
        tensors = zip([*trainable(model), *model.buffers()], [*final.parameters, *final.buffers], strict=True)
        for ours, theirs in tensors:
            ours.copy_(theirs)
