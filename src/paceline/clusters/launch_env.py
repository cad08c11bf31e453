"""Launch settings of a process from the environment variables that torchrun and `paceline run` set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.utils.wording import counted

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TOKEN = "PACELINE_TOKEN"
NEW_TOKEN = f"make a token on one host, export {TOKEN}=$(paceline token), and set the same value on every other host"
NODE, NODES = "GROUP_RANK", "GROUP_WORLD_SIZE"
SERVER = "PACELINE_SERVER"  # host and port of the server that a process joins, if it is not at rank 0
SIDECAR = "PACELINE_SIDECAR"  # number of the worker that runs in a process started by rank 0
KEEPS_RANKS = "PACELINE_KEEPS_RANKS"  # "1" under `paceline run`, which starts a rank again alone
STANDBY, ENDED = "paceline/standby", "paceline/ended"  # in the store of `paceline run`: what holds for the run
BOUND = "paceline/bound"  # in that store: the ranks are in a process group of torch, and none goes on without another
SURVIVES = "paceline/survives"  # in that store: they are, but those that are left go on
SILENCE = "paceline/silence"  # in that store: seconds for which a rank may be silent
UNFIT = "paceline/unfit"  # in that store: why they do not
EVENTS, EVENT = "paceline/events", "paceline/event"  # in that store: number of events that all know, and each of them
HOST = "paceline/host"  # in that store: number of heartbeats of each other host than that of rank 0
BEGUN = "paceline/begun"  # in that store: digests of the runs that have begun, a line each
BEGUN_BEFORE = "PACELINE_BEGUN"  # the same of the attempts before this one
SPAWN_SIDECARS = "PACELINE_SPAWN_SIDECARS"  # "1" where the command of a process cannot be run again, as in Ray
COMMAND = "paceline run --nproc-per-node 4 train.py, or -m paceline train ... in place of train.py"
TO_JOIN = (
    "to join a run, set the WORLD_SIZE of the other processes and the RANK of a process that has ended; or start every "
    "process with torchrun(max_workers=N), which admits more"
)
BY_HAND = f"start the processes with a launcher, as {COMMAND}; or set {', '.join(NEEDED)} for each process"


@dataclass(frozen=True, kw_only=True)
class LaunchEnv:
    """Launch settings of this process.

    Attributes:
        rank: rank of this process, >= 0; rank 0 hosts the coordinator and the server.
        world_size: number of processes that the launcher has started, >= 1; others may join with higher ranks.
        local_rank: rank of this process on its host, >= 0.
        local_world_size: number of processes on this host, >= 1.
        node: number of this host, >= 0, 0 for the host of rank 0; None if not set.
        nodes: number of hosts on which the launcher has started processes, >= 1; None if not set.
        master: host and port of the rendezvous, the same for every process.
        has_agent: whether torchrun listens there; else rank 0 does.
        restarts: number of restarts of the job by torchrun, or of this rank by ``paceline run``, so far, >= 0.
        max_restarts: largest number of restarts, >= 0; -1 for no limit.
        run_id: id of the run under torchrun; empty without torchrun.
        token: secret that the processes of the job share; empty if not set.
        sidecar: number of the worker in this process, if rank 0 started it; else None.
        server: host and port of the server, if it is not at rank 0; else None.
        ranks_before: ranks of the run before those of the launcher, >= 0: 1 if the server is a process of its own.
        keeps_ranks: whether the launcher keeps the other ranks when one ends; torchrun ends them.
        begun: digests of the runs that began before ``paceline run`` started all ranks again.
        spawns_sidecars: whether this process starts its sidecars with its pickled job; else with its command.
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
    run_id: str
    token: str
    sidecar: int | None
    server: tuple[str, int] | None = None
    ranks_before: int = 0
    keeps_ranks: bool = False
    begun: tuple[str, ...] = ()
    spawns_sidecars: bool = False

    @property
    def launch_rank(self) -> int:
        """Rank that the launcher has given to this process."""
        return self.rank - self.ranks_before

    @property
    def ends_together(self) -> bool:
        """Whether the launcher ends all processes of a host when one fails, as torchrun does."""
        return self.has_agent and not self.keeps_ranks

    @property
    def server_name(self) -> str:
        """Name of the process that hosts the coordinator and the server."""
        return "the coordinator beside rank 0" if self.ranks_before else "rank 0"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> LaunchEnv:
        """Read torchrun's variables.

        Raises:
            UsageError: a variable is missing or out of its range.
        """
        missing = [name for name in NEEDED if not environment.get(name)]
        if missing:
            given = [name for name in NEEDED if name not in missing]
            although = f", although {', '.join(given)} {_is(given)} set" if given else ""
            raise UsageError(f"{', '.join(missing)} {_is(missing)} not set{although}: {BY_HAND}")
        world_size = _number(environment, "WORLD_SIZE", 1, None)
        local = _number(environment, "LOCAL_WORLD_SIZE", 1, world_size, default=1)
        sidecar = environment.get(SIDECAR)
        has_nodes = environment.get(NODE) or environment.get(NODES)
        single = {} if has_nodes or local < world_size else {NODE: "0", NODES: "1"}  # all processes are on this host
        return cls(
            rank=_number(environment, "RANK", 0, None),
            world_size=world_size,
            local_rank=_number(environment, "LOCAL_RANK", 0, None, default=0),
            local_world_size=local,
            node=_number_or_none({**environment, **single}, NODE, 0, None),
            nodes=_number_or_none({**environment, **single}, NODES, 1, world_size),
            master=(environment["MASTER_ADDR"], _number(environment, "MASTER_PORT", 1, 65535)),
            has_agent=environment.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true",
            restarts=_number(environment, "TORCHELASTIC_RESTART_COUNT", 0, None, default=0),
            max_restarts=_number(environment, "TORCHELASTIC_MAX_RESTARTS", -1, None, default=0),
            run_id=environment.get("TORCHELASTIC_RUN_ID", ""),
            token=_token(environment),
            sidecar=int(sidecar) if sidecar else None,
            server=_address(environment.get(SERVER, "")),
            keeps_ranks=environment.get(KEEPS_RANKS) == "1",
            begun=tuple(environment.get(BEGUN_BEFORE, "").splitlines()),
            spawns_sidecars=environment.get(SPAWN_SIDECARS) == "1",
        )

    def check_nodes(self) -> None:
        """Check that workers can be nodes: hosts are numbered, and each has the same number of processes.

        Raises:
            UsageError: a variable is missing, or the hosts differ.
        """
        if self.node is None or self.nodes is None:
            raise UsageError(
                f"workers='node', but {NODE} or {NODES} is not set: torchrun sets both; without torchrun, set {NODE} "
                f"to the number of the host (0 for the host of rank 0), {NODES} to the number of hosts, LOCAL_RANK "
                "and LOCAL_WORLD_SIZE"
            )
        if self.world_size != self.nodes * self.local_world_size:
            raise UsageError(
                f"workers='node', but {counted(self.local_world_size, 'process', 'processes')} on this host "
                f"and {self.world_size} on {counted(self.nodes, 'host')}: start the same number on every host"
            )
        if self.rank != self.node * self.local_world_size + self.local_rank:
            raise UsageError(
                f"workers='node', but RANK={self.rank} is not {NODE}={self.node} * LOCAL_WORLD_SIZE="
                f"{self.local_world_size} + LOCAL_RANK={self.local_rank}: number the processes host by host"
            )


def started_by_torchrun(environment: Mapping[str, str]) -> bool:
    """Return whether the variables of torchrun are set for this process."""
    return all(environment.get(name) for name in NEEDED)


def has_rank(environment: Mapping[str, str]) -> bool:
    """Return whether this process is a rank already, whichever way its ranks find each other."""
    return bool(environment.get("RANK") and environment.get("WORLD_SIZE"))


def is_rank_0(environment: Mapping[str, str]) -> bool:
    """Return whether this process prints for its job: rank 0, not a worker that rank 0 started, or the only process."""
    return environment.get("RANK", "0") == "0" and not environment.get(SIDECAR)


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
    if not text.removeprefix("-").isdecimal() or int(text) < least or (most is not None and int(text) > most):
        upper = f" and <= {most}" if most is not None else ""
        raise UsageError(f"{name}={text!r}, expected a whole number >= {least}{upper}: {advice}")
    return int(text)


def _number_or_none(environment: Mapping[str, str], name: str, least: int, most: int | None) -> int | None:
    return _number(environment, name, least, most) if environment.get(name) else None


def _token(environment: Mapping[str, str]) -> str:
    token = environment.get(TOKEN, "")
    try:
        token.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{TOKEN} is not UTF-8 text: {NEW_TOKEN}") from None
    if token != token.strip():
        raise UsageError(f"{TOKEN} begins or ends with white space, which another host may not have: {NEW_TOKEN}")
    return token


def _address(text: str) -> tuple[str, int] | None:
    host, _, port = text.rpartition(":")
    return (host, int(port)) if text else None


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
