"""Attached run without a server: the user's optimizer steps, and the ranks average by all-reduce."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from paceline.clusters.torchrun import Torchrun
from paceline.core.events import Outcome
from paceline.core.stop import Stop
from paceline.recording.callback import Callback
from paceline.run.config import RunConfig
from paceline.run.train import run_session
from paceline.user_loop.loop_data import UserLoop
from paceline.user_loop.loop_replica import Exchange, LoopEnd, LoopStep
from paceline.user_loop.run_end import end_of
from paceline.user_loop.run_options import RunOptions
from paceline.user_loop.step_closure import StepArguments
from paceline.user_loop.stepping_run import SteppingRun


class AllReduceRun(SteppingRun):
    """Part of one rank in a run without a server.

    The step is made with the gradient that the protocol gives, as the mean over the ranks. A rank that has no minibatch
    left makes the steps of the others without a call of the user.

    Args:
        loop: parts of the loop; hooks are registered on its optimizer.
        stop: conditions that end the run, None for the number of epochs.
        exchange: exchange with the thread of the worker.
        config_of: returns the configuration of this rank, given the stop conditions.
        lead: takes part in the run at rank 0.
        ranks: ranks that the launcher has started, >= 1.
        returns: whether a run that diverges or is interrupted raises nothing in the loop.
    """

    _leader = "rank 0"

    def __init__(
        self,
        loop: UserLoop,
        stop: Stop | None,
        exchange: Exchange,
        config_of: Callable[[Stop], RunConfig],
        lead: Callable[[RunConfig], LoopEnd],
        ranks: int,
        *,
        returns: bool = False,
    ) -> None:
        super().__init__(
            loop=loop,
            stop=stop,
            exchange=exchange,
            config_of=config_of,
            start_server=lambda _: None,
            ranks=ranks,
            returns=returns,
        )
        self._lead = lead
        self._is_extra = False  # whether the step under way is one of the other ranks, which have a minibatch

    def set_scheduler(self, scheduler: LRScheduler) -> None:
        """Leave the scheduler to the loop: all ranks make the same number of steps."""

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Return a block without an effect: the other ranks wait."""
        yield

    def _begin_schedule(self) -> None:
        """Leave the scheduler to the loop."""

    def _take_part(self) -> LoopEnd:
        assert isinstance(self._config.cluster, Torchrun)
        return self._lead(self._config) if self._config.cluster.is_server else super()._take_part()

    def _leave(self, reason: str, outcome: Outcome) -> None:
        had_ended = self.over
        super()._leave(reason, outcome)
        if not had_ended:
            self._take_end()

    def _take_end(self) -> None:
        """Take over the end of the run that this rank has left, if all ranks have left it by now."""
        while True:
            try:
                message = self._exchange.to_loop.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, LoopEnd) and not message.end.has_failed:
                self._on_message(message)

    # --- the thread of the loop ---------------------------------------------------------------------------

    def _before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        return None if self._is_extra else super()._before_step(args, kwargs)

    def _after_step(self) -> None:
        if not self._is_extra:
            super()._after_step()

    def _receive(self) -> None:
        """Wait for the next task or the end; until then make the steps for which this rank has no minibatch."""
        while isinstance(message := self._get(), LoopStep):
            self._is_extra = True
            try:
                self._optimizer.step()
            finally:
                self._is_extra = False
            self._exchange.to_worker.put(message)
        self._on_message(message)


def lead(config: RunConfig, options: RunOptions, callbacks: Sequence[Callback]) -> LoopEnd:
    """Take part in a run as rank 0, which records it."""
    session, folder, resumption, policy = options.open_session(config)
    result = run_session(session, folder, resumption, [*callbacks, *options.callbacks()], policy)
    return LoopEnd(result.model, end_of(session, result))
