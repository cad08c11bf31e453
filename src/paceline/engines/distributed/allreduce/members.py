"""Members of a group for sums, as rank 0 reaches them."""

from __future__ import annotations

import secrets
from collections.abc import Collection

from paceline.engines.distributed.allreduce.elastic_group import ElasticGroup
from paceline.engines.distributed.rendezvous.acceptor import AcceptedPeer
from paceline.engines.distributed.transport.group_store import GroupStore
from paceline.engines.distributed.transport.messages import Message
from paceline.engines.distributed.transport.sum_messages import FormGroup

LOOPBACK = ("127.0.0.1", "::1")


def have_own_gpus(gpus: Collection[str]) -> bool:
    """Return whether each process has a GPU that no other one uses, as NCCL requires.

    >>> have_own_gpus(["GPU-1", "GPU-2"]), have_own_gpus(["GPU-1", "GPU-1"]), have_own_gpus(["GPU-1", ""])
    (True, False, False)
    """
    return all(gpus) and len(set(gpus)) == len(gpus)


class Members(dict[int, AcceptedPeer]):
    """Members by worker, without rank 0 itself."""

    def send(self, message: Message, sender: int = 0) -> set[int]:
        """Send a message to all members but its sender; return their workers."""
        receivers = self.keys() - {sender}
        for worker in receivers:
            self[worker].connection.send(message)
        return receivers

    @property
    def host(self) -> str:
        """Address of this host at which the members reach it; another one than loopback, if there is one."""
        hosts = {member.connection.local_host for member in self.values()}
        return min(hosts, key=lambda host: (host in LOOPBACK, host), default="")

    @property
    def gpus(self) -> list[str]:
        """Identifiers of the GPUs of the members, each empty for none."""
        return [member.gpu for member in self.values()]

    def announce(self, generation: int, store: GroupStore, uses_nccl: bool) -> ElasticGroup:
        """Announce a new group to all members, and return it; their ranks are in the order of their numbers.

        Args:
            generation: number of the group.
            store: store of the group at rank 0.
            uses_nccl: whether NCCL sums; else gloo does.
        """
        key = secrets.token_hex(32)  # a stranger that finds the sockets of gloo cannot join the group
        size = 1 + len(self)
        for rank, worker in enumerate(sorted(self), start=1):
            self[worker].connection.send(
                FormGroup(generation=generation, key=key, rank=rank, size=size, uses_nccl=uses_nccl)
            )
        return ElasticGroup(key, 0, size, store, uses_nccl=uses_nccl)
