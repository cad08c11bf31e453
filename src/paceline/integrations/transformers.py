"""Trainer of transformers whose ranks meet in the steps of the optimizer only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.integrations.alone import EpochLoader, alone, end_run, rank, ranks, with_plain_shuffling
from paceline.integrations.counted_steps import check_counted_steps
from paceline.recording.run_folder import RUN
from paceline.user_loop.attach import attach

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

ONLY_RANK_0 = {"save_strategy": "no", "eval_strategy": "no", "load_best_model_at_end": False, "report_to": "none"}


@dataclass
class PacelineArguments(transformers.TrainingArguments):  # type: ignore[misc]  # no types without the package
    """Arguments of a training whose ranks are attached to one run.

    Only rank 0 saves, evaluates and reports. ``max_grad_norm`` clips the mean gradient. ``num_train_epochs`` ends the
    run; ``max_steps`` is refused, because the ranks make unequal numbers of steps.

    Raises:
        UsageError: max_steps is given.

    Attributes:
        protocol: protocol as text, as "k_batch_async(k=4)".
        run_folder: folder in which rank 0 records the run, None for no record; ``train(resume_from_checkpoint=True)``
            resumes it.
        attach_options: further arguments of `paceline.attach`, as ``{"cluster": "torchrun(encrypt=false)"}``.
    """

    protocol: str = "bsp"
    run_folder: str | None = None
    attach_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_steps > 0:
            raise UsageError(
                f"max_steps={self.max_steps}, but ranks make unequal numbers of steps: give num_train_epochs"
            )
        if rank() > 0:
            for name, value in ONLY_RANK_0.items():
                setattr(self, name, value)
        with alone():
            super().__post_init__()

    @property
    def process_index(self) -> int:
        """Rank of this process, by which the Trainer chooses the one that saves."""
        return rank()


class PacelineMixin:
    """Mixin for a subclass of `transformers.Trainer`, to be named before it.

    Example: ``class MyTrainer(PacelineMixin, trl.SFTTrainer): ...``
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with alone():
            super().__init__(*args, **kwargs)

    def train(self, resume_from_checkpoint: bool | str | None = None, **kwargs: Any) -> Any:
        """Train, or resume the run in `run_folder` from its last checkpoint; without a run there, the first one begins.

        Raises:
            UsageError: resume_from_checkpoint is a folder, or there is no run_folder.
        """
        args: PacelineArguments = self.args  # type: ignore[attr-defined]
        if resume_from_checkpoint and (args.run_folder is None or not isinstance(resume_from_checkpoint, bool)):
            raise UsageError(
                f"resume_from_checkpoint={resume_from_checkpoint!r}, but the state of the run is in run_folder="
                f"{args.run_folder!r}: give run_folder, and resume_from_checkpoint=True"
            )
        resumes = resume_from_checkpoint and Path(args.run_folder or "", RUN).exists()
        self._folder: dict[str, Any] = {"resume" if resumes else "out": args.run_folder}
        return super().train(**kwargs)  # type: ignore[misc]

    def get_train_dataloader(self) -> EpochLoader:
        """Return the loader of the run's batches."""
        loader: DataLoader[Any] = super().get_train_dataloader()  # type: ignore[misc]
        self._epoch_loader = EpochLoader(loader)
        return self._epoch_loader

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the scheduler for the steps of one of the ranks, and attach this rank."""
        prepared: Any = self.optimizer  # type: ignore[attr-defined]
        if rank() > 0:
            self.remove_callback(transformers.EarlyStoppingCallback)  # type: ignore[attr-defined]  # it evaluates
        scheduler = super().create_scheduler(math.ceil(num_training_steps / ranks()), optimizer)  # type: ignore[misc]
        args: PacelineArguments = self.args  # type: ignore[attr-defined]
        check_counted_steps(args.protocol)
        self._epoch_loader.run = attach(
            self.model,  # type: ignore[attr-defined]
            getattr(prepared, "optimizer", prepared),
            with_plain_shuffling(self._epoch_loader.loader),
            protocol=args.protocol,
            stop=f"epochs={math.ceil(args.num_train_epochs)}",
            clip_norm=args.max_grad_norm or None,
            accumulate=args.gradient_accumulation_steps,
            scheduler=scheduler,
            seed=args.seed,
            **self._folder,
            **args.attach_options,
        )
        return scheduler

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a batch; nan, which the Trainer leaves out of its logs, if the protocol interrupts it."""
        assert self._epoch_loader.run is not None
        loss: Tensor | None = None
        with self._epoch_loader.run.minibatch():
            loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        return torch.tensor(math.nan, device=self.args.device) if loss is None else loss  # type: ignore[attr-defined]

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Return the norm of this rank's gradient, which is not clipped here."""
        return nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        assert self._epoch_loader.run is not None
        end_run(self._epoch_loader.run)
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]


class PacelineTrainer(PacelineMixin, transformers.Trainer):  # type: ignore[misc]
    """Trainer of transformers on the ranks of torchrun, each of which is alone until `optimizer.step`."""
