"""Attached run: one rank's loop between the batches that the server deals and the gradients that it sends."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from paceline.clusters.torchrun import Torchrun
from paceline.core.events import END_OF_LOOP, PAUSE, Outcome
from paceline.core.stop import Stop
from paceline.engines.distributed import End
from paceline.errors import RunError, UsageError
from paceline.recording.why_ended import why_left
from paceline.run.config import RunConfig
from paceline.run.session import serve
from paceline.user_loop.epoch_cursor import EpochCursor
from paceline.user_loop.gradient_sender import GradientSender
from paceline.user_loop.interruptible_batch import InterruptibleBatch
from paceline.user_loop.leased_loader import LeasedLoader
from paceline.user_loop.loop_data import UserLoop
from paceline.user_loop.loop_replica import Exchange, LoopEnd, LoopHost, LoopStep, LoopTask
from paceline.user_loop.loop_scheduler import SchedulerBinding, begin_schedule, check_scheduler
from paceline.user_loop.loop_signals import LoopSignals
from paceline.user_loop.loop_watch import LoopWatch
from paceline.user_loop.optimizer_state import RemoteState
from paceline.user_loop.run_end import how_to_resume, raise_end
from paceline.user_loop.run_progress import LoopProgress
from paceline.user_loop.server_link import ServerLink
from paceline.user_loop.server_process import ServerProcess
from paceline.user_loop.start_line import print_start_line
from paceline.user_loop.step_closure import StepArguments
from paceline.user_loop.weak_calls import hook_steps, weakly
from paceline.user_loop.worker_thread import WorkerThread
from paceline.utils.rank_logger import RankLogger
from paceline.worker.replica import TaskProgress

LOG = RankLogger(__name__)
SERVER_END_S = 1.0  # from the loss of its connections to the end of the process


# Long: the hooks of the loop, the exchange with the worker's thread and the end of the run share one state.
class AttachedRun(LoopProgress):
    """Part of one rank in a run.

    The run begins with the first batch, or with `epochs`.

    Args:
        loop: parts of the loop; hooks are registered on its optimizer.
        stop: conditions that end the run, None for the number of epochs.
        exchange: exchange with the thread of the worker.
        config_of: returns the configuration of this rank, given the stop conditions.
        start_server: starts the process of the server on rank 0.
        ranks: ranks that the launcher has started, >= 1.
        returns: whether a run that diverges or is interrupted raises nothing in the loop.

    Attributes:
        loader: batches of this rank; each iteration is one epoch.
    """

    _leader = "the server"

    def __init__(
        self,
        loop: UserLoop,
        stop: Stop | None,
        exchange: Exchange,
        config_of: Callable[[Stop], RunConfig],
        start_server: Callable[[Stop], ServerProcess | None],
        ranks: int,
        *,
        returns: bool = False,
    ) -> None:
        super().__init__(loop.optimizer)
        self._watch = LoopWatch(loop.model, loop.optimizer)
        self.loader = LeasedLoader(self, loop.loader, loop.accumulate, ranks, self._watch.frozen)
        exchange.kept = self._watch.frozen
        self._returns = returns
        self._stop = stop
        self._exchange = exchange
        self._config_of = config_of
        self._start_server = start_server
        self._server = ServerLink()
        self._worker: WorkerThread | None = None
        self._task: LoopTask | None = None
        self._cursor = EpochCursor()
        self._state = RemoteState(loop.optimizer, loop.model)
        self._signals: LoopSignals | None = None
        self._scheduler: SchedulerBinding | None = None
        self._gradients = GradientSender(loop, self._watch, exchange, weakly(self._step_of_scaler))
        self._interruptible = InterruptibleBatch(loop.model, weakly(self._check_interrupt), self._gradients.drop)
        self._hooks = ExitStack()  # on the objects of the user
        hook_steps(self._hooks, loop.optimizer, weakly(self._before_step), weakly(self._after_step))
        self._hooks.callback(self._interruptible.close)
        self._hooks.callback(self._state.close)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs, and finish the run after the last one.

        Args:
            count: number of epochs, >= 1; it ends the run unless `stop` was given.
        """
        self._stop = self._stop or Stop(epochs=count)
        for epoch in range(count):
            if self.over:
                break
            self._cursor.name(epoch)
            yield epoch
        self.finish()

    def begin_epoch(self, epoch: int) -> None:
        """Take minibatches until the end of this epoch, or of that of the next one if it is a later epoch."""
        self._cursor.name(epoch if self._task is None else max(epoch, self._task.epoch))

    def minibatch(self) -> InterruptibleBatch:
        """Return a block for the code of one batch, which ends between two layers when the protocol interrupts it.

        The loop goes on after the block and takes its next batch, with the newest version. Without the block a rank
        that is interrupted finishes its step, whose gradient is not sent.
        """
        return self._interruptible

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let the other ranks go on without this one, as during a long evaluation; afterwards load the newest version.

        Raises:
            RunError: a batch was taken, but ``optimizer.step()`` was not called yet.
        """
        if self._task is None or self._worker is None:
            yield
            return
        if self.loader.begun is self._task:
            raise RunError("run.pause() between a batch and its optimizer.step(): pause after the step")
        self._task = None
        self._worker.pause(PAUSE)
        try:
            yield
            self._watch.look()
        finally:
            self._worker.resume()
            self._receive()

    def stop(self) -> None:
        """End the run for all ranks, from rank 0; the model is the last version then.

        Raises:
            UsageError: this is not rank 0 of a run with a server.
        """
        if self.over or self._worker is None:
            return
        if not self._server.end_run(Outcome.STOPPED, "run.stop() at rank 0"):
            raise UsageError("only rank 0 of a run with a server can stop it for all ranks: call run.finish()")
        while not self.over:
            self._exchange.to_worker.put(None)  # the worker waits for the gradient of the present task
            self._receive()

    def finish(self) -> None:
        """Take no further part in the run; the model is the last version if the run has ended.

        Rank 0 waits for the other ranks, because the server runs beside it. Then the optimizer steps as before the run.
        """
        self._leave(END_OF_LOOP, Outcome.STOPPED)
        with self._hooks:  # which are removed at its end
            last = self._server.finish()
            if last is not None:
                self._take_state(last.state)
                self._watch.frozen.add_to(self._config.folder)
                if not self.stopped_by:
                    self._on_end(last.end)

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if error is None:
            self.finish()
            return
        outcome, reason = why_left(error)
        self._leave(reason, outcome)
        self._server.stop(outcome, f"rank 0 has left the run: {reason}")
        self.release()

    def release(self) -> None:
        """Remove the hooks of a run that has ended from the optimizer, the scheduler and the model."""
        self._hooks.close()

    def skip(self) -> None:
        """Drop what the loop has computed of its next step, which is left out unless another gradient follows."""
        self._gradients.leave_out()

    def set_scheduler(self, scheduler: LRScheduler) -> None:
        """Let a scheduler follow the workload of the run, so that it agrees on all ranks; as ``scheduler`` of `attach`.

        Raises:
            UsageError: the scheduler follows a metric.
        """
        check_scheduler(scheduler)
        self._scheduler = SchedulerBinding(scheduler, weakly(self._position))
        self._hooks.callback(self._scheduler.close)

    def _position(self) -> int | None:
        """Return the steps of a scheduler that every rank has made by now, None between two epochs."""
        return self.workload // self._config.cluster.n if self.loader.is_iterating else None

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Call `loss.backward`, in loops whose loss attach cannot see.

        Args:
            loss: mean loss of a batch, divided by the number of batches of a step, a scalar.
            options: arguments of `Tensor.backward`.
        """
        self._gradients.backward(loss, **options)

    def begin_iteration(self) -> None:
        """Begin the run with the first iteration over the loader, and the next epoch if the loop does not name it."""
        if self._worker is None and not self.over:
            self._start()
        if self._task is not None:
            self._cursor.begin_iteration(self._task.epoch)

    def next_task(self) -> LoopTask | None:
        """Return the task of this rank, None if it is of a later epoch or the run is over."""
        return self._task if self._task is not None and self._task.epoch <= self._cursor.epoch else None

    def _start(self) -> None:
        if self._stop is None:
            raise UsageError("the run has no end: iterate over run.epochs(10), or give stop= to attach")
        self._config = self._config_of(self._stop)
        self._config.check()
        self._gradients.start(self._config.plan, self._stop)
        assert isinstance(self._config.cluster, Torchrun)
        self._watch.start(debug=self._config.cluster.debug)
        self.loader.start(self._config.cluster.worker)
        assert isinstance(self._config.process, LoopHost)
        print_start_line(self._config)
        self._server = ServerLink(self._start_server(self._stop))
        self._share_state()
        self._worker = WorkerThread(self._take_part, self._exchange, self._config.process)
        self._signals = LoopSignals(weakly(self._on_signal))
        atexit.register(_leave_at_exit, weakref.ref(self))
        self._receive()
        self._begin_schedule()

    def _on_signal(self, name: str) -> bool:
        """Leave the run after the gradient under way; rank 0 ends it for all. Return False before it takes part."""
        ends = self._server.end_run(Outcome.INTERRUPTED, f"interrupted by {name}")
        return ends or (self._exchange.has_begun and self._worker is not None and self._worker.leave(name))

    def _share_state(self) -> None:
        self._state.start(self._server.read_state)

    def _take_state(self, state: Mapping[str, Tensor]) -> None:
        self._state.end(state)

    def _begin_schedule(self) -> None:
        if begin_schedule(self._scheduler, self._optimizer, self.workload // self._config.cluster.n):
            self._gradients.omit_rates_once()

    def _take_part(self) -> LoopEnd:
        return LoopEnd(*serve(self._config))

    def _leave(self, reason: str, outcome: Outcome) -> None:
        """Leave a run that has not ended."""
        if self._worker is not None and not self.over:
            advice = how_to_resume(self._config) if outcome is Outcome.INTERRUPTED else ""
            LOG.warning("this rank leaves the run, which has not ended: %s%s", reason, advice)
            self._worker.stop(reason, outcome, waits=self._exchange.has_begun)
        self._end()
        self._watch.frozen.end()

    def _end(self) -> None:
        self.over = True
        self._task = None
        self.loader.close()
        self._gradients.close()
        if self._signals is not None:
            self._signals.close()

    def _before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        """Call a closure and hand in the gradient, so that the step finds none; return the arguments of the step."""
        if self.over:
            reason = self.reason or "this rank has finished"
            raise RunError(f"the run is over ({reason}): check run.over before optimizer.step()")
        task = self._task
        if task is None:
            raise RunError("optimizer.step() without a batch of run.loader: iterate over run.loader")
        return self._gradients.send(task, args, kwargs)

    def _step_of_scaler(self, step: Callable[[], Any]) -> Any:
        """Make a step of a GradScaler, which skips that of the optimizer if the gradient is not finite."""
        task = self._task
        returned = step()
        if task is not None and self._task is task:
            self._gradients.skip(task)
            self._receive()
        return returned

    def settle_without_step(self, task: LoopTask) -> None:
        """Settle a task whose batches were used without a step: it is interrupted, or the loop has skipped the step.

        Raises:
            RunError: the gradient is finite, or the loop has taken a batch ahead.
        """
        self._gradients.settle(task)
        self._receive()

    def _check_interrupt(self) -> None:
        if self._task is not None:
            self._task.check()

    def _after_step(self) -> None:
        self._receive()

    def _receive(self) -> None:
        """Wait for the next version and its task, or for the end of the run."""
        self._on_message(self._get())

    def _on_message(self, message: LoopTask | LoopStep | LoopEnd | BaseException) -> None:
        match message:
            case LoopTask() as task:
                self._task = task
                self._progress = task.progress
                self._load(task.model)
            case LoopEnd(model, end):
                self._end()
                if model is not None:
                    self._progress = TaskProgress(end.updates, end.workload)
                    self._load(model)
                self._on_end(end)
            case BaseException() as error:
                self._end()
                self.reason = str(error)
                if isinstance(error, RunError):
                    self._server.check(SERVER_END_S)
                raise error

    def _on_end(self, end: End) -> None:
        self.stopped_by = end.outcome
        self.reason = end.reason
        raise_end(end, self._leader, self._config, returns=self._returns)

    def _get(self) -> LoopTask | LoopStep | LoopEnd | BaseException:
        return self._exchange.message(lambda: self._server.look(has_begun=self._exchange.has_begun))

    def _load(self, model: nn.Module) -> None:
        self._watch.load(model)


def _leave_at_exit(run: weakref.ref[AttachedRun]) -> None:
    """Leave a run that the script has not finished, with the error that ends the script if there is one."""
    alive = run()
    if alive is None:
        return
    error = getattr(sys, "last_value", None)
    if error is not None:
        alive.__exit__(type(error), error)
        return
    alive._leave(END_OF_LOOP, Outcome.STOPPED)
    alive._server.stop(Outcome.STOPPED, "the script of rank 0 has ended")  # as after sys.exit()
