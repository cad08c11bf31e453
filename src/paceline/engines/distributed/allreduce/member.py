"""A rank other than 0 among workers without a server: its line to rank 0, and its place in the ring."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import inf
from typing import Any, NamedTuple

import torch

from paceline.clusters.torchrun import Torchrun
from paceline.engines.distributed.allreduce.elastic_group import ElasticGroup, Unreachable
from paceline.engines.distributed.allreduce.messages import MembershipChanged, RunFinished, StepReport, StepSummary
from paceline.engines.distributed.rendezvous.handshake import apply_for
from paceline.engines.distributed.rendezvous.rendezvous import enter, find
from paceline.engines.distributed.transport.connection import Connection, ConnectionLost
from paceline.engines.distributed.transport.process_group import PendingCollective
from paceline.errors import RunError
from paceline.server.flat_buffers import FlatBuffers
from paceline.utils.user_code import failure_of

LEAVE_S = 10.0


class _Form(NamedTuple):
    """A ring is to be formed."""

    generation: int
    place: int
    size: int
    key: str
    uses_nccl: bool


class _Metrics(NamedTuple):
    """What rank 0 has measured."""

    generation: int
    metrics: dict[str, float]


class MembershipClient:
    """Does what `Head` says, as the engine of every other rank.

    Args:
        cluster: says where rank 0 is.
        agreement: what it has to agree on.
    """

    def __init__(self, cluster: Torchrun, agreement: dict[str, Any]) -> None:
        self._cluster = cluster
        self._agreement = agreement
        self._news: queue.SimpleQueue[StepSummary | _Form | _Metrics | Exception] = queue.SimpleQueue()
        self._form: _Form | None = None
        self._line: Connection | None = None
        self._listener: threading.Thread | None = None
        self._newest: float = 0  # generation that rank 0 has told of, inf when there will be none
        self._steps = 0
        self.generation = 0
        self.ring: ElasticGroup | None = None

    def open(self) -> None:
        """Go to rank 0 and be let in.

        Raises:
            UsageError: rank 0 wants something else.
            RunError: there is no rank 0.
        """
        cluster = self._cluster
        self._rank_0 = find(cluster)
        name = f"worker {cluster.worker} ({socket.gethostname()}, process {os.getpid()})"
        try:
            _, self._line = enter(self._rank_0, cluster)
            hello = {"name": name, "worker": cluster.worker, "agreement": self._agreement}
            apply_for(self._line, cluster.ranks.token, hello)
        except ConnectionLost as error:
            raise RunError(f"rank 0 is gone: {error}") from error
        self._line.tell({"name": name, "has_own_gpu": cluster.has_gpu_each(torch.cuda.device_count())})
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def form(self, make_state: object, timeout_s: float) -> dict[str, Any]:
        """Take one's place in the next ring, and return the state to go on from.

        Raises:
            Over: there will be none.
            RunError: rank 0 is gone.
        """
        while True:
            form = self._newest_form()
            self._steps = 0
            self.generation = form.generation
            if self.ring is not None:
                self.ring.break_off()
                self.ring.let_go()
            try:
                ring = self.ring = ElasticGroup(form.key, form.place, form.size, uses_nccl=form.uses_nccl)
                if self._newest != form.generation:  # nobody may have broken off this ring
                    continue
                ring.connect(self._rank_0, self._cluster.silence_s)
                return ring.spread(None)
            except ConnectionLost as error:
                self._tell_broken(error)

    def begin_sum(self, vectors: FlatBuffers) -> list[PendingCollective]:
        """Begin to sum vectors up where they lie; return what is to be waited for.

        Raises:
            Reform: others take part from here on.
            Over: rank 0 has ended the run.
            RunError: rank 0 is gone.
        """
        assert self.ring is not None
        self._steps += 1
        with self._reforming():
            return self.ring.begin_sum(vectors)

    def hand_in(self, hand: StepReport) -> None:
        """Tell of this process's part in an iteration."""
        assert self._line is not None
        self._line.tell({"hand": list(hand)}, will_be_answered=True)
        self._steps += 1

    def table(self, timeout_s: float) -> StepSummary:
        """Wait until everybody has told of an iteration; rank 0 sees to it that nobody is silent for too long.

        Raises:
            Reform: others take part from here on.
            Over: rank 0 has ended the run.
            RunError: rank 0 is gone.
        """
        while True:
            news = self._next_news()
            if isinstance(news, StepSummary) and news.generation == self.generation:
                return news

    def wait(self, begun: list[PendingCollective], timeout_s: float) -> None:
        """Wait for sums; rank 0 sees to it that they do not take too long.

        Raises:
            Reform: others take part from here on.
            Over: rank 0 has ended the run.
            RunError: rank 0 is gone.
        """
        assert self.ring is not None
        with self._reforming():
            self.ring.wait(begun)

    def metrics(self, measure: object) -> dict[str, float]:
        """Wait for what rank 0 has measured.

        Raises:
            Reform: others take part from here on.
            Over: rank 0 has ended the run.
            RunError: rank 0 is gone.
        """
        while True:
            news = self._next_news()
            if isinstance(news, _Metrics) and news.generation == self.generation:
                return news.metrics

    def is_over(self) -> bool:
        """Wait until rank 0 has come to its end, too, or goes on from somewhere before.

        Raises:
            Over: it has.
            RunError: it is gone.
        """
        self._form = self._newest_form()
        return False

    def leave(self, reason: str) -> None:
        """Tell rank 0 that this process ends, and wait until it has heard it."""
        self._tell({"leaves": reason})
        assert self._listener is not None
        self._listener.join(LEAVE_S)

    def fail(self, error: BaseException) -> None:
        """Tell rank 0 what has gone wrong here, and wait until it has heard it and ends the line."""
        if self._listener is None or not self._listener.is_alive():
            return
        self._tell(failure_of(error))
        self._listener.join(LEAVE_S)

    def close(self, end: dict[str, Any]) -> None:
        """Let go of rank 0."""
        if self._line is not None:
            self._line.close()
        if self._listener is not None:
            self._listener.join(LEAVE_S)
        if self.ring is not None:
            if "error" in end:
                self.ring.break_off()
            self.ring.let_go()
        self._line = self.ring = None

    # --- inside -------------------------------------------------------------------------------------------

    @contextmanager
    def _reforming(self) -> Iterator[None]:
        try:
            yield
        except ConnectionLost as error:
            self._tell_broken(error)
            self._form = self._newest_form()
            raise MembershipChanged from error

    def _tell_broken(self, error: ConnectionLost) -> None:
        is_apart = isinstance(error, Unreachable)
        self._tell({"broken": str(error), "generation": self.generation, "is_apart": is_apart})

    def _tell(self, text: dict[str, Any]) -> None:
        assert self._line is not None
        self._line.tell(text)

    def _newest_form(self) -> _Form:
        """Wait for a ring that is to be formed; of several, which came while this process was busy, the last one."""
        while self._form is None or not self._news.empty():
            with suppress(MembershipChanged):
                self._next_news()
        form, self._form = self._form, None
        return form

    def _next_news(self) -> StepSummary | _Metrics:
        news = self._news.get()
        if isinstance(news, Exception):
            raise news
        if isinstance(news, _Form):
            self._form = news
            raise MembershipChanged
        return news

    def _listen(self) -> None:
        assert self._line is not None
        line = self._line
        try:
            while True:
                text = line.receive()
                assert isinstance(text, dict)
                match text:
                    case {"table": _}:
                        line.settle()
                        self._news.put(StepSummary.from_json(text))
                    case {"metrics": metrics, "generation": generation}:
                        self._news.put(_Metrics(generation, metrics))
                    case {"form": generation, "key": key, "place": place, "size": size, "uses_nccl": uses_nccl}:
                        self._break_off(generation)
                        self._news.put(_Form(generation, place, size, key, uses_nccl))
                    case {"are you there": _}:
                        is_summing = self.ring is not None and self.ring.is_waiting
                        line.tell({"here": self.generation, "steps": self._steps, "is_summing": is_summing})
                    case {"end": end}:
                        if "error" in end:
                            self._break_off(inf)
                        elif self.ring is not None:
                            self.ring.end()
                        self._news.put(RunFinished(end))
                        return
        except Exception as error:
            self._break_off(inf)
            self._news.put(RunError(f"rank 0 is gone: {error}") if isinstance(error, ConnectionLost) else error)

    def _break_off(self, newest: float) -> None:
        """Let nobody wait for this process in a ring that is no more."""
        self._newest = newest
        if self.ring is not None:
            self.ring.break_off()
