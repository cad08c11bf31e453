"""Strategy of Lightning whose ranks meet in the steps of the optimizer only."""

from __future__ import annotations

import math
import os
from collections.abc import Generator
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.clusters.launch_env import started_by_torchrun
from paceline.errors import UsageError
from paceline.integrations.alone import EpochLoader, end_run, rank, ranks, turn_in
from paceline.integrations.counted_steps import check_counted_steps
from paceline.user_loop.attach import attach
from paceline.user_loop.hooks.loop_scheduler import check_scheduler
from paceline.user_loop.shared_run import SharedRun
from paceline.utils.rank_logger import RankLogger

try:
    import lightning.pytorch as framework
except ImportError:
    import pytorch_lightning as framework

LOG = RankLogger(__name__)
ONLY_RANK_0 = (framework.callbacks.Checkpoint, framework.callbacks.EarlyStopping)  # they read what validation returns


class PacelineStrategy(framework.strategies.SingleDeviceStrategy):  # type: ignore[misc]  # no types without the package
    """Strategy that attaches the training of each rank to one run.

    To Lightning each rank is alone: it gathers nothing. Only rank 0 validates, saves and logs; when its training ends,
    the run ends for all ranks. Without torchrun it is the strategy of one device.

    Args:
        protocol: protocol as text, as "k_batch_async(k=4)".
        attach_options: further arguments of `paceline.attach`, as ``out="runs/mine"``.

    Example: ``Trainer(max_epochs=3, strategy=PacelineStrategy("k_batch_async(k=4)"))``
    """

    strategy_name = "paceline"

    def __init__(self, protocol: str, **attach_options: Any) -> None:
        super().__init__()
        self.global_rank = rank()
        self.parallel_devices: list[torch.device] = []  # set by the Trainer
        self._protocol = protocol
        self._attach_options = attach_options
        self._run: SharedRun | None = None
        self._ends_schedule = False  # whether the scheduler steps at the end of an epoch
        self._given: dict[str, Any] = {}  # attributes of the Trainer to restore
        self._turn = ExitStack()  # of this rank, to prepare the data

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return rank() == 0

    @property
    def root_device(self) -> torch.device:
        """Device of this rank."""
        place = int(os.environ.get("LOCAL_RANK", "0"))
        if place < len(self.parallel_devices):
            return self.parallel_devices[place]
        if self.parallel_devices[0].type == "cpu":
            return self.parallel_devices[0]
        raise UsageError(
            f"the Trainer has {len(self.parallel_devices)} devices, but this is rank {place} of its host: "
            'give Trainer(devices="auto"), and start at most one rank per device'
        )

    def setup_environment(self) -> None:
        """Leave validation and checkpoints to rank 0, and wait for this rank's turn to prepare the data."""
        super().setup_environment()
        if not started_by_torchrun(os.environ):
            LOG.warning(
                "no launcher has started this process, as paceline run does: the Trainer trains alone, without a "
                "protocol"
            )
            return
        self._turn.enter_context(turn_in(self._trainer.default_root_dir))
        if not self.is_global_zero and self._trainer.state.fn == "fit":
            kept = [each for each in self._trainer.callbacks if not isinstance(each, ONLY_RANK_0)]
            self._set(limit_val_batches=0, callbacks=kept)

    def barrier(self, name: str | None = None) -> None:
        """Let the next rank prepare the data after this one; otherwise no rank waits for another."""
        if name == "pre_setup":
            self._turn.close()

    def setup(self, trainer: Any) -> None:
        """Make the optimizer, and check that the run can have it."""
        super().setup(trainer)
        if started_by_torchrun(os.environ) and trainer.state.fn == "fit":
            _check(trainer)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the loader of the run's batches in place of that of the training."""
        if not (started_by_torchrun(os.environ) and self._trainer.training):
            return dataloader
        if not isinstance(dataloader, DataLoader):
            raise UsageError(f"the training has a {type(dataloader).__name__}, expected one DataLoader")
        return RankLoader(dataloader)

    def on_train_start(self) -> None:
        """Attach this rank; the number of its batches is not known from now on."""
        if not started_by_torchrun(os.environ):
            return
        trainer, loop = self._trainer, self._trainer.fit_loop
        loaders = loop._combined_loader.flattened
        if len(loaders) != 1:
            raise UsageError(
                f"the training has {len(loaders)} DataLoaders, but the coordinator deals the samples of one"
            )
        options = {
            "stop": f"epochs={trainer.max_epochs - trainer.current_epoch}",
            "seed": int(os.environ.get("PL_GLOBAL_SEED", "0")),
            **self._attach_options,
        }
        check_counted_steps(self._protocol)
        run = attach(
            self.lightning_module,
            self.optimizers[0],
            loaders[0].loader,
            protocol=self._protocol,
            clip_norm=trainer.gradient_clip_val or None,
            accumulate=trainer.accumulate_grad_batches,
            **options,
        )
        assert isinstance(run, SharedRun)
        self._run = loaders[0].run = run
        for schedule in self.lr_scheduler_configs:
            self._run.set_scheduler(schedule.scheduler)
            self._ends_schedule = schedule.interval == "epoch"
        self._set(gradient_clip_val=None)
        if isinstance(getattr(trainer, "val_check_interval", None), float):  # validates at the end of each epoch
            trainer.val_check_batch = math.inf
        loop.max_batches = math.inf
        loop._combined_loader.limits = None
        loop._data_fetcher.prefetch_batches = 0
        iter(loop._data_fetcher)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Make a step, after which the epoch may have ended for this rank."""
        returned = super().optimizer_step(*args, **kwargs)
        if self._run is not None and self._run.loader.is_exhausted:
            loop = self._trainer.fit_loop
            loop.epoch_loop.batch_progress.is_last_batch = True
            self._trainer.should_stop |= self._run.over
            if self._ends_schedule:
                loop._combined_loader.flattened[0].close()
        return returned

    def on_train_end(self) -> None:
        """End the run."""
        if self._run is not None:
            end_run(self._run)

    def on_exception(self, exception: BaseException) -> None:
        """Leave the run."""
        if self._run is not None:
            self._run.__exit__(type(exception), exception, None)

    def teardown(self) -> None:
        """Restore the Trainer."""
        self._turn.close()
        self._run = None
        for name, value in self._given.items():
            setattr(self._trainer, name, value)
        self._given.clear()
        super().teardown()

    @property
    def _trainer(self) -> Any:
        return self.lightning_module.trainer

    def _set(self, **settings: Any) -> None:
        """Set attributes of the Trainer until the end of the training."""
        for name, value in settings.items():
            self._given[name] = getattr(self._trainer, name)
            setattr(self._trainer, name, value)


class RankLoader(EpochLoader):
    """DataLoader of the training, whose length before the run is that of one of equal ranks, as for schedules."""

    def __len__(self) -> int:
        if self.run is not None:
            raise TypeError("the number of batches that this rank gets is not known")
        return math.ceil(len(self.loader) / ranks())

    def __iter__(self) -> Generator[Any]:
        self._batches = super().__iter__()
        return self._batches

    def close(self) -> None:
        """End the iteration."""
        self._batches.close()


def _check(trainer: Any) -> None:
    """Check that a run can follow the settings of a Trainer.

    Raises:
        UsageError: it cannot.
    """
    schedules = trainer.lr_scheduler_configs
    interval = getattr(trainer, "val_check_interval", None)  # not set if it is a time
    for refused, given, advice in [
        (
            not trainer.lightning_module.automatic_optimization,
            "automatic_optimization=False",
            "write a loop of your own, with pl.attach",
        ),
        (len(schedules) > 1, f"configure_optimizers with {len(schedules)} schedulers", "give one, as SequentialLR"),
        (
            any(each.interval == "step" and each.frequency != 1 for each in schedules),
            "a scheduler with a frequency of steps",
            "omit frequency",
        ),
        (trainer.limit_train_batches != 1.0, f"limit_train_batches={trainer.limit_train_batches}", "omit it"),
        (trainer.max_steps != -1, f"max_steps={trainer.max_steps}", "give max_epochs"),
        (trainer.max_epochs < 1, f"max_epochs={trainer.max_epochs}", "give the number of epochs"),
        (trainer.reload_dataloaders_every_n_epochs, "reload_dataloaders_every_n_epochs", "omit it"),
        (isinstance(interval, float) and interval != 1, f"val_check_interval={interval}", "give a number of batches"),
        (
            trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value",
            'gradient_clip_algorithm="value"',
            'give "norm"',
        ),
        (
            any(isinstance(each, framework.callbacks.GradientAccumulationScheduler) for each in trainer.callbacks),
            "GradientAccumulationScheduler",
            "give accumulate_grad_batches",
        ),
    ]:
        if refused:
            raise UsageError(f"{given} does not work with PacelineStrategy on several ranks: {advice}")
    for each in schedules:
        check_scheduler(each.scheduler)
