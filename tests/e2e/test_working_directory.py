"""Files in the working directory with names of modules of Python, and a long folder for temporary files."""

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
RANK = ["--standalone", "--nproc-per-node", "1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "launcher", "stopped_by"), [(TRAIN, "python", "updates"), (ATTACH, "torchrun", "epochs")]
)
@pytest.mark.parametrize("hidden", ["random", "queue", "signal"])
def test_files_with_names_of_modules_hide_none_of_them(script, launcher, stopped_by, hidden, tmp_path):
    (tmp_path / f"{hidden}.py").write_text("raise ImportError")
    scripts, temporary = tmp_path / "scripts", tmp_path / ("long" * 20)
    for folder in (scripts, temporary):
        folder.mkdir()
    (scripts / "train.py").write_text(script)
    options = RANK if launcher == "torchrun" else []
    ended = subprocess.run(
        [Path(sys.executable).with_name(launcher), *options, "scripts/train.py"],
        cwd=tmp_path,
        env={**environment(), "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"ANSWER {stopped_by}" in ended.stdout, ended.stderr
