"""Working directories: files with names of modules of Python, a name that is not UTF-8, and a long temporary folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paths import environment

TRAIN = """
import paceline as pl
result = pl.train(pl.jobs.digits(), protocol="bsp", cluster=pl.LocalCluster(2), stop="updates=2", progress=False)
print("ANSWER", result.stopped_by)
"""
ATTACH = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import paceline as pl
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = pl.attach(model, optimizer, DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2), protocol="bsp")
for _ in run.epochs(1):
    for (x,) in run.loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
print("ANSWER", run.stopped_by)
"""
SCRIPT = "scripts/train.py"
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "1"]
CLUSTER = ["--cluster", "torchrun", "--protocol", "bsp", "--stop", "updates=2", "--out", "run"]
MODULE = ["paceline", "run", "--nproc-per-node", "1", "-m", "paceline", "train", "digits", *CLUSTER]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "command", "answer"),
    [
        (TRAIN, ["python", SCRIPT], "ANSWER updates"),
        (ATTACH, [*TORCHRUN, SCRIPT], "ANSWER epochs"),
        ("", MODULE, "updates          2"),
    ],
)
def test_files_with_names_of_modules_hide_none_of_them(script, command, answer, tmp_path):
    for name in sys.stdlib_module_names:
        (tmp_path / f"{name}.py").write_text("raise ImportError")
    temporary = tmp_path / ("long" * 20)
    for folder in (tmp_path / "scripts", temporary):
        folder.mkdir()
    (tmp_path / SCRIPT).write_text(script)
    ended = subprocess.run(
        [Path(sys.executable).with_name(command[0]), *command[1:]],
        cwd=tmp_path,
        env={**environment(), "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer in ended.stdout, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("protocol", "launcher"), [("bsp", ["torchrun"]), ("all_reduce", ["paceline", "run"])])
def test_a_run_is_recorded_in_a_folder_whose_name_is_not_utf_8(protocol, launcher, tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\351")
    folder.mkdir()
    script = ATTACH.replace('protocol="bsp"', f'protocol="{protocol}", out="run"')
    (folder / "train.py").write_text(script)
    command = [Path(sys.executable).with_name(launcher[0]), *launcher[1:], "--nproc-per-node", "2", "train.py"]
    ended = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert ended.stdout.count("ANSWER epochs") == 2, ended.stderr
    assert (folder / "run" / "model.safetensors").exists()
