"""Trainings with Ray Train on this machine, as the driver of a job: `ray_script.py NAME FOLDER`."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import paceline as pl
from paceline.integrations.ray import PacelineConfig

FOLDER = Path(sys.argv[2])
WORKERS = 3
SEED = 1


def numbers(model):
    return [value for tensor in model.state_dict().values() for value in tensor.flatten().tolist()]


def train_job(config):
    job = pl.jobs.digits()
    result = pl.train(job, protocol="bsp", cluster=pl.Torchrun(start_timeout_s=60), stop="updates=20", seed=SEED)
    token = os.environ["PACELINE_TOKEN"]
    return {"parameters": numbers(result.model), "metrics": dict(result.metrics), "token": token}


def attach_loop(config):
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = pl.attach(model, optimizer, DataLoader(data, batch_size=8), protocol="bsp", stop="epochs=2", seed=SEED)
    for _ in run.epochs(2):
        for inputs, targets in run.loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    return {"parameters": numbers(model), "world_size": int(os.environ["WORLD_SIZE"])}


def train_slowly(config):
    (FOLDER / f"process of rank {os.environ['RANK']}").write_text(str(os.getpid()))
    cluster = pl.Torchrun(slowness=pl.Cluster(2, timing=pl.timing.ShiftedExponential(shift_s=0.1, mean_s=0.001)))
    run = {"out": str(FOLDER / "run"), "checkpoint_every": "updates=10"}
    result = pl.train(pl.jobs.digits(), protocol="bsp", cluster=cluster, stop="updates=200", seed=SEED, **run)
    return {"reason": result.reason}


def kill_when_training(rank):
    """Kill the process of a rank when the run has made 20 updates."""
    log = FOLDER / "run/events.jsonl"
    while not log.exists() or log.read_text().count('"update_made"') < 20:
        time.sleep(0.1)
    os.kill(int((FOLDER / f"process of rank {rank}").read_text()), signal.SIGKILL)


LOOPS = {"train": train_job, "attach": attach_loop, "kill 0": train_slowly, "kill 2": train_slowly}

if __name__ == "__main__":
    name = sys.argv[1]
    environment = {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ}
    ray.init(num_cpus=WORKERS + 1, include_dashboard=False, runtime_env={"env_vars": environment})
    if name.startswith("kill"):
        threading.Thread(target=kill_when_training, args=[name.partition(" ")[2]], daemon=True).start()
    trainer = TorchTrainer(
        LOOPS[name],
        train_loop_config={},
        torch_config=PacelineConfig(),
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(storage_path=str(FOLDER / "ray"), failure_config=FailureConfig(max_failures=9)),
    )
    (FOLDER / "answer.json").write_text(json.dumps(trainer.fit().return_value))
    ray.shutdown()
