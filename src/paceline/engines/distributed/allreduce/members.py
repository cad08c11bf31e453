"""Members of a group for sums, as rank 0 reaches them."""

from __future__ import annotations

from paceline.engines.distributed.rendezvous.acceptor import AcceptedPeer
from paceline.engines.distributed.transport.messages import Message

LOOPBACK = ("127.0.0.1", "::1")


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
