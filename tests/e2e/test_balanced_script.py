"""An unchanged script under `paceline run`: what is said, and what is refused."""

import re
import subprocess
import sys

import pytest

import paceline as pl
from paceline.recording.run_folder import SavedRun
from paceline.recording.run_stats import count
from paths import environment

pytestmark = [pytest.mark.slow]
SCRIPT = """
import itertools
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh, fsdp
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, TensorDataset

dist.init_process_group("gloo")
torch.set_num_threads(1)
mesh = device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("model", "shard"))
data = TensorDataset(torch.randn(400, 6))
loader = {loader}
model = {model}
model = {wrapped}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, (x,) in enumerate(loader):
    optimizer.zero_grad()
    out = model(x)
    loss = {loss}
    loss.backward()
    optimizer.step()
print("trained", dist.get_rank())
"""
PARTS = {
    "loader": "DataLoader(data, batch_size=8, sampler=DistributedSampler(data))",
    "model": "nn.Linear(6, 3)",
    "wrapped": "nn.parallel.DistributedDataParallel(model)",
    "loss": "out.pow(2).mean()",
}


def run(folder, *options, **changed):
    (folder / "train.py").write_text(SCRIPT.format(**{**PARTS, **changed}))
    command = [sys.executable, "-m", "paceline", "run", "--nproc-per-node", "2", *options, "train.py"]
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, check=False, timeout=100
    )


def test_a_script_is_told_what_is_taken_over_and_what_it_has_gained(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "trained" in line) == [
        "[rank 0] trained 0",
        "[rank 1] trained 1",
    ]
    assert (
        "paceline: 2 ranks share the batches of Linear by their speed: 1 to 12 samples in steps of 1 for 8 of "
        "DataLoader(TensorDataset); the loss is a mean, weighed by samples\n" in done.stderr
    )
    assert re.search(r"25 updates in 0:\d\d; with equal shares 0:\d\d \(", done.stderr)
    assert " x); paceline report runs/train-1\n" in done.stderr
    stats = count(SavedRun(tmp_path / "runs" / "train-1").history)
    assert (stats.updates, stats.samples_applied, stats.reason) == (25, 400, "the script has ended")
    assert pl.replay(tmp_path / "runs" / "train-1").is_same


def test_a_dry_run_trains_nothing(tmp_path):
    done = run(tmp_path, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "share the batches of Linear" in done.stderr
    assert "trained" not in done.stdout
    assert not (tmp_path / "runs").exists()


def test_the_folder_of_a_script_that_fails_says_why(tmp_path):
    failing = "out.pow(2).mean() / (2 if number < 5 else missing)"
    done = run(tmp_path, "--max-restarts", "0", "--out", "here", loss=failing)
    assert done.returncode == 1
    stats = count(SavedRun(tmp_path / "here").history)
    assert (stats.updates, stats.stopped_by) == (5, "failed")
    assert stats.reason == "NameError: name 'missing' is not defined"


@pytest.mark.parametrize(
    ("wrapped", "why"),
    [
        ("nn.parallel.DistributedDataParallel(model, process_group=dist.group.WORLD)", "gives DDP a process group"),
        ("__import__('torch.distributed.fsdp').distributed.fsdp.fully_shard(model)", "has a shard of its model"),
        ("nn.parallel.DistributedDataParallel(model); dist.new_group()", "makes groups of its own"),
    ],
)
def test_a_script_that_survives_no_loss_is_told_why(tmp_path, wrapped, why):
    done = run(tmp_path, wrapped=wrapped)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 2
    assert "paceline: a lost rank starts all ranks again, because " in done.stderr
    assert why in done.stderr


def test_a_script_under_another_launcher_is_its_rank(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.format(**PARTS))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", "paceline", "run", "train.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    # On a busy machine ranks of torchrun abort at their end without paceline too: 9 of 45 runs of the script alone.
    assert done.returncode == 0 or "terminate called without an active exception" in done.stderr, done.stderr
    assert "share the batches of Linear" in done.stderr
    assert done.stdout.count("trained") == 2


CYCLE = "itertools.islice(itertools.cycle(DataLoader(data, batch_size=8, sampler=DistributedSampler(data))), 60)"
OTHER_ORDER = "DataLoader(data, batch_size=8, sampler=DistributedSampler(data, seed=dist.get_rank()))"
SLOW = "(time.sleep(0.003 * len(x) * dist.get_rank()) or out).pow(2).mean()"
AHEAD = f"(dist.get_rank() == 0 and number == 5 and next(loader) and None) or {SLOW}"
BY_SAMPLES = f"optimizer.param_groups[0].update(lr=len(x) / 80) or {SLOW}"
EVALUATED = "torch.no_grad()(lambda: list(DataLoader(data, 8, sampler=DistributedSampler(data))))()"
POOL = "__import__('concurrent.futures').futures.ThreadPoolExecutor(1)"
BY_THREAD = (
    f"(lambda pool, batches: (pool.submit(next, batches).result() for _ in range(25)))({POOL}, iter({PARTS['loader']}))"
)
STREAM = """DataLoader(type("Stream", (IterableDataset,), {"__iter__": lambda self: iter(torch.randn(50, 1, 6))})())"""


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"loader": "DataLoader(data, batch_size=8, shuffle=True)"}, "does not deal its samples to 2 ranks"),
        ({"loader": STREAM}, "DataLoader(Stream) does not deal its samples"),
        ({"loader": "[(torch.randn(8, 6),)] * 9"}, "no DataLoader has handed out the batch"),
        ({"loader": BY_THREAD}, "takes its batches in another thread"),
        ({"loader": CYCLE, "loss": SLOW}, "computes batches of DataLoader(TensorDataset) again that it has kept"),
        ({"loader": f"{EVALUATED} and [(torch.randn(8, 6),)] * 9"}, "no DataLoader has handed out the batch"),
        ({"loss": BY_SAMPLES}, "the parameters of the ranks are not the same"),
        ({"loader": OTHER_ORDER}, "do not divide the same samples"),
        ({"loader": f"iter({PARTS['loader']})", "loss": AHEAD}, "do not divide the same samples"),
        ({"loss": "out.logsumexp(0).sum().exp().log()"}, "give --weigh samples"),
        ({"wrapped": "model"}, "2 ranks train without DistributedDataParallel or fully_shard"),
        ({"wrapped": "fsdp.fully_shard(model, mesh=mesh['shard'])"}, "sharded over 1 of the 2 ranks"),
        ({"wrapped": "nn.DataParallel(model)"}, "DataParallel is not balanced"),
        (
            {"wrapped": "nn.parallel.DistributedDataParallel(model, process_group=dist.new_subgroups(1)[0])"},
            "Linear is trained by groups of 1 of the 2 ranks",
        ),
    ],
)
def test_what_cannot_be_balanced_is_refused(tmp_path, changed, told):
    done = run(tmp_path, **changed)
    assert done.returncode == 2, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert "trained" not in done.stdout


def until_rank_0_ends(status):
    """Return a loss of which rank 0 ends the script at its sixth iteration."""
    return f"out.pow(2).mean() if number < 5 or dist.get_rank() else __import__('sys').exit({status})"


def test_a_rank_that_leaves_with_a_failure_is_lost(tmp_path):
    done = run(tmp_path, "--max-restarts", "0", loss=until_rank_0_ends(3))
    assert "rank 0 ended with status 3, after --max-restarts 0: the others go on without it" in done.stderr
    assert "trained 1" in done.stdout


def test_a_rank_that_comes_to_its_end_before_the_others_is_named(tmp_path):
    done = run(tmp_path, "--max-restarts", "0", loss=until_rank_0_ends(0))
    assert done.returncode == 2
    assert "[rank 1] paceline: rank 0 has come to the end of the script, and this rank still waits" in done.stderr
