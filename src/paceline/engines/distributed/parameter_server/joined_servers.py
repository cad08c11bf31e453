"""Servers that a worker joins: rank 0 or its standby, and then the server of each other shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from msgspec.structs import replace

from paceline.clusters.torchrun import Torchrun
from paceline.engines.distributed.rendezvous.handshake import RunFinished
from paceline.engines.distributed.rendezvous.rendezvous import join_rank_0
from paceline.engines.distributed.rendezvous.session import ClientSession
from paceline.engines.distributed.transport import messages
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.encoded import at_most, decoded
from paceline.engines.distributed.transport.transport import Transport


def join_servers(
    cluster: Torchrun, transport: Transport, hello: messages.Hello, standby: tuple[str, int] | None
) -> Iterator[ClientSession]:
    """Yield the session with rank 0 or its standby, and then with each shard server when all of them listen.

    Args:
        cluster: launch settings of this process.
        transport: transport of this process.
        hello: its introduction.
        standby: host and port of the standby; None without one.

    Raises:
        UsageError: a server rejects this process.
        RunError: rank 0 cannot be reached.
        RunFinished: the run has ended.
        ConnectionLost: a server has ended.
    """
    if standby is not None:
        cluster = dataclasses.replace(cluster, ranks=dataclasses.replace(cluster.ranks, server=standby))
    rank_0 = join_rank_0(cluster, transport, hello)
    yield rank_0
    if cluster.shards == 1:
        return
    match rank_0.connection.recv(cluster.start_timeout_s):
        case messages.ShardAddresses(encoded):
            addresses = decoded(encoded, at_most(messages.Addresses, cluster.shards - 1), "addresses")
            for shard, address in enumerate(addresses, start=1):
                known = replace(hello, peer_id=rank_0.peer_id)
                yield ClientSession.connect(transport, address, known, f"the server of shard {shard}")
        case messages.End() as end:
            raise RunFinished(end)
        case message:
            raise ConnectionLost(f"it has sent {type(message).__name__} before the addresses of the shard servers")
