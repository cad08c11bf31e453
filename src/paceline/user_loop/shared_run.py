"""Shared run: one rank's loop between the batches that it is dealt and the gradients that it hands in."""
# Long: it has one class, whose methods share one state.

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import inf
from typing import Any, final

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from paceline.clusters.torchrun import Torchrun
from paceline.core.events import END_OF_LOOP, PAUSE, Outcome
from paceline.core.stop import Stop
from paceline.engines.distributed import End
from paceline.errors import RunError, UsageError
from paceline.recording.why_ended import why_left
from paceline.tensors.kernels import await_kernels
from paceline.user_loop.attached_run import AttachedRun
from paceline.user_loop.data.data_place import DataPlace
from paceline.user_loop.data.dealt_batches import dealt_to
from paceline.user_loop.data.loop_data import UserLoop
from paceline.user_loop.data.loop_values import LoopValues
from paceline.user_loop.data.run_loader import RunLoader
from paceline.user_loop.data.task_source import TaskSource
from paceline.user_loop.hooks.gradient_sender import GradientSender
from paceline.user_loop.hooks.interruptible_batch import InterruptibleBatch
from paceline.user_loop.hooks.loop_scheduler import LoopSchedules
from paceline.user_loop.hooks.loop_signals import LoopSignals
from paceline.user_loop.hooks.loop_watch import LoopWatch
from paceline.user_loop.hooks.step_closure import StepArguments
from paceline.user_loop.hooks.step_counter import StepCounter
from paceline.user_loop.hooks.step_hooks import StepHooks
from paceline.user_loop.rank_part import RankPart
from paceline.user_loop.run_end import how_to_resume, raise_end
from paceline.user_loop.server.server_link import ServerLink
from paceline.user_loop.several_optimizers import parts_of
from paceline.user_loop.start_line import print_start_line
from paceline.user_loop.worker.exchange import LoopEnd, LoopStep, LoopTask
from paceline.user_loop.worker.worker_thread import WorkerThread
from paceline.utils.rank_logger import RankLogger
from paceline.worker.task_progress import DROPPED, TaskProgress

LOG = RankLogger(__name__)
SERVER_END_S = 1.0  # from the loss of its connections to the end of the process


# Long: the hooks of the loop, the exchange with the worker's thread and the end of the run share one state.
@final
class SharedRun(AttachedRun):
    """Part of one rank in a run of several ranks.

    Where the optimizer of each rank steps, the parameters are views of the memory of the worker during the run: the
    gradient is handed in before the user's step, which is made with the gradient that the worker gives back. Else the
    step finds no gradient, and after it the parameters are those of the next version.

    Args:
        loop: parts of the loop; hooks are registered on its optimizer.
        stop: conditions that end the run, None for the number of epochs.
        part: part of this rank.
        returns: whether a run that diverges or is interrupted raises nothing in the loop.
    """

    loader: RunLoader

    def __init__(self, loop: UserLoop, stop: Stop | None, part: RankPart, *, returns: bool = False) -> None:
        super().__init__(loop.optimizer)
        self._part = part
        self._steps = part.steps
        self._exchange = part.exchange
        self._stop = stop
        self._returns = returns
        self._loop = loop
        self._watch = LoopWatch(loop.model, loop.optimizer)
        self._exchange.kept = self._kept = LoopValues(self._watch.frozen, DataPlace(loop.loader))
        self._tasks = TaskSource(self._begin, self._settle_without_step, self._wait_for_batch)
        self._optimizers = parts_of(loop.optimizer)
        self._loop_steps = StepCounter(self._tasks, are_several=len(self._optimizers) > 1)
        ranks = part.ranks * loop.group_size
        self.loader = RunLoader(self._tasks, loop.loader, loop.accumulate, ranks, self._kept)
        self.ends_together = self._steps.are_common
        self._server = ServerLink()
        self._worker: WorkerThread | None = None
        self._signals: LoopSignals | None = None
        self._hands_in = False  # whether the step under way has handed in its gradient
        self._makes_step = False  # whether the step under way has the gradient that the worker gave back
        self._gradients = GradientSender(
            loop,
            self._watch,
            self._exchange,
            self._loop_steps,
            samples=lambda: self.loader.samples(self._tasks.taken or self._tasks.task),
            step_of_scaler=self._step_of_scaler,
            keeps_scale=self._keeps_scale,
            task=lambda: self._tasks.task,
        )
        self._interruptible = InterruptibleBatch(loop.model, self._tasks.check, self._gradients.drop)
        self._step_hooks = StepHooks(self._optimizers, self._before_step, self._after_step)
        self._schedules = LoopSchedules(self._optimizers, self._position)
        self._hooks = ExitStack()  # on the objects of the user
        for hooks in (self._step_hooks, self._interruptible, self._steps, self._schedules):
            self._hooks.callback(hooks.close)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs, and finish the run after the last one."""
        self._stop = self._stop or Stop(epochs=count)
        for epoch in range(count):
            if self.over:
                break
            self._tasks.name_epoch(epoch)
            yield epoch
        self.finish()

    def steps(self, count: int | None = None) -> Iterator[int]:
        """Yield the numbers of the steps of a loop without a loader, and finish the run after the last one."""
        if self._loop.loader is not None:
            raise UsageError("run.steps() is for a loop that draws its data without a loader: iterate over run.loader")
        if count is not None:
            self._stop = self._stop or Stop(gradients=count * self._part.ranks)
        self._begin()
        yield from self._tasks.steps(self.loader.iterating)
        self.finish()

    def begin_epoch(self, epoch: int) -> None:
        """Take minibatches until the end of this epoch, or of that of the next one if it is a later epoch."""
        self._tasks.begin_epoch(epoch)

    def minibatch(self) -> InterruptibleBatch:
        """Return a block for the code of one batch, which ends between two layers when the protocol interrupts it."""
        return self._interruptible

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let the other ranks go on without this one; where all make the same steps, they wait.

        Raises:
            RunError: a batch was taken, but ``optimizer.step()`` was not called yet.
        """
        if self._tasks.task is None or self._worker is None or self._steps.are_common:
            yield
            return
        if self._loop.loader is not None and self._tasks.taken is self._tasks.task:
            raise RunError("run.pause() between a batch and its optimizer.step(): pause after the step")
        self._tasks.task = None
        self._watch.keep_version()
        self._worker.pause(PAUSE)
        try:
            yield
            self._watch.look()
        finally:
            self._worker.resume()
            self._receive()

    def skip(self) -> None:
        """Drop what the loop has computed of its next step, which is left out unless another gradient follows."""
        self._gradients.leave_out()

    def weight(self, weight: float | Tensor) -> None:
        """Set what the gradient of this step counts in the mean of an update."""
        if self._steps.are_here:
            raise UsageError(
                "run.weight() is for gradients that are averaged in an update, but under this protocol the optimizer "
                "of each rank steps: omit it, or give bsp"
            )
        self._gradients.weight.add(weight)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Call `loss.backward`, in loops whose loss attach cannot see."""
        self._gradients.backward(loss, **options)

    def set_scheduler(self, scheduler: LRScheduler) -> None:
        """Let a scheduler follow the workload of the run; where all ranks make the same steps, leave it to the loop.

        Raises:
            UsageError: the scheduler follows a metric.
        """
        if not self._steps.are_common:
            self._schedules.add(scheduler)

    def stop(self) -> None:
        """End the run for all ranks, from rank 0; the model is the last version then.

        Of a sharded model the other ranks of its group wait for this one in what it computes. So the loop goes on here,
        until its loader ends.

        Raises:
            UsageError: this is not rank 0 of a run with a coordinator.
        """
        if self.over or self._worker is None:
            return
        if not self._server.end_run(Outcome.STOPPED, "run.stop() at rank 0"):
            raise UsageError("only rank 0 of a run with a coordinator can stop it for all ranks: call run.finish()")
        while not self.over and self._loop.group_size == 1:
            self._exchange.to_worker.put(None)  # the worker waits for the gradient of the present task
            self._receive()

    def finish(self) -> None:
        """Take no further part in the run; rank 0 waits for the other ranks, because the server runs beside it."""
        self._leave(END_OF_LOOP, Outcome.STOPPED)
        with self._hooks:  # which are removed at its end
            last = self._server.finish()
            self._watch.frozen.add_to(self._part.standby_folder if last is None else self._config.folder)
            if last is not None:
                self._steps.take_state(last.state)
                if not self.stopped_by:
                    self._on_end(last.end)

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if error is None:
            self.finish()
            return
        outcome, reason = why_left(error)
        self._leave(reason, outcome)
        self._server.stop(outcome, f"rank 0 has left the run: {reason}", has_standby=self._part.has_standby)
        self._hooks.close()

    def release(self) -> None:
        """Remove all hooks of a run that has ended from the optimizer, the scheduler and the model."""
        self._hooks.close()
        self._steps.release()

    # --- begin and end ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin the run, unless it has begun."""
        if self._worker is not None or self.over:
            return
        if self._stop is None:
            raise UsageError("the run has no end: iterate over run.epochs(10), or give stop= to attach")
        self._config = self._part.config(self._stop)
        self._config.check()
        self._gradients.start(self._config.plan, self._stop)
        assert isinstance(self._config.cluster, Torchrun)
        self._watch.start(debug=self._config.cluster.debug)
        cluster, share = self._config.cluster, self._config.cluster.place_in_worker
        self.loader.start(
            cluster.ranks.rank - cluster.ranks.ranks_before,
            dealt_to(self._loop, self._config.job, self._config.seed, share),
        )
        if len(self._optimizers) > 1:
            last_workload = self._stop.workload(self._config.per_epoch) or inf
            self._tasks.expect_end(last_workload, are_dealt=not self._config.job.is_iterable)
        print_start_line(self._config)
        self._server = ServerLink(self._part.start_server(self._stop))
        self._steps.start(self._server.read_state)
        self._worker = WorkerThread(lambda: self._part.take_part(self._config), self._exchange, self._part.lifecycle)
        self._signals = LoopSignals(self._on_signal)
        atexit.register(self._leave_at_exit)
        self._hooks.callback(atexit.unregister, self._leave_at_exit)
        self._receive()  # the first task says how far the run is, for the schedule
        if not self._steps.are_common and self._schedules.begin(self._steps_of_each()):
            self._gradients.omit_rates_once()

    def _on_signal(self, name: str) -> bool:
        """Leave the run after the gradient under way; rank 0 ends it for all. Return False before it takes part."""
        ends = self._server.end_run(Outcome.INTERRUPTED, f"interrupted by {name}")
        return ends or (self._exchange.has_begun and self._worker is not None and self._worker.leave(name))

    def _leave(self, reason: str, outcome: Outcome) -> None:
        """Leave a run that has not ended."""
        had_ended = self.over
        if self._worker is not None and not had_ended:
            advice = how_to_resume(self._config) if outcome is Outcome.INTERRUPTED else ""
            LOG.warning("this rank leaves the run, which has not ended: %s%s", reason, advice)
            self._worker.stop(reason, outcome, waits=self._exchange.has_begun)
        self._end()
        self._kept.end()
        if self._steps.are_common and not had_ended:
            self._take_end()

    def _take_end(self) -> None:
        """Take over the end of the run that this rank has left, if all ranks have left it by now."""
        while not self._exchange.to_loop.empty():
            message = self._exchange.to_loop.get()
            if isinstance(message, LoopEnd) and not message.end.has_failed:
                self._on_message(message)

    def _leave_at_exit(self) -> None:
        """Leave a run that the script has not finished, with the error that ends the script if there is one."""
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.__exit__(type(error), error)
            return
        self._leave(END_OF_LOOP, Outcome.STOPPED)
        self._server.stop(Outcome.STOPPED, "the script of rank 0 has ended")  # as after sys.exit()

    def _end(self) -> None:
        self.over = True
        self._tasks.end()
        self._steps.end()
        self.loader.close()
        self._gradients.close()
        if self._signals is not None:
            self._signals.close()

    # --- steps --------------------------------------------------------------------------------------------

    def _before_step(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        """Call a closure and hand in the gradient; return the arguments of the step, which may find another one.

        Args:
            index: index of the optimizer.
            args: positional arguments of its step.
            kwargs: keyword arguments of its step.
        """
        self._hands_in = self._begins(index)
        if not self._hands_in:
            return None
        if self.over:
            reason = self.reason or "this rank has finished"
            raise RunError(f"the run is over ({reason}): check run.over before optimizer.step()")
        task = self._tasks.task
        if task is None:
            raise RunError(f"optimizer.step() without a batch of the run: iterate over {self.loader.name}")
        arguments = self._gradients.send(task, index, args, kwargs)
        if self._steps.are_here:
            message = self._get()
            self._makes_step = isinstance(message, LoopStep)
            if not self._makes_step:  # the gradient is not finite, or the task begins anew
                self._on_message(message)
        return arguments

    def _begins(self, index: int) -> bool:
        """Count a step; drop its gradient and return False if it is left out."""
        self._loop_steps.count(index)
        if self._loop_steps.is_left_out(is_iterating=self.loader.is_iterating):
            self._gradients.drop(index)
            return False
        return True

    def _after_step(self) -> None:
        if not self._hands_in:
            return
        if not self._steps.are_here:
            self._receive()
        elif self._makes_step:
            self._makes_step = False
            self._return_step(LoopStep())
            self._receive()

    def _return_step(self, step: LoopStep) -> None:
        """Tell the worker that a step is made, also on a GPU."""
        await_kernels(self._watch.parameters[0].device)
        self._exchange.to_worker.put(step)

    def _step_of_scaler(self, index: int, step: Callable[[], Any]) -> Any:
        """Make a step of a GradScaler, which skips that of the optimizer if the gradient is not finite."""
        before = self._loop_steps.steps
        returned = step()
        task = self._tasks.task
        if task is not None and self._loop_steps.steps == before and self._begins(index):
            self._gradients.skip(task, index, overflowed=True)
            self._receive()
        return returned

    def _keeps_scale(self) -> bool:
        """Return whether the latest step was only a part of an update, or of one that was skipped on all ranks."""
        is_whole = self.last.fate == "skipped" or (self.stepped and self.last.fate != DROPPED)
        has_begun = self._worker is not None
        return has_begun and self._config.plan.sets_shares and not is_whole

    def _settle_without_step(self, task: LoopTask) -> None:
        if self._step_hooks.is_open:  # the gradient was handed in, so no second answer may follow
            raise RunError(
                "optimizer.step() has raised an error and the loop went on, but its gradient has been handed in: let "
                "the error end the loop, or catch it where it arises"
            )
        self._gradients.settle(task)
        self._receive()

    def _wait_for_batch(self, task: LoopTask) -> None:
        self._gradients.wait(task)
        self._receive()

    def _position(self) -> int | None:
        """Return the steps of a scheduler that every rank has made by now, None between two epochs."""
        if not self.loader.is_iterating:
            return None
        return self._steps_of_each() + (self._tasks.task.step if self._tasks.task is not None else 0)

    def _steps_of_each(self) -> int:
        return self.workload // self._config.cluster.n

    # --- messages -----------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Wait for the next task or the end; until then make the steps for which this rank has no minibatch."""
        while isinstance(message := self._get(), LoopStep):
            with self._step_hooks.off():
                self._optimizer.step()
            self._return_step(message)
        self._on_message(message)

    def _on_message(self, message: LoopTask | LoopStep | LoopEnd | BaseException) -> None:
        match message:
            case LoopTask() as task:
                self._tasks.task = task
                self._set_progress(task.progress)
                if task.progress.last == DROPPED:
                    self._gradients.lower_scale()
                self._load(task.model)
            case LoopEnd(model, end):
                self._end_with(model, end)
            case BaseException() as error:
                self._end()
                self._unbind()
                self.reason = str(error)
                if isinstance(error, RunError):
                    self._server.check(SERVER_END_S)  # its own error says more than a lost connection
                raise error

    def _end_with(self, model: nn.Module | None, end: End) -> None:
        self._end()
        self._unbind()
        if model is not None:
            self._set_progress(TaskProgress(end.updates, end.workload))
            self._watch.load(model)
        self._on_end(end)

    def _set_progress(self, progress: TaskProgress) -> None:
        self.stepped = progress.update > self.update
        self._progress = progress

    def _on_end(self, end: End) -> None:
        self.stopped_by = end.outcome
        self.reason = end.reason
        raise_end(end, self._steps.leader, self._config, returns=self._returns)

    def _get(self) -> LoopTask | LoopStep | LoopEnd | BaseException:
        return self._exchange.message(lambda: self._server.look(has_begun=self._exchange.has_begun))

    def _load(self, model: nn.Module) -> None:
        if self._steps.are_here:
            self._watch.bind(model)
        else:
            self._watch.load(model)

    def _unbind(self) -> None:
        if self._steps.are_here:
            self._watch.unbind()
