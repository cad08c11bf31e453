"""Jobs whose parts no module defines: of a script, a notebook or a prompt, lambdas, closures and partial functions."""

import os
import runpy
import subprocess
import sys
import threading
from functools import partial
from types import ModuleType
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import paceline as pl
from machine_speed import scaled
from paceline.cli import main
from paceline.processes.child_process import Launcher
from paceline.processes.shared_pickle import LARGE_BYTES, SharedPickle
from paceline.processes.unpicklable import explain_unpicklable
from paceline.recording.source_digest import main_module_of
from tiny_jobs import dataset, sgd, tiny_job

SCRIPT = """
from dataclasses import dataclass, fields
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset

import paceline as pl

print("the script runs")
torch.set_default_dtype(torch.float64)
INPUTS = torch.randn(400, 6)


class Size(Enum):
    SMALL = 8


@dataclass
class Config:
    hidden: Size = Size.SMALL
    classes: int = 2


class Sample(NamedTuple):
    x: torch.Tensor
    y: int


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = config_of(2)


@lru_cache(maxsize=3)
def config_of(classes):
    return Config(classes=classes)


class Net(Base):
    def __init__(self):
        super().__init__()
        assert isinstance(self.config, Config) and self.config.hidden is Size.SMALL
        assert [field.name for field in fields(self.config)] == ["hidden", "classes"]
        self.layers = nn.Sequential(nn.Linear(6, Size.SMALL.value), nn.ReLU(), nn.Linear(Size.SMALL.value, 2))

    def forward(self, x):
        return Double.apply(self.layers(x))


class Data(Dataset):
    def __len__(self):
        return len(INPUTS)

    def __getitem__(self, index):
        return Sample(INPUTS[index], int(INPUTS[index].sum() > 0))


def step(model, batch):
    assert isinstance(batch, Sample) and isinstance(model, Net)
    return smooth(model(batch.x), batch.y), {"share": (batch.y > 0).float().mean()}


def smooth(output, target, by=0.1):
    return nn.functional.cross_entropy(output, target, label_smoothing=by)


class Slow(pl.timing.Deterministic):
    pass


job = pl.Job(model=Net, step=step, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), data=Data(),
             eval_data=Data(), batch_size=16)
slowness = pl.Cluster(2, timing=Slow(0.001))
result = pl.train(job, protocol="bsp", cluster=pl.LocalCluster(2, slowness=slowness), stop="updates=5")
print(result.stopped_by, sorted(result.metrics), next(result.model.parameters()).dtype)
"""
SAID = ["the script runs", "updates ['loss', 'share'] torch.float64"]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def train(job, **settings):
    return pl.train(job, **{"protocol": "bsp", "cluster": pl.LocalCluster(2), "stop": "updates=3", **settings})


@pytest.mark.processes
def test_a_script_without_a_main_guard_trains_and_runs_once(script, capfd):
    before = torch.get_default_dtype()
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        torch.set_default_dtype(before)
    said = capfd.readouterr()
    assert said.out.splitlines() == SAID, said.err


@pytest.mark.slow
@pytest.mark.parametrize("is_file", [True, False])
def test_a_script_trains_from_a_file_and_from_standard_input(script, is_file):
    with script.open() as file:
        done = subprocess.run(
            [sys.executable, script if is_file else "-"],
            stdin=subprocess.DEVNULL if is_file else file,
            capture_output=True,
            text=True,
            timeout=scaled(100),
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == SAID


@pytest.mark.slow
def test_a_script_without_a_main_guard_compares_in_processes(tmp_path, capfd):
    (tmp_path / "script.py").write_text(
        SCRIPT.partition("slowness = ")[0]
        + f"""
compared = pl.compare(job, protocols="bsp, asp", cluster="2*exp(mean=1)", stop="updates=3", seeds=1,
                      processes=2, out={str(tmp_path / "out")!r})
print(len(compared.rows), compared.failures)
"""
    )
    before = torch.get_default_dtype()
    try:
        runpy.run_path(str(tmp_path / "script.py"), run_name="__main__")
    finally:
        torch.set_default_dtype(before)
    assert capfd.readouterr().out.splitlines() == ["the script runs", "2 {}"]


def test_lambdas_closures_partial_functions_and_local_classes_are_pickled():
    weights = torch.ones(3, dtype=torch.float64)

    class Net(nn.Sequential):
        def __init__(self, hidden):
            super().__init__(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, 3))

    def loss(output, target, scale):
        return scale * F.cross_entropy(output, target, weight=weights)

    job = tiny_job(model=lambda: Net(4).double(), loss=partial(loss, scale=0.5), collate=None)
    assert train(job).stopped_by == "updates"


def test_large_arrays_used_by_functions_are_shared_and_not_pickled():
    tensor, array = torch.arange(300_000.0), np.arange(300_000.0)
    parcel = SharedPickle({"first": lambda: (tensor, array), "second": lambda: (tensor, array), "array": array})
    assert len(parcel._pickle) < LARGE_BYTES / 100
    opened = parcel.load()
    first, second = opened["first"](), opened["second"]()
    assert torch.equal(first[0], tensor)
    assert np.array_equal(first[1], array)
    assert first[0].data_ptr() == second[0].data_ptr()
    assert first[1] is second[1] is opened["array"]


def test_writes_to_a_shared_array_are_private_to_the_process():
    array = np.zeros(LARGE_BYTES)
    parcel = SharedPickle([array, torch.zeros(LARGE_BYTES)])
    again = SharedPickle.__new__(SharedPickle)
    again.__dict__ |= {**parcel.__dict__, "_file": os.dup(parcel._file)}
    ours, theirs = parcel.load(), again.load()
    ours[0][0] = ours[1][0] = 1
    assert array[0] == theirs[0][0] == theirs[1][0] == 0


class Locked(Dataset):
    """A data set that holds what belongs to one process."""

    def __init__(self):
        self.samples = dataset()
        self.lock = threading.Lock()

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def with_lock(output, target):
    with LOCK:
        return F.cross_entropy(output, target)


LOCK = threading.Lock()
FILE = sys.__stderr__
generator = (number for number in range(3))


@pytest.mark.parametrize(
    ("part", "where"),
    [
        ({"loss": lambda output, target: print(output, file=FILE)}, "loss: its variable FILE is a TextIOWrapper"),
        ({"loss": lambda output, target: with_lock(LOCK, target)}, "loss: its variable LOCK is a lock"),
        ({"data": Locked()}, "data: its attribute lock is a lock"),
        ({"model": partial(lambda numbers: nn.Linear(5, 3), generator)}, "model: its argument 1 is a generator"),
        ({"optimizer": lambda parameters, numbers=generator: sgd()(parameters)}, "optimizer: its default 1 is a gen"),
    ],
)
def test_a_part_that_cannot_be_pickled_is_named_before_any_process_starts(part, where, monkeypatch):
    monkeypatch.setattr(Launcher, "start", None)
    with pytest.raises(pl.UsageError) as error:
        train(tiny_job(**part))
    assert str(error.value).startswith("job tiny cannot be sent to worker processes: " + where)
    assert "create open files, locks, generators and connections inside" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_part_that_cannot_be_pickled_is_named_in_a_comparison(tmp_path):
    with pytest.raises(pl.UsageError, match=r"data: its attribute lock is a lock .*; .* or give processes=1"):
        pl.compare(
            tiny_job(data=Locked()),
            protocols="bsp, asp",
            cluster="2*exp(mean=1)",
            stop="updates=3",
            seeds=1,
            processes=2,
            out=tmp_path / "out",
        )


def test_objects_that_contain_themselves_are_searched_once():
    ring = {"lock": None}
    ring["ring"], ring["locks"] = ring, [threading.Lock()]
    assert explain_unpicklable({"data": ring}).startswith("data: its item 'locks', its item 0 is a lock")


class ByName:
    """An object that says to be found by its name."""

    def __reduce__(self):
        return "by_name"

    def __call__(self, parameters):
        return sgd()(parameters)


def test_an_object_pickled_by_name_in_the_main_module_is_a_one_line_error(monkeypatch):
    main = ModuleType("__main__")
    main.by_name = ByName()
    main.by_name.__module__ = "__main__"
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(pl.UsageError, match=r"^by_name was pickled by its name in the main module, .* and import it$"):
        train(tiny_job(optimizer=main.by_name))


def test_a_module_that_trains_while_it_is_imported_is_refused(tmp_path, monkeypatch):
    text = """
import paceline as pl
from tiny_jobs import small_net, tiny_job

def model():
    return small_net()

job = tiny_job(model=model)
if not __import__("os").environ.get("FIRST"):
    pl.train(job, protocol="bsp", cluster="2*exp(mean=1)", stop="updates=3")
"""
    (tmp_path / "trains_on_import.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FIRST", "yes")
    pickled = SharedPickle(__import__("trains_on_import").job)
    monkeypatch.delenv("FIRST")
    monkeypatch.delitem(sys.modules, "trains_on_import")  # as in a worker process
    with pytest.raises(pl.UsageError, match=r"trains when it is imported, .* __name__ == '__main__':"):
        pickled.load()


def test_the_command_refuses_to_resume_a_notebook_run_and_names_the_python_call(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))

    def loss(output, target):
        return F.cross_entropy(output, target)

    loss.__module__ = "__main__"
    job, folder = tiny_job(loss=loss), tmp_path / "run"
    train(job, cluster="2*exp(mean=1)", out=folder)
    monkeypatch.setattr(sys, "argv", ["paceline", "train", "--resume", str(folder), "--stop", "updates=5"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "a job defined in a notebook or an interactive session, which cannot be imported" in said
    assert f"pl.train(job, ..., resume={str(folder)!r})" in said
    assert train(job, cluster="2*exp(mean=1)", stop="updates=5", resume=folder).history.totals.updates == 5


def test_a_run_of_a_script_names_the_script():
    assert main_module_of(tiny_job().__dict__.values()) == ""
    script = ModuleType("__main__")
    script.__file__ = __file__
    part = type("InScript", (), {"__module__": "__main__"})
    with patch.dict(sys.modules, {"__main__": script}):
        assert main_module_of([part]) == "the script test_pickling_by_value.py"
