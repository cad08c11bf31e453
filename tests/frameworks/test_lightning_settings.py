"""What `PacelineStrategy` refuses, and what it leaves as it was."""

import fcntl
import os
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from paceline.errors import UsageError
from paths import ROOT

pytestmark = pytest.mark.integrations
OF_RANK_1 = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def loader():
    return DataLoader(TensorDataset(torch.ones(8, 2), torch.zeros(8, 1)), batch_size=2)


def is_locked(folder):
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@pytest.fixture
def fit(monkeypatch, tmp_path):
    """Return a function that trains as rank 1 of two, of which the other has not started."""
    from lightning.pytorch import LightningModule, Trainer

    from paceline.integrations.lightning import PacelineStrategy

    class Module(LightningModule):
        def __init__(self, automatic, schedules):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)
            self.automatic_optimization = automatic
            self.schedules = schedules

        def prepare_data(self):
            locked.append(is_locked(tmp_path))

        def setup(self, stage):
            locked.append(is_locked(tmp_path))

        def training_step(self, batch):
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self):
            train.steps = self.trainer.estimated_stepping_batches
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [make(optimizer) for make in self.schedules]

    locked = []  # while the data are prepared, and afterwards

    def train(automatic=True, schedules=(), loaders=None, **settings):
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        given = {"max_epochs": 1, "accelerator": "cpu", "default_root_dir": str(tmp_path), **quiet, **settings}
        trainer = Trainer(strategy=PacelineStrategy("bsp"), **given)
        trainer.fit(Module(automatic, schedules), loaders or loader())

    train.locked = locked
    for name, value in OF_RANK_1.items():
        monkeypatch.setenv(name, value)
    return train


def each_epoch(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def every_second_step(optimizer):
    return {"scheduler": each_epoch(optimizer), "interval": "step", "frequency": 2}


def on_plateau(optimizer):
    return {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "loss"}


@pytest.mark.filterwarnings("ignore")  # of Lightning
@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"automatic": False}, "write a loop of your own, with pl.attach"),
        ({"schedules": [each_epoch, each_epoch]}, "give one, as SequentialLR"),
        ({"schedules": [every_second_step]}, "omit frequency"),
        ({"schedules": [on_plateau]}, "as CosineAnnealingLR"),
        ({"limit_train_batches": 2}, "limit_train_batches=2 .*: omit it"),
        ({"max_steps": 3, "max_epochs": None}, "give max_epochs"),
        ({"max_epochs": -1}, "give the number of epochs"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs .*: omit it"),
        ({"val_check_interval": 0.5}, "give a number of batches"),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, 'give "norm"'),
        ({"loaders": [[1.0]]}, "expected one DataLoader"),
        ({"loaders": [loader(), loader()]}, "the coordinator deals the samples of one"),
    ],
)
def test_what_ranks_of_unequal_speed_cannot_follow_is_refused(fit, settings, advice):
    with pytest.raises(UsageError, match=advice):
        fit(**settings)


@pytest.mark.filterwarnings("ignore")
def test_a_number_of_batches_that_varies_is_refused(fit):
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    with pytest.raises(UsageError, match="give accumulate_grad_batches"):
        fit(callbacks=[GradientAccumulationScheduler({0: 2})])


@pytest.mark.filterwarnings("ignore")
def test_schedules_are_as_long_as_for_one_of_equal_ranks(fit):
    with pytest.raises(UsageError):
        fit(max_epochs=3, limit_val_batches=0, reload_dataloaders_every_n_epochs=1)
    assert fit.steps == 3 * len(loader()) // 2


@pytest.mark.filterwarnings("ignore")
def test_ranks_prepare_the_data_one_after_the_other(fit):
    with pytest.raises(UsageError):
        fit(limit_train_batches=2)
    assert fit.locked == [True, False]


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    from paceline.integrations.lightning import PacelineStrategy

    monkeypatch.setenv("LOCAL_RANK", "1")
    strategy = PacelineStrategy("bsp")
    strategy.parallel_devices = [torch.device("cuda", 0)]
    with pytest.raises(UsageError, match='give Trainer\\(devices="auto"\\)'):
        assert strategy.root_device
    strategy.parallel_devices.append(torch.device("cuda", 1))
    assert strategy.root_device == torch.device("cuda", 1)


def test_the_older_package_is_used_where_the_newer_one_is_missing():
    code = "import sys; sys.modules['lightning'] = None; from paceline.integrations.lightning import PacelineStrategy; "
    code += "print(PacelineStrategy.__mro__[1].__module__)"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT, env=os.environ
    )
    assert run.stdout.startswith("pytorch_lightning."), run.stderr
