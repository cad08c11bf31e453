"""What the environment of a process says about it and the others of its job, as torchrun sets it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.utils.wording import counted

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TOKEN = "PACELINE_TOKEN"
NODE, NODES = "GROUP_RANK", "GROUP_WORLD_SIZE"
ASSISTANT = "PACELINE_ASSISTANT"  # number of a worker that rank 0 has started beside itself
COMMAND = "torchrun --nproc-per-node 4 train.py, or -m paceline train ... in place of train.py"
TO_JOIN = "to join a run, give the WORLD_SIZE that all others have and the RANK of a process that is gone"
BY_HAND = f"start every process with torchrun, as in {COMMAND}; or set {', '.join(NEEDED)} and {TOKEN} for each"


@dataclass(frozen=True)
class LaunchEnv:
    """What the environment says about this process and the others of its job.

    Attributes:
        rank: of this process, 0 for the one with coordinator and server.
        world_size: processes of the job.
        local_rank: of this process on its host.
        local_world_size: processes on this host.
        node: number of this host, 0 for that of rank 0; None if it is not told.
        nodes: how many hosts there are, likewise.
        master: host and port that every process knows.
        has_agent: whether torchrun listens there; else it is for rank 0 to listen.
        restarts: how often torchrun has started the job again after a failure.
        max_restarts: how often it would.
        token: that every process of the job knows, and nobody else.
        assistant: the number of the worker that this process is, if rank 0 has started it.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int | None
    nodes: int | None
    master: tuple[str, int]
    has_agent: bool
    restarts: int
    max_restarts: int
    token: str
    assistant: int | None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> LaunchEnv:
        """Read torchrun's variables.

        Raises:
            UsageError: some are missing, or they contradict each other.
        """
        missing = [name for name in NEEDED if not environment.get(name)]
        if missing:
            given = [name for name in NEEDED if name not in missing]
            beside = f", though {', '.join(given)} {_is(given)} set" if given else ""
            raise UsageError(f"{', '.join(missing)} {_is(missing)} not set{beside}: {BY_HAND}")
        world_size = _number(environment, "WORLD_SIZE", 1, None)
        local = _number(environment, "LOCAL_WORLD_SIZE", 1, world_size, default=1)
        assistant = environment.get(ASSISTANT)
        told = [name for name in (NODE, NODES) if environment.get(name)]
        alone = {} if told or local < world_size else {NODE: "0", NODES: "1"}
        return cls(
            rank=_number(environment, "RANK", 0, world_size - 1, advice=f"ranks are counted from 0; {TO_JOIN}"),
            world_size=world_size,
            local_rank=_number(environment, "LOCAL_RANK", 0, None, default=0),
            local_world_size=local,
            node=_number_or_none({**environment, **alone}, NODE, 0, world_size - 1),
            nodes=_number_or_none({**environment, **alone}, NODES, 1, world_size),
            master=(environment["MASTER_ADDR"], _number(environment, "MASTER_PORT", 1, 65535)),
            has_agent=environment.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true",
            restarts=_number(environment, "TORCHELASTIC_RESTART_COUNT", 0, None, default=0),
            max_restarts=_number(environment, "TORCHELASTIC_MAX_RESTARTS", 0, None, default=0),
            token=_token(environment),
            assistant=int(assistant) if assistant else None,
        )

    def check_nodes(self) -> None:
        """Refuse processes of which it is not known on which host they are, or hosts with more of them than others.

        Raises:
            UsageError: that is so.
        """
        if self.node is None or self.nodes is None:
            raise UsageError(
                f"workers='node', but {NODE} or {NODES} is not set: torchrun sets both; elsewhere set {NODE} to the "
                f"number of the host, 0 for that of rank 0, and {NODES} to how many there are, and LOCAL_RANK and "
                "LOCAL_WORLD_SIZE beside"
            )
        if self.world_size != self.nodes * self.local_world_size:
            raise UsageError(
                f"workers='node', but {counted(self.local_world_size, 'process', 'processes')} on this host "
                f"and {self.world_size} on "
                f"{counted(self.nodes, 'host')}: start as many on every host"
            )
        if self.rank != self.node * self.local_world_size + self.local_rank:
            raise UsageError(
                f"workers='node', but RANK={self.rank} is not {NODE}={self.node} * LOCAL_WORLD_SIZE="
                f"{self.local_world_size} + LOCAL_RANK={self.local_rank}: number the processes host by host"
            )


def started_by_torchrun(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun, or somebody with all of its variables, has started this process."""
    return all(environment.get(name) for name in NEEDED)


def _number(
    environment: Mapping[str, str],
    name: str,
    least: int,
    most: int | None,
    default: int | None = None,
    advice: str = BY_HAND,
) -> int:
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        upper = f" and <= {most}" if most is not None else ""
        raise UsageError(f"{name}={text!r}, expected a whole number >= {least}{upper}: {advice}")
    return int(text)


def _number_or_none(environment: Mapping[str, str], name: str, least: int, most: int) -> int | None:
    return _number(environment, name, least, most) if environment.get(name) else None


def _token(environment: Mapping[str, str]) -> str:
    """Return the secret of the job; torchrun's id of the run is none to rely on beyond one machine."""
    token = environment.get(TOKEN)
    if token:
        return token
    run = environment.get("TORCHELASTIC_RUN_ID")
    if run is None:
        raise UsageError(f"{TOKEN} is not set, nor was this process started by torchrun: {BY_HAND}")
    return f"run {run}"


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
