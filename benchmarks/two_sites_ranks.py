"""One rank of a job that `two_sites.py` measures: paceline, DistributedDataParallel, torchft or bare gloo.

Called with the name of a contender and its settings as JSON; every rank prints its answer as JSON. A rank computes its
gradients, and sleeps for the rest of their seconds.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from distributed_ranks import ANSWER
from namespaces import DEVICE
from paceline.core.records import UpdateMade, VersionEvaluated
from paceline.worker.data_loader import MinibatchLoader
from paceline.worker.torch_utils import build_model

sys.path.append(str(Path(__file__).parents[1]))
from papers.ddp.real import Sleeping, Snapshots
from papers.gpt import gpt

BATCH = 8  # samples
COMPUTING_S = 0.05  # processor time of a gradient: 40 ms alone, more on busy cores
WARM_UP = 2
TORCHFT_TIMEOUT = timedelta(seconds=300)
TORCHFT_END_S = 5.0
BUCKET_MB = 32  # all parameters in one sum; by default torchft sums each tensor by itself: 8.6 s instead of 0.9 s
Settings = dict[str, Any]


def main() -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    contender, settings = sys.argv[1], json.loads(sys.argv[2])
    print(ANSWER + json.dumps(CONTENDERS[contender](settings)), flush=True)


def make_job(settings: Settings) -> pl.Job:
    return replace(gpt(Path()), optimizer=partial(torch.optim.AdamW, lr=settings["lr"]), batch_size=BATCH)


def sleeping(settings: Settings) -> Sleeping:
    """Return the workers, whose gradients take a constant time each."""
    speed = settings["speed"]
    return Sleeping(len(speed), pl.timing.Deterministic(settings["compute_s"]), speed=speed, computing_s=COMPUTING_S)


def measure_parts(settings: Settings) -> dict[str, float]:
    """Return the seconds of a step without communication, and of a sum of all parameters alone."""
    dist.init_process_group("gloo")
    job, n = make_job(settings), dist.get_world_size()
    loader, sleeps = MinibatchLoader(job, settings["seed"], n), sleeping(settings).round_trips(settings["seed"])
    model = build_model(job, settings["seed"])
    optimizer = job.optimizer(model.parameters())
    vector = torch.zeros(sum(each.numel() for each in model.parameters()))

    def step(number: int) -> None:
        time.sleep(sleeps.times(dist.get_rank(), number, 0.0).compute_s)
        optimizer.zero_grad()
        job.loss_of(model, loader.batch(dist.get_rank(), number, None))[0].backward()
        optimizer.step()

    parts = {"compute_s": step, "sum_s": lambda number: dist.all_reduce(vector)}
    found = {name: mean_s(part, settings["repeats"]) for name, part in parts.items()}
    dist.destroy_process_group()
    return found


def mean_s(part: Callable[[int], object], repeats: int) -> float:
    """Return the mean seconds of a part of a step, begun by all ranks together after a warm-up."""
    for number in range(1, WARM_UP + 1):
        part(number)
    dist.barrier()
    begun_s = time.monotonic()
    for number in range(WARM_UP + 1, WARM_UP + repeats + 1):
        part(number)
    return (time.monotonic() - begun_s) / repeats


def train_ddp(settings: Settings) -> dict[str, Any]:
    """Train with DDP."""
    dist.init_process_group("gloo")
    job = make_job(settings)
    model = DistributedDataParallel(build_model(job, settings["seed"]))
    answer = train_loop(settings, model, job.optimizer(model.parameters()), dist.get_rank())
    dist.destroy_process_group()
    return answer


def train_torchft(settings: Settings) -> dict[str, Any]:
    """Train with DiLoCo of torchft, each rank a replica; rank 0 starts the lighthouse too."""
    import torchft
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    rank, n, master, port = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    lighthouse = LighthouseServer(bind=f"0.0.0.0:{port}", min_replicas=int(n)) if rank == "0" else None
    job = make_job(settings)
    model = build_model(job, settings["seed"])
    optimizer = job.optimizer(model.parameters())
    outer = torch.optim.SGD(model.parameters(), **settings["outer"])

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    host = own_address(master)
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TORCHFT_TIMEOUT),
        min_replica_size=int(n),
        use_async_quorum=False,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"replica_{rank}_",
        store_addr=host,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=f"http://{master}:{port}",
        hostname=host,
        init_sync=False,  # all begin with the same parameters, and the host names are not known to each other
        timeout=TORCHFT_TIMEOUT,
        quorum_timeout=TORCHFT_TIMEOUT,
        connect_timeout=TORCHFT_TIMEOUT,
    )
    sums = {"pin_memory": False, "use_bucketization": True, "bucket_cap_mb": BUCKET_MB}
    with DiLoCo(manager, [model], optimizer, outer, sync_every=settings["H"], **sums):
        answer = train_loop(settings, model, optimizer, int(rank))
    assert manager.current_step() == settings["minibatches"] // int(n) // settings["H"], "a rank made no outer step"
    if lighthouse is not None:
        time.sleep(TORCHFT_END_S)  # other ranks may still ask it
    print(ANSWER + json.dumps(answer), flush=True)
    os._exit(0)  # the threads of torchft would go on


def own_address(master: str) -> str:
    """Return the address at which other hosts reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing
        return str(probe.getsockname()[0])


def train_loop(settings: Settings, net: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, Any]:
    """Train with an optimizer that exchanges by itself; rank 0 evaluates after the run, so that no step waits."""
    job, n = make_job(settings), int(os.environ["WORLD_SIZE"])
    loader, sleeps = MinibatchLoader(job, settings["seed"], n), sleeping(settings).round_trips(settings["seed"])
    snapshots = Snapshots(settings["evaluate_every"])
    begun_s, ends_s = time.monotonic(), []
    for number in range(1, settings["minibatches"] // n + 1):
        time.sleep(sleeps.times(rank, number, 0.0).compute_s)
        optimizer.zero_grad()
        job.loss_of(net, loader.batch(rank, number, None))[0].backward()
        optimizer.step()
        ends_s.append(time.monotonic() - begun_s)
        if rank == 0:
            snapshots.on_update(number, number * n, ends_s[-1], net.parameters())
    losses = [(each["time_s"], each["loss"]) for each in snapshots.evaluated(job, settings["seed"])]
    return {"losses": losses, "samples_per_s": BATCH * n * (len(ends_s) - 1) / (ends_s[-1] - ends_s[0])}


def train_ours(settings: Settings) -> dict[str, Any]:
    """Train with a protocol of paceline until the evaluation loss or the number of minibatches is reached."""
    address = os.environ["MASTER_ADDR"]
    cluster = pl.Torchrun(address=address, worker_at_server=True, slowness=sleeping(settings), threads=1)
    result = pl.train(
        make_job(settings),
        protocol=settings["protocol"],
        cluster=cluster,
        stop=pl.Stop(gradients=settings["minibatches"], eval_loss=settings["loss"]),
        evaluate_every=pl.plans.Duration("gradients", settings["evaluate_every"]),
        seed=settings["seed"],
        progress=False,
    )
    if not cluster.is_server:
        return {}
    losses = [(each.published_s, each.metrics["loss"]) for each in result.history.of(VersionEvaluated)]
    first, *_, last = result.history.of(UpdateMade)
    samples = BATCH * (last.workload - first.workload)
    return {"losses": losses, "samples_per_s": samples / (last.now_s - first.now_s)}


CONTENDERS: dict[str, Callable[[Settings], dict[str, Any]]] = {
    "measure_parts": measure_parts,
    "train_ddp": train_ddp,
    "train_ours": train_ours,
    "train_torchft": train_torchft,
}

if __name__ == "__main__":
    main()
