"""Sender of the gradients that a user's loop has computed, with their losses and learning rates."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

from torch import Tensor, nn

from paceline.core.gradient import NO_STEP
from paceline.core.stop import Stop
from paceline.errors import RunError
from paceline.jobs.local_shards import local_of
from paceline.protocols.protocol import Plan
from paceline.user_loop.data.loop_data import UserLoop
from paceline.user_loop.hooks.change_watch import ChangeWatch
from paceline.user_loop.hooks.early_gradients import EarlyGradients
from paceline.user_loop.hooks.loop_tensors import answer, hand_in
from paceline.user_loop.hooks.loop_watch import LoopWatch
from paceline.user_loop.hooks.loss_reader import LossReader, reader_of_losses
from paceline.user_loop.hooks.loss_weight import LossWeight
from paceline.user_loop.hooks.other_optimizers import OtherOptimizers
from paceline.user_loop.hooks.scaler_watch import ScalerWatch, check_scaler_skips
from paceline.user_loop.hooks.step_closure import StepArguments, call_closure
from paceline.user_loop.hooks.step_counter import StepCounter
from paceline.user_loop.several_optimizers import parameters_of, parts_of
from paceline.user_loop.worker.exchange import Exchange, LoopTask
from paceline.utils.wording import counted


class GradientSender:
    """Sender of the gradients of one loop to the thread of the worker.

    Args:
        loop: parts of the loop.
        watch: watch over its objects, with one look for each gradient.
        exchange: exchange with the thread of the worker.
        steps: counter of the steps of the loop.
        samples: returns the samples of the batches that the loop has taken.
        step_of_scaler: called with the index of an optimizer and the step of a GradScaler, which it makes and whose
            value it returns.
        keeps_scale: returns whether the latest step leaves the scale of a GradScaler as it is.
        task: returns the task of the loop; None without one.

    Attributes:
        weight: weight of the gradient of each step.
    """

    def __init__(
        self,
        loop: UserLoop,
        watch: LoopWatch,
        exchange: Exchange,
        steps: StepCounter,
        samples: Callable[[], int],
        step_of_scaler: Callable[[int, Callable[[], Any]], Any],
        keeps_scale: Callable[[], bool],
        task: Callable[[], LoopTask | None],
    ) -> None:
        self._optimizer = loop.optimizer
        self._watch = watch
        self._accumulate = loop.accumulate
        self._parameters = watch.parameters
        self._optimizers = parts_of(loop.optimizer)
        are_several = len(self._optimizers) > 1
        self._of_parts = [
            set(parameters_of(each)) if are_several else set(self._parameters) for each in self._optimizers
        ]
        self._exchange = exchange
        self._steps = steps
        self._task = task
        self._early: EarlyGradients | None = None
        self._samples = samples
        self.weight = LossWeight(lambda: samples() // loop.accumulate)
        self._losses = LossReader(self.weight.look)
        self._scalers = ScalerWatch(self._optimizers, self._on_unscaled, step_of_scaler, keeps_scale)
        self._others: OtherOptimizers | None = None
        self._changes: ChangeWatch | None = None
        self._needs_loss = ""
        self._omits_rates = False
        self._takes_turns = False  # whether the loop has stepped or skipped, and so takes no batch ahead of that
        self._keeps_gradients = False  # whether a step leaves its gradient in the parameters

    def start(self, plan: Plan, stop: Stop) -> None:
        """Prepare for the protocol and the stop conditions of a run."""
        self._needs_loss = reader_of_losses(plan, stop)
        self.weight.start(plan)
        self._keeps_gradients = plan.local_steps is not None or plan.allreduce is not None
        self._others = OtherOptimizers(self._optimizers, self._parameters)
        steps_here = plan.local_steps is not None or (plan.allreduce is not None and plan.allreduce.sums == "updates")
        if not steps_here:  # else a gradient of one rank is that of a step, and may be changed
            self._changes = ChangeWatch(self._parameters)

    def omit_rates_once(self) -> None:
        """Leave out the learning rates of the next gradient: a scheduler that joins a run is behind it until then."""
        self._omits_rates = True

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Call `loss.backward`, whose loss is that of the next gradient."""
        self._losses.backward(loss, **options)

    def send(self, task: LoopTask, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        """Send the gradient of a task, and return the arguments of the step; a closure is called first.

        A task without a gradient is skipped.

        Args:
            task: the task.
            index: index of the optimizer that steps.
            args: positional arguments of its step.
            kwargs: keyword arguments of its step.

        Raises:
            RunError: the loss is needed, but `backward` was not seen, and the task is not interrupted.
            UsageError: the loop has changed what attach has read.
        """
        self._takes_turns = True
        check_scaler_skips(self._optimizers[index])
        arguments = call_closure(args, kwargs)
        self._watch.look()
        stepped = self._stepped_by(index)
        if self._changes is not None:
            self._changes.on_step(stepped)
        if _are_absent(stepped):
            self.skip(task, index)
            return arguments
        loss, weight = self._take_loss(is_needed=not task.is_interrupted), self.weight.take()
        if weight == 0:
            self.skip(task, index)
            return arguments
        norms = self._hand_in(task, self._of_parts[index])
        self._answer(loss, **self._steps.place(task), squared_norms=norms, weight=weight)
        return arguments

    def drop(self, index: int | None = None) -> None:
        """Drop what the loop has computed of the gradient of an optimizer, of all of them by default."""
        self._losses.take()
        self.weight.drop()
        self._scalers.take_scale()
        for parameter in self._parameters if index is None else self._stepped_by(index):
            parameter.grad = None

    def leave_out(self) -> None:
        """Drop what the loop has computed of a gradient, on the wish of the loop."""
        self.drop()
        self._takes_turns = True

    def skip(self, task: LoopTask, index: int | None = None, *, overflowed: bool = False) -> None:
        """Send that the loop has skipped the step of a task, possibly because the gradient was not finite.

        Args:
            task: the task.
            index: index of the optimizer that would have stepped; None if no step was begun.
            overflowed: whether the gradient was not finite.
        """
        self._watch.look()
        self.drop(index)
        self._hand_in(task, ())
        place = self._steps.place(task) if index is not None else {}
        self._answer(None, **place, skipped=True, overflowed=overflowed)

    def wait(self, task: LoopTask) -> None:
        """Send that the loop needs a batch for its next step, and that the task has none."""
        self._hand_in(task, ())
        self._answer(None, skipped=True, step_place=NO_STEP)

    def lower_scale(self) -> None:
        """Lower the scale of the loop's GradScaler, if it has one, as an overflow at this rank does."""
        self._scalers.lower()

    def settle(self, task: LoopTask) -> None:
        """Send that a task without a step is interrupted, or that the loop has skipped the step.

        Raises:
            RunError: the gradient is finite, or the loop may have taken a batch ahead of its first step.
        """
        if task.is_interrupted:
            self._watch.look()
            self.drop()
            self._answer(None)
        else:
            self._check_skip()
            self.skip(task, overflowed=not _are_absent(self._parameters))

    def close(self) -> None:
        """Remove what reads losses, scales and changes of the gradients."""
        self._losses.close()
        self._scalers.close()
        if self._others is not None:
            self._others.close()
        if self._changes is not None:
            self._changes.close()
        if self._early is not None:
            self._early.close()

    def _check_skip(self) -> None:
        """Check that the loop has skipped a step on purpose: there is no gradient, or it is not finite.

        Raises:
            RunError: the gradient is finite, or the loop may have taken a batch ahead of its first step.
        """
        not_called = f"optimizer.step() was not called after {counted(self._accumulate, 'batch')} of run.loader"
        is_old = self._keeps_gradients and not self._losses.has_read
        if is_old or _are_absent(self._parameters):
            if not self._takes_turns and not self._losses.has_read:
                raise RunError(
                    f"{not_called}, and neither was backward(): to load batches ahead, give the DataLoader "
                    "num_workers= in place of a prefetcher; to skip a batch, call run.skip()"
                )
        elif all(each.grad is None or bool(local_of(each.grad).isfinite().all()) for each in self._parameters):
            raise RunError(
                f"{not_called}, but there is a gradient: to skip it, call run.skip(); if a step takes more batches, "
                "give attach accumulate="
            )

    def _hand_in(self, task: LoopTask, of: Container[nn.Parameter]) -> dict[int, Tensor]:
        """Hand in the gradients of some parameters, of which the sums of some may have begun."""
        copied = {} if self._early is None else self._early.unchanged(task)
        norms = hand_in(task, self._parameters, self._watch.buffers, of=of, copied=copied)
        if self._early is not None:
            self._early.end(task, copied)
        elif task.on_ready is not None and len(self._optimizers) == 1:
            self._early = EarlyGradients(self._parameters, self._accumulate, self._task)
        return norms

    def _stepped_by(self, index: int) -> list[nn.Parameter]:
        return [each for each in self._parameters if each in self._of_parts[index]]

    def _answer(self, loss: float | None, **about: Any) -> None:
        with_rates, self._omits_rates = not self._omits_rates, False
        message = answer(loss, self._samples(), self._optimizer, with_rates=with_rates)
        self._exchange.to_worker.put(message._replace(**about))

    def _take_loss(self, *, is_needed: bool) -> float | None:
        loss, scale = self._losses.take(), self._scalers.take_scale()
        if loss is None and is_needed and self._needs_loss:
            raise RunError(
                f"{self._needs_loss} needs the loss, but backward() was not called on a scalar in this thread: call "
                "run.backward(loss) in place of loss.backward()"
            )
        return None if loss is None else loss / scale

    def _on_unscaled(self) -> None:
        if self._changes is not None:
            self._changes.reset(self._parameters)


def _are_absent(parameters: Iterable[nn.Parameter]) -> bool:
    return all(parameter.grad is None for parameter in parameters)
