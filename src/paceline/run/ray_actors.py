"""Driver of a run on Ray: makes the actors that are its ranks, and carries out what their supervisor decides."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayError, WorkerCrashedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor

from paceline.clusters.job_token import make_token
from paceline.clusters.rank_restarts import EndRank, MakeRank
from paceline.clusters.rank_supervisor import (
    RankFailure,
    RankSupervisor,
    StartCondition,
    SupervisorAction,
    TrainRank,
)
from paceline.clusters.ray import Ray
from paceline.clusters.torchrun import Torchrun
from paceline.core.events import Outcome
from paceline.core.records import Record
from paceline.engines.signals import Signals
from paceline.processes.child_process import ProcessSettings
from paceline.processes.shared_pickle import by_value, from_value
from paceline.processes.unpicklable import explained
from paceline.recording.history import History, Totals
from paceline.run.config import RunConfig
from paceline.run.result import Result
from paceline.utils.rank_logger import RankLogger
from paceline.utils.wording import in_one_line
from paceline.worker.torch_utils import build_model

LOG = RankLogger(__name__)
POLL_S = 0.5
INTERRUPTED_STATUS = 130
LONGEST_REASON = 200  # characters of what Ray says of an actor that died
BEFORE_REASON = "The actor is dead because "  # in the message of Ray, after ids of the actor
DEATHS = (RayActorError, NodeDiedError, OutOfMemoryError, WorkerCrashedError)  # not of packages that are missing


def train_on_ray(cluster: Ray, config: RunConfig, train: partial[Result]) -> Result:
    """Train in actors of Ray, and return the result of rank 0.

    Args:
        cluster: actors to make.
        config: configuration of the run, as rank 0 sees it.
        train: `paceline.train` with all arguments but the cluster.

    Raises:
        PacelineError: the run has failed.
    """
    config.check()
    has_server = config.plan.allreduce is None
    parts = {**vars(config.job), **train.keywords}
    with explained(parts, f"job {config.job.name} cannot be sent to the actors of Ray"):
        task = by_value(
            RankTask(
                train=train,
                of_rank_0=cluster.arguments(is_server=has_server),
                of_others=cluster.arguments(is_server=False),
                settings=replace(ProcessSettings.capture(), environment={}),  # an actor keeps that of its host
            )
        )
    if not ray.is_initialized():
        ray.init()
    folder = train.keywords["resume"] or train.keywords["out"]
    trained = ActorGroup(cluster, config, task, str(folder or "")).run()
    model = build_model(config.job, config.seed)
    model.load_state_dict(trained.state)
    return Result(model=model, history=History(lambda: trained.records, trained.totals), **trained.facts)


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """Task of every actor.

    Attributes:
        train: `paceline.train` with all arguments but the cluster.
        of_rank_0: arguments of `Torchrun` for rank 0.
        of_others: arguments of `Torchrun` for the other ranks.
        settings: settings of the driver's process that results depend on, without its environment.
    """

    train: Callable[..., Result]
    of_rank_0: Mapping[str, Any]
    of_others: Mapping[str, Any]
    settings: ProcessSettings


class ActorPlace(NamedTuple):
    """Place of an actor.

    Attributes:
        host: address of its host.
        port: free port of the host.
        node: id of the host in Ray.
        pid: id of its process.
    """

    host: str
    port: int
    node: str
    pid: int


class ActorGone(NamedTuple):
    """End of an actor, or of its part in the run, before the end of the run."""

    reason: str


class TrainedState(NamedTuple):
    """Result of rank 0.

    Attributes:
        state: state of the trained model.
        records: records of the run.
        totals: totals of the records.
        facts: other fields of the `Result`.
    """

    state: dict[str, Tensor]
    records: list[Record]
    totals: Totals
    facts: dict[str, Any]

    @classmethod
    def of(cls, result: Result) -> TrainedState:
        """Return what the driver is sent of a result."""
        facts = {name: value for name, value in vars(result).items() if name not in ("model", "history")}
        return cls(
            state=dict(result.model.state_dict()),
            records=result.history.records,
            totals=result.history.totals,
            facts=facts,
        )


Answer = ActorPlace | TrainedState | RankFailure | ActorGone | None


class RankActor:
    """Actor that is one rank of a run. Its main thread trains, so that SIGTERM has its usual effect.

    Args:
        rank: number of the rank, >= 0.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        vars(sys.modules["__main__"]).pop("__file__", None)  # a script of Ray, which defines no part of the job

    def __repr__(self) -> str:  # which Ray writes before each line that the actor prints
        return f"rank {self._rank}"

    def place(self) -> ActorPlace:
        """Return where the actor is."""
        return ActorPlace(
            host=ray.util.get_node_ip_address(),
            port=free_port(),
            node=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
        )

    def train(self, environment: Mapping[str, str], task: bytes) -> Answer:
        """Train with these launch variables until the run ends; return None for ranks other than 0.

        Args:
            environment: launch variables of the rank.
            task: pickled `RankTask`.
        """
        os.environ.update(environment)
        try:
            given: RankTask = from_value(task)
            replace(given.settings, environment=dict(os.environ)).apply()
            arguments = given.of_others if self._rank else given.of_rank_0
            result = given.train(cluster=Torchrun(**arguments, address=environment["MASTER_ADDR"]))
        except SystemExit as left:
            has_ended = left.code in (0, INTERRUPTED_STATUS)
            return None if has_ended else ActorGone(f"it has left the run, with status {left.code}")
        except Exception as error:
            return RankFailure.of(error)
        return None if self._rank else TrainedState.of(result)


class ActorGroup:
    """Actors of one run.

    Args:
        cluster: actors to make.
        config: configuration of the run, as rank 0 sees it.
        task: pickled `RankTask`.
        folder: folder of the run; empty for none.
    """

    def __init__(self, cluster: Ray, config: RunConfig, task: bytes, folder: str) -> None:
        rank_0, plan = config.cluster, config.plan
        assert isinstance(rank_0, Torchrun)
        self._cluster = cluster
        self._has_server = plan.allreduce is None
        self._task = ray.put(task)
        first = cluster.size(plan)
        least = first if rank_0.min_workers is None else rank_0.min_workers + self._has_server
        self._supervisor = RankSupervisor(
            [cluster.resources(is_server=rank < self._has_server) for rank in range(cluster.n + self._has_server)],
            make_token(),
            StartCondition(first, least, rank_0.start_timeout_s),
            max_restarts=cluster.max_restarts,
            folder=folder,
            may_spread=has_many_hosts(),
            falls_together=not self._has_server and not rank_0.is_elastic,
        )
        self._actors: dict[int, Any] = {}
        self._places: dict[int, ActorPlace] = {}
        self._calls: dict[Any, int] = {}  # rank of each call that has not returned

    def run(self) -> TrainedState:
        """Train to the end of the run; Ctrl-C and SIGTERM end it, and no actor is left afterwards."""
        signals = Signals()
        signals.install()
        try:
            self._carry_out(self._supervisor.begin(time.monotonic()))
            while True:
                if signals.caught:
                    self._carry_out(self._supervisor.stop())
                for call in self._returned():
                    trained = self._on_answer(self._calls.pop(call), answer_of(call))
                    if trained is not None:
                        return trained
                self._carry_out(self._supervisor.on_time(time.monotonic()))
        finally:
            signals.remove()
            for rank in list(self._actors):
                self._kill(rank)

    def _returned(self) -> Iterator[Any]:
        """Yield a call that has returned, if there is one after a moment."""
        if not self._calls:
            time.sleep(POLL_S)
            return
        calls, _ = ray.wait(list(self._calls), timeout=POLL_S)
        yield from calls

    def _on_answer(self, rank: int, answer: Answer) -> TrainedState | None:
        """Handle what an actor has returned; return the result of the run if it is that."""
        now, supervisor = time.monotonic(), self._supervisor
        match answer:
            case ActorPlace(host, port):
                self._places[rank] = answer
                self._carry_out(supervisor.on_made(rank, host, port))
            case ActorGone(reason):
                self._kill(rank)
                self._carry_out(supervisor.on_lost(rank, reason, now))
            case RankFailure():
                self._carry_out(supervisor.on_failed(rank, answer, now))
            case TrainedState(facts={"stopped_by": stopped_by, "reason": reason}):
                is_interrupted = stopped_by is Outcome.INTERRUPTED
                actions = supervisor.on_ended(reason, now, is_interrupted=is_interrupted)
                self._carry_out(actions)
                return None if actions else answer
        return None

    def _carry_out(self, actions: Iterable[SupervisorAction]) -> None:
        for action in actions:
            match action:
                case MakeRank(rank):
                    self._make(rank)
                case TrainRank(rank, environment):
                    self._calls[self._actors[rank].train.remote(environment, self._task)] = rank
                case EndRank(rank):
                    self._kill(rank)
                case _:
                    self._interrupt()

    def _make(self, rank: int) -> None:
        self._kill(rank)
        options = self._cluster.actor_options(is_server=self._has_server and rank == 0)
        self._actors[rank] = ray.remote(RankActor).options(**options).remote(rank)
        self._calls[self._actors[rank].place.remote()] = rank

    def _kill(self, rank: int) -> None:
        """Kill the actor of a rank, if there is one, and expect no answer from it."""
        if (actor := self._actors.pop(rank, None)) is not None:
            ray.kill(actor)
        self._calls = {call: other for call, other in self._calls.items() if other != rank}

    def _interrupt(self) -> None:
        """Send SIGTERM to rank 0, from a task on its host: the actor itself is busy."""

        def terminate(pid: int) -> None:  # pickled by value, because the import of this module takes seconds
            os.kill(pid, signal.SIGTERM)

        place = self._places[0]
        there = NodeAffinitySchedulingStrategy(place.node, soft=False)
        ray.remote(terminate).options(num_cpus=0, scheduling_strategy=there).remote(place.pid)


def answer_of(call: Any) -> Answer:
    """Return what a call of an actor has returned, or what became of the actor."""
    try:
        answer: Answer = ray.get(call)
    except RayError as error:
        said = in_one_line(str(error).rpartition(BEFORE_REASON)[2], LONGEST_REASON)
        has_died = isinstance(error, DEATHS) and not getattr(error, "actor_init_failed", False)
        return ActorGone(said) if has_died else RankFailure(said, str(error), "code")
    return answer


def has_many_hosts() -> bool:
    """Return whether the cluster of Ray has more than one host now."""
    return len([node for node in ray.nodes() if node["Alive"]]) > 1


def free_port() -> int:
    """Return a port that no process of this host uses now."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port
