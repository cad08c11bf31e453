"""Accelerator whose ranks meet in the steps of the optimizer only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import accelerate
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from paceline.errors import UsageError
from paceline.integrations.alone import EpochLoader, alone, end_run, rank, with_plain_shuffling
from paceline.integrations.counted_steps import check_counted_steps
from paceline.user_loop.attach import attach


class PacelineAccelerator(accelerate.Accelerator):  # type: ignore[misc]  # no types without the package
    """Accelerator that attaches the loop of each rank to one run, in the call of `prepare` with model and optimizer.

    Each iteration over the prepared training loader is the next epoch. To Accelerate each rank is alone, so it gathers
    nothing; only rank 0 is the main process.

    Args:
        protocol: protocol as text, as "k_batch_async(k=4)".
        stop: conditions that end the run, as "epochs=10".
        clip_norm: largest norm of the mean gradient; `clip_grad_norm_` in the loop clips nothing.
        attach_options: further arguments of `paceline.attach`.
        settings: arguments of `accelerate.Accelerator`.

    Raises:
        UsageError: `prepare` is not given one model, one optimizer and one training loader, the first one.
    """

    def __init__(
        self,
        *,
        protocol: str,
        stop: str,
        clip_norm: float | None = None,
        attach_options: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        with alone():
            super().__init__(**settings)
        self._protocol = protocol
        self._stop = stop
        self._clip_norm = clip_norm
        self._attach_options = attach_options or {}
        self._loader: EpochLoader | None = None

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return rank() == 0

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """Prepare the objects for one process, and attach the first training loader, the model and its optimizer."""
        prepared = super().prepare(*objects, **options)
        if not any(isinstance(each, torch.optim.Optimizer) for each in objects):
            return prepared
        prepared = list(prepared) if isinstance(prepared, tuple) else [prepared]
        model = _only(objects, nn.Module, "model")
        optimizer = _only(objects, torch.optim.Optimizer, "optimizer")
        place = next((i for i, each in enumerate(objects) if isinstance(each, DataLoader)), None)
        if place is None:
            raise UsageError(
                "prepare was given no DataLoader beside the optimizer: give prepare(model, optimizer, loader)"
            )
        self._loader = EpochLoader(objects[place], to=prepared[place].device)
        check_counted_steps(self._protocol)
        self._loader.run = attach(
            model,
            optimizer,
            with_plain_shuffling(objects[place]),
            protocol=self._protocol,
            stop=self._stop,
            clip_norm=self._clip_norm,
            accumulate=self.gradient_accumulation_steps,
            **self._attach_options,
        )
        for each in objects:
            if isinstance(each, LRScheduler):
                self._loader.run.set_scheduler(each)
        prepared[place] = self._loader
        return tuple(prepared)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Return the norm of this rank's gradient; the mean gradient is clipped by `clip_norm`.

        Raises:
            UsageError: max_norm is not clip_norm.
        """
        if max_norm != self._clip_norm or norm_type != 2:
            raise UsageError(
                f"clip_grad_norm_ was given max_norm={max_norm:g} of norm {norm_type:g}, but the mean gradient is "
                f"clipped by clip_norm={self._clip_norm}: give PacelineAccelerator(clip_norm={max_norm:g})"
            )
        return nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])

    def end_training(self) -> None:
        """End the run, and the trackers."""
        if self._loader is not None and self._loader.run is not None:
            end_run(self._loader.run)
        super().end_training()


def _only(objects: tuple[Any, ...], kind: type, name: str) -> Any:
    found = [each for each in objects if isinstance(each, kind)]
    if len(found) != 1:
        raise UsageError(f"prepare was given {len(found)} objects that are a {name}, expected one")
    return found[0]
