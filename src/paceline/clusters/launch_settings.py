"""Settings of `paceline run`, and the launch variables of its ranks: those of torchrun."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.clusters.launch_env import KEEPS_RANKS, TOKEN

ROLE = "default"
RUN_ID = "none"  # as torchrun


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """Ranks of a host, and where they meet.

    Attributes:
        nproc_per_node: number of ranks of each host, >= 1.
        nnodes: number of hosts, >= 1.
        node_rank: number of this host, >= 0, 0 for the host of rank 0.
        master: address of the host of rank 0.
        port: port there; 0 for a free one, with one host.
        max_restarts: number of times that each rank is started again, >= 0; -1 for no limit.
        token: token of the run; empty for that of the environment.
    """

    nproc_per_node: int
    nnodes: int
    node_rank: int
    master: str
    port: int
    max_restarts: int
    token: str

    @property
    def world_size(self) -> int:
        """Number of ranks of all hosts."""
        return self.nproc_per_node * self.nnodes

    @property
    def ranks(self) -> range:
        """Numbers of the ranks of this host."""
        return self.ranks_of(self.node_rank)

    def ranks_of(self, node: int) -> range:
        """Return the numbers of the ranks of a host."""
        return range(node * self.nproc_per_node, (node + 1) * self.nproc_per_node)

    def environment(self, rank: int, port: int, restarts: int) -> dict[str, str]:
        """Return the launch variables of a rank.

        Args:
            rank: number of the rank, >= 0.
            port: port of the store on the host of rank 0.
            restarts: number of times that this rank was started before, >= 0.
        """
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(rank % self.nproc_per_node),
            "LOCAL_WORLD_SIZE": str(self.nproc_per_node),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.nnodes),
            "ROLE_NAME": ROLE,
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.master,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_RUN_ID": RUN_ID,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            KEEPS_RANKS: "1",
            **({TOKEN: self.token} if self.token else {}),
        }
