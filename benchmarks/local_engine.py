"""Updates per second without computation in the workers: paceline's local engine and three peers on one machine.

Four workers, synchronous SGD, one flat float32 vector of parameters. The time that remains is the overhead of a
framework: moving gradients and parameters, adding, the optimizer step, and waking processes.

- `paceline`: BSP with four worker processes.
- `ray`: the synchronous parameter server of Ray's documentation ("Parameter Server" among its examples).
- `ray_wait`: the same, collecting the K gradients with `ray.wait` one by one, as its asynchronous form does.
- `ray_numpy`: the synchronous form with the weights sent as a NumPy array, which Ray passes without copying.
- `gloo_server`: a server process and isend/irecv over torch.distributed, every receive posted beforehand.
- `all_reduce`: no server; gloo sums the gradients, and each process takes the optimizer step itself.

Each measurement is a new program, so that none inherits threads or memory from another.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.utils.data import TensorDataset

from common import options, ratios, report, spread

WORKERS = 4
LR = 1e-3
BARS = {"ray": 8.0, "ray_wait": 8.0, "gloo_server": 8.0, "all_reduce": 2.5}
UPDATES = {"paceline": 100, "ray": 12, "ray_wait": 12, "ray_numpy": 12, "gloo_server": 25, "all_reduce": 40}
ANSWER = "updates per second: "


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--parameters", type=int, default=11_700_000)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each process (default 1)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the numbers of timed updates")
    parser.add_argument("--contenders", nargs="+", choices=list(UPDATES), default=list(UPDATES))
    parser.add_argument("--only", choices=list(UPDATES), help=argparse.SUPPRESS)
    args = parser.parse_args()

    if args.only:
        updates = max(2, round(UPDATES[args.only] * args.scale))
        print(f"{ANSWER}{CONTENDERS[args.only](args.parameters, updates, args.threads)}")
        return
    measured: dict[str, list[float]] = {name: [] for name in args.contenders}
    for _ in range(args.rounds):
        for name in args.contenders:
            measured[name].append(in_fresh_program(name, args))
    results: dict[str, Any] = {name: {"updates_per_s": spread(values)} for name, values in measured.items()}
    for name in measured.keys() & BARS.keys() if "paceline" in measured else ():
        ratio = ratios(measured["paceline"], measured[name])
        results[name]["paceline_is_faster_by"] = {
            **ratio,
            "bar": BARS[name],
            "meets_bar": ratio["median"] >= BARS[name],
        }
    report("local_engine", args, {"bar": f"median of the ratios round by round at least {BARS}", **results}, "ray")


def in_fresh_program(name: str, args: argparse.Namespace) -> float:
    command = [sys.executable, __file__, "--only", name]
    for option in ("parameters", "threads", "scale"):
        command += [f"--{option}", str(getattr(args, option))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(next(line for line in done.stdout.splitlines() if line.startswith(ANSWER)).removeprefix(ANSWER))


def warm_up(updates: int) -> int:
    """Return the number of updates before the timed ones."""
    return max(3, updates // 5)


def written(parameters: int, value: float) -> Tensor:
    """Return a vector with all pages written: pages never written would all share one page of zeros."""
    return torch.empty(parameters).fill_(value)


# --- paceline ---------------------------------------------------------------------------------------------


class Idle(nn.Module):
    """Model with nearly all parameters in one vector that the loss does not depend on."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(parameters - 1))
        self.used = nn.Parameter(torch.zeros(1))


def touch_one_parameter(model: nn.Module, batch: object) -> Tensor:
    assert isinstance(model, Idle)
    return model.used.sum()


def run_paceline(parameters: int, updates: int, threads: int) -> float:
    import paceline as pl
    from paceline.core.records import UpdateMade

    torch.set_num_threads(threads)
    job = pl.Job(
        model=partial(Idle, parameters),
        optimizer=partial(torch.optim.SGD, lr=LR),
        data=TensorDataset(torch.zeros(1)),
        batch_size=1,
        step=touch_one_parameter,
    )
    trained = pl.train(
        job,
        protocol=pl.bsp(),
        cluster=pl.LocalCluster(WORKERS, threads=threads),
        stop=pl.Stop(updates=warm_up(updates) + updates),
    )
    times_s = [update.now_s for update in trained.history.of(UpdateMade)][-updates - 1 :]
    return updates / float(times_s[-1] - times_s[0])


# --- Ray, after the example in its documentation -----------------------------------------------------------


class RayServer:
    def __init__(self, parameters: int, threads: int, as_numpy: bool) -> None:
        torch.set_num_threads(threads)
        self.weight = nn.Parameter(written(parameters, 0.0))
        self.optimizer = torch.optim.SGD([self.weight], lr=LR)
        self.as_numpy = as_numpy

    def apply_gradients(self, *gradients: list[NDArray[np.float32]]) -> dict[str, Any]:
        summed = [np.stack(same).sum(axis=0) for same in zip(*gradients, strict=True)]
        self.optimizer.zero_grad()
        self.weight.grad = torch.from_numpy(summed[0])
        self.optimizer.step()
        return self.get_weights()

    def get_weights(self) -> dict[str, Any]:
        weight = self.weight.detach()
        return {"weight": weight.numpy() if self.as_numpy else weight}


class RayWorker:
    """Worker that receives the weights and sends a prepared gradient; the example's copy into a model is left out."""

    def __init__(self, parameters: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self.gradient = written(parameters, 1e-3).numpy()

    def compute_gradients(self, weights: dict[str, Any]) -> list[NDArray[np.float32]]:
        return [self.gradient]


def run_ray(parameters: int, updates: int, threads: int, *, as_numpy: bool = False, wait: bool = False) -> float:
    import ray

    ray.init(
        num_cpus=WORKERS + 1,
        object_store_memory=max(2**27, 40 * 4 * parameters),
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    server = ray.remote(RayServer).remote(parameters, threads, as_numpy)
    workers = [ray.remote(RayWorker).remote(parameters, threads) for _ in range(WORKERS)]
    weights = server.get_weights.remote()
    begun = 0.0
    for update in range(warm_up(updates) + updates):
        if update == warm_up(updates):
            ray.wait([weights], fetch_local=False)
            begun = perf_counter()
        gradients = [worker.compute_gradients.remote(weights) for worker in workers]
        pending = gradients if wait else []
        while pending:
            _, pending = ray.wait(pending)
        weights = server.apply_gradients.remote(*gradients)
    ray.wait([weights], fetch_local=False)
    took_s = perf_counter() - begun
    ray.shutdown()
    return updates / took_s


# --- torch.distributed with gloo ---------------------------------------------------------------------------


def run_gloo(
    parameters: int, updates: int, threads: int, *, body: Callable[[int, int, int], float], processes: int
) -> float:
    """Run `body(rank, parameters, updates)` in processes that form a gloo group; rank 0 returns the rate."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        spawn(_gloo_process, (processes, f"{folder}/group", parameters, updates, threads, body, answers), processes)
    return float(answers.get())


def _gloo_process(
    rank: int,
    processes: int,
    file: str,
    parameters: int,
    updates: int,
    threads: int,
    body: Callable[[int, int, int], float],
    answers: Any,
) -> None:
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=processes)
    rate = body(rank, parameters, updates)
    if rank == 0:
        answers.put(rate)
    dist.barrier()
    dist.destroy_process_group()


def serve_or_work(rank: int, parameters: int, updates: int) -> float:
    """Run the server on rank 0 and a worker on each other rank."""
    return gloo_server(parameters, updates) if rank == 0 else gloo_worker(parameters, updates)


def gloo_server(parameters: int, updates: int) -> float:
    """Receive into one buffer per worker, add the gradients in order, step, and send the parameters without a copy."""
    workers = range(1, WORKERS + 1)
    weight = nn.Parameter(written(parameters, 0.0))
    optimizer = torch.optim.SGD([weight], lr=LR / WORKERS)  # the mean costs no time here
    buffers = [written(parameters, 0.0) for _ in workers]
    weight.grad = written(parameters, 0.0)
    vector = weight.detach()
    receives = [receive(buffer, worker) for buffer, worker in zip(buffers, workers, strict=True)]
    sends = [send(vector, worker) for worker in workers]
    begun = 0.0
    for update in range(warm_up(updates) + updates):
        if update == warm_up(updates):
            begun = perf_counter()
        for i, worker in enumerate(workers):
            receives[i].wait()
            if i == 0:
                weight.grad.copy_(buffers[i])
            else:
                weight.grad.add_(buffers[i])
            receives[i] = receive(buffers[i], worker)
        for sent in sends:
            sent.wait()
        optimizer.step()
        sends = [send(vector, worker) for worker in workers]
    took_s = perf_counter() - begun
    for waited_for in (*sends, *receives):
        waited_for.wait()
    return updates / took_s


def receive(buffer: Tensor, sender: int) -> dist.Work:
    return started(dist.irecv(buffer, sender))


def send(vector: Tensor, receiver: int) -> dist.Work:
    return started(dist.isend(vector, receiver))


def started(work: dist.Work | None) -> dist.Work:
    assert work is not None  # None if this process is no member of the group
    return work


def gloo_worker(parameters: int, updates: int) -> float:
    gradient, vector = written(parameters, 1e-3), written(parameters, 0.0)
    receiving = receive(vector, 0)
    for left in reversed(range(warm_up(updates) + updates + 1)):
        receiving.wait()
        if left:
            receiving = receive(vector, 0)
        send(gradient, 0).wait()
    return 0.0


def reduce_all(rank: int, parameters: int, updates: int) -> float:
    weight = nn.Parameter(written(parameters, 0.0))
    optimizer = torch.optim.SGD([weight], lr=LR / WORKERS)
    weight.grad = written(parameters, 0.0)
    begun = 0.0
    for update in range(warm_up(updates) + updates):
        if update == warm_up(updates):
            dist.barrier()
            begun = perf_counter()
        dist.all_reduce(weight.grad)
        optimizer.step()
    dist.barrier()
    return updates / (perf_counter() - begun)


CONTENDERS: dict[str, Callable[[int, int, int], float]] = {
    "paceline": run_paceline,
    "ray": run_ray,
    "ray_wait": partial(run_ray, wait=True),
    "ray_numpy": partial(run_ray, as_numpy=True),
    "gloo_server": partial(run_gloo, body=serve_or_work, processes=WORKERS + 1),
    "all_reduce": partial(run_gloo, body=reduce_all, processes=WORKERS),
}


if __name__ == "__main__":
    main()
