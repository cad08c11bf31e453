"""What the distributed engine costs, and what it gains with a straggler, against gloo and DistributedDataParallel.

- `wire`: one worker. Seconds for the parameters to come and the gradient to go, as the engine tells (pull and push), against
  a send and a receive of as many bytes over a gloo pair.
- `premium`: four healthy workers with 100 ms of emulated compute (asleep, for two cores are not enough), BSP, against DDP.
- `payout`: the same with one worker at half speed, `k_sync(k=3)` and `k_batch_async(k=4)`; minibatches applied per s.

Each measurement is a fresh set of processes on this machine, started with torchrun's variables; peers alternate.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from functools import partial
from statistics import median
from time import perf_counter, sleep

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline as pl
from common import options, ratios, report, spread
from paceline.history import GradientArrived, UpdateMade

WORKERS = 4
COMPUTE_S = 0.1
MILLION = 1_000_000
ANSWER = "answer: "
BARS = {"wire": 1.25, "premium": 1.10, "k_sync(k=3)": 1.4, "k_batch_async(k=4)": 1.6}


def main() -> None:
    parser = options(__doc__ or "", rounds=3)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument(
        "--parts", nargs="+", choices=["wire", "premium", "payout"], default=["wire", "premium", "payout"]
    )
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print(f"{ANSWER}{answer(args.only.split(), args.updates)}")
        return
    results = {}
    if "wire" in args.parts:
        for parameters in (MILLION, 11_700_000):
            pairs = [(f"engine {parameters}", 2), (f"gloo {parameters}", 2)]
            results[f"wire of {4 * parameters / 1e6:g} MB, s"] = compared(pairs, args, BARS["wire"], most=True)
    if "premium" in args.parts:
        pairs = [("train bsp 1", WORKERS + 1), ("ddp 1", WORKERS)]
        results["premium, s per update"] = compared(pairs, args, BARS["premium"], most=True, invert=True)
    if "payout" in args.parts:
        for protocol in ("k_sync(k=3)", "k_batch_async(k=4)"):
            pairs = [(f"train {protocol} 2", WORKERS + 1), ("ddp 2", WORKERS)]
            results[f"payout of {protocol}, minibatches per s"] = compared(pairs, args, BARS[protocol], most=False)
    report("distributed", args, results)


def compared(
    pairs: list[tuple[str, int]], args: argparse.Namespace, bar: float, *, most: bool, invert: bool = False
) -> dict[str, object]:
    """Measure ours and theirs in turn; `invert` a rate of minibatches to seconds per update."""
    measured: dict[str, list[float]] = {name: [] for name, _ in pairs}
    for _ in range(args.rounds):
        for name, processes in pairs:
            value = in_fresh_processes(name, processes, args.updates)
            measured[name].append(WORKERS / value if invert else value)
    (ours, ours_s), (theirs, theirs_s) = measured.items()
    ratio = ratios(ours_s, theirs_s)
    meets = ratio["median"] <= bar if most else ratio["median"] >= bar
    return {ours: spread(ours_s), theirs: spread(theirs_s), "ratio": {**ratio, "bar": bar, "meets_bar": meets}}


def in_fresh_processes(name: str, processes: int, updates: int) -> float:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PACELINE_TOKEN": "benchmark",
    }
    command = [sys.executable, __file__, "--only", name, "--updates", str(updates)]
    started = [
        subprocess.Popen(command, env={**shared, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(processes)
    ]
    said = [process.communicate()[0] for process in started]
    return float(next(line for line in said[0].splitlines() if line.startswith(ANSWER)).removeprefix(ANSWER))


def answer(words: list[str], updates: int) -> float:
    torch.set_num_threads(1)
    match words:
        case ["engine", parameters]:
            return engine_wire_s(int(parameters), updates)
        case ["gloo", parameters]:
            return gloo_wire_s(int(parameters), updates)
        case ["train", protocol, slowness]:
            return trained_per_s(protocol, float(slowness), updates)
        case ["ddp", slowness]:
            return ddp_per_s(float(slowness), updates)
    raise AssertionError(words)


class Idle(nn.Module):
    """Nearly all parameters are in one vector that the loss depends on a little, so that its gradient is dense."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(parameters))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight.sum() * inputs.mean()


def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    value: Tensor = model(batch[0])
    return value


def idle_job(parameters: int) -> pl.Job:
    return pl.Job(
        model=partial(Idle, parameters),
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        data=TensorDataset(torch.ones(64)),
        batch_size=1,
        step=loss,
    )


def engine_wire_s(parameters: int, updates: int) -> float:
    result = pl.train(
        idle_job(parameters), protocol="bsp", cluster=pl.Torchrun(), stop=pl.Stop(updates=updates), callbacks=()
    )
    times_s = [arrival.pull_s + arrival.push_s for arrival in result.history.of(GradientArrived)]
    return median(times_s[updates // 5 :]) if times_s else 0.0


def gloo_wire_s(parameters: int, updates: int) -> float:
    dist.init_process_group("gloo")
    other = 1 - dist.get_rank()
    ours, theirs = torch.ones(parameters), torch.zeros(parameters)
    times_s = []
    for _ in range(updates):
        begun = perf_counter()
        if other:
            dist.send(ours, other)
            dist.recv(theirs, other)
        else:
            dist.recv(theirs, other)
            dist.send(ours, other)
        times_s.append(perf_counter() - begun)
    return median(times_s[updates // 5 :])


def slowed(slowness: float) -> list[float]:
    return [COMPUTE_S] * (WORKERS - 1) + [COMPUTE_S * slowness]


def trained_per_s(protocol: str, slowness: float, updates: int) -> float:
    slow = pl.Cluster(WORKERS, timing=[pl.Deterministic(each) for each in slowed(slowness)])
    cluster = pl.Torchrun(slowness=slow)
    result = pl.train(idle_job(MILLION), protocol=protocol, cluster=cluster, stop=pl.Stop(updates=updates))
    made = list(result.history.of(UpdateMade))[updates // 5 :]
    return sum(update.k for update in made[1:]) / (made[-1].now_s - made[0].now_s) if made else 0.0


def ddp_per_s(slowness: float, updates: int) -> float:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Idle(MILLION))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    compute_s = slowed(slowness)[dist.get_rank()]
    begun, warm_up = 0.0, updates // 5
    for update in range(updates):
        if update == warm_up:
            begun = perf_counter()
        optimizer.zero_grad()
        sleep(compute_s)
        model(torch.ones(1)).backward()
        optimizer.step()
    per_s = WORKERS * (updates - warm_up) / (perf_counter() - begun)
    dist.destroy_process_group()
    return per_s


if __name__ == "__main__":
    main()
