"""Tensors of a worker without a server: its rank steps the parameters with sums of the gradients of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
from torch import Tensor

from paceline.checkpoint.shard_states import ShardStates
from paceline.core.events import Measured
from paceline.engines.distributed.announced_sums.rank_parameters import RankParameters
from paceline.engines.distributed.announced_sums.shard_group import OwnShard, ShardGroup
from paceline.engines.distributed.announced_sums.update_follower import UpdateFollower
from paceline.engines.distributed.rank import Rank
from paceline.engines.distributed.rendezvous.session import ClientSession
from paceline.engines.distributed.transport.announced_messages import StepMade
from paceline.engines.distributed.transport.connection import Connection
from paceline.engines.distributed.transport.messages import Message
from paceline.engines.distributed.transport.task_messages import RemoteTaskCancelled, RemoteTaskDone
from paceline.engines.distributed.worker_tensors import Start, WorkerTensors
from paceline.server.parameter_server import ParameterServer
from paceline.worker.replica import Replica
from paceline.worker.torch_utils import build_model


class SummedTensors(WorkerTensors):
    """Versions of a worker, which its own rank makes, and its gradients, of which only the scalars leave.

    Args:
        rank: settings of this process.
        replica: replica of the worker.
        shards: group of the ranks that have the shards of the replica; None for a whole one.
    """

    _connection: Connection

    def __init__(self, rank: Rank, replica: Replica, shards: ShardGroup | None = None) -> None:
        job, cluster, own = rank.job, rank.cluster, rank.host.make_optimizer
        job = job if own is None else replace(job, optimizer=own)
        model, layout = build_model(job, rank.seed).to(replica.device), replica.layout
        self._server = ParameterServer(job, model, layout, rank.per_epoch, peers=shards, workers=cluster.n)
        self._shard: OwnShard | None = None
        if shards is not None:
            folder = rank.folder
            saved = None if folder is None else ShardStates(folder, shards.local_rank, shards.size)
            self._shard = OwnShard(shards, saved)
        rank.host.lifecycle.on_server(self._server)
        self._parameters = RankParameters(self._server, layout, cluster.worker, keeps_memory=shards is None)
        self.gradient = self._parameters.gradient
        self._transport = rank.transport
        if cluster.worker == 0:  # one process is enough
            self._server.watch_gradients()
        self._follower: UpdateFollower | None = None
        self._step: StepMade | None = None  # newest one that a coordinator may wait for

    def use(self, sessions: Sequence[ClientSession], start: Start, fail: Callable[[Exception], None]) -> None:
        """Use the connection to rank 0 from now on."""
        [session] = sessions
        self._connection = session.connection
        self._follower = UpdateFollower(
            self._parameters,
            self._server,
            session.connection,
            transport=self._transport,
            step=self._step,
            start=start,
            fail=fail,
            shard=self._shard,
        )

    def disconnect(self) -> int:
        """Keep the version of this rank, and nothing else, for another coordinator."""
        if self._follower is not None:
            self._follower.close(has_failed=True)
            self._step = self._follower.step
            self._follower = None
            self._parameters.disconnect()
        return self._parameters.number

    def on_message(self, message: Message) -> bool:
        """Take a message of the coordinator."""
        return self._follower is not None and self._follower.on_message(message)

    def begin(self, draw: int) -> None:
        """Do nothing: what the coordinator announces is followed in another thread."""

    def on_accumulated(self, parameter: int, busy_s: float, gradient: Tensor | None = None) -> Tensor | None:
        """Begin the sums of the parts of the gradient that are complete, if it is summed early."""
        return self._parameters.on_accumulated(parameter, gradient)

    def end(self, measured: Measured, done: Callable[[Measured], RemoteTaskDone], *, is_needed: bool) -> None:
        """Keep the gradient, and send its scalars."""
        message = done(measured)
        is_summed = self._parameters.end_task(message.draw, measured.mean_weight)
        self._connection.send(msgspec.structs.replace(message, is_summed=True) if is_summed else message)

    def cancel(self, draw: int) -> None:
        """Tell that the gradient will not come."""
        self._parameters.cancel_task()
        self._connection.send(RemoteTaskCancelled(draw))

    def check(self, checksum: int | None, who: str, at: str) -> None:
        """Do nothing: rank 0 has no version."""

    def close(self, *, has_failed: bool) -> None:
        """End the thread that follows the coordinator, and its groups."""
        if self._shard is not None and has_failed:
            self._shard.group.abort()
        if self._follower is not None:
            self._follower.close(has_failed=has_failed)
        if self._shard is not None:
            self._shard.group.close()
