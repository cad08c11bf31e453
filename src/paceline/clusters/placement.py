"""Placement of ranks on hosts, and their launch variables, for launchers that set none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.clusters.launch_env import SPAWN_SIDECARS, TOKEN

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Placement of the ranks of one run.

    Attributes:
        hosts: address of the host of each rank; empty for a rank that has no host yet.
        port: port of rank 0, from 1 to 65535.
        starts: number of times that rank 0 has been started, >= 1.
        may_spread: whether a rank that is started later may be on another host, although all are on one now.
        late: number of the last ranks, >= 0, that join after the start and do not count in ``WORLD_SIZE``.
    """

    hosts: tuple[str, ...]
    port: int
    starts: int = 1
    may_spread: bool = False
    late: int = 0

    def replaced(self, hosts: Mapping[int, str]) -> Placement:
        """Return the placement after some ranks were started again.

        Rank 0 keeps its port, because ranks that were started before it look for it there.

        Args:
            hosts: address of the host of each rank that was started again.

        >>> Placement(hosts=("a", "b"), port=4711).replaced({0: "c"}).hosts
        ('c', 'b')
        """
        merged = tuple(hosts.get(rank, host) for rank, host in enumerate(self.hosts))
        return replace(self, hosts=merged, starts=self.starts + (0 in hosts))

    def environment(self, rank: int) -> dict[str, str]:
        """Return the launch variables of a rank, without the token.

        >>> [Placement(hosts=("a", "b", "b"), port=4711).environment(rank)["LOCAL_RANK"] for rank in range(3)]
        ['0', '0', '1']
        """
        world_size = len(self.hosts) - self.late
        beside = [other for other, host in enumerate(self.hosts) if host == self.hosts[rank]]
        is_on_one_host = len({*self.hosts} - {""}) == 1 and not self.may_spread
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(beside.index(rank)),
            "LOCAL_WORLD_SIZE": str(min(len(beside), world_size)),  # `LaunchEnv` accepts no larger one
            "MASTER_ADDR": LOOPBACK if is_on_one_host else self.hosts[0],
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RESTART_COUNT": str(self.starts - 1),
        }


def actor_environment(placement: Placement, rank: int, token: str) -> dict[str, str]:
    """Return the launch variables of a rank in an actor of Ray, whose command cannot be run again.

    Args:
        placement: placement of all ranks.
        rank: number of the rank, >= 0.
        token: token of the run.
    """
    return {**placement.environment(rank), TOKEN: token, SPAWN_SIDECARS: "1"}
