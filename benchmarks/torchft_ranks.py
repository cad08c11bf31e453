"""One rank of DistributedDataParallel or of torchft, which sleeps for a gradient; see `torchft_step.py`.

Called with the contender, the rank, the address of the lighthouse or of the store, the number of steps, the
seconds of a gradient, and the step before which this rank dies, 0 for none. Prints each step with the number of
replicas that took part and its seconds as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

RANKS = 4
WIDTH = 27  # hidden units: about as many parameters as the CNN of papers/ddp


def main() -> None:
    contender, rank, address, steps, gradient_s, dies_before = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = {"ddp": start_ddp, "torchft": start_torchft}[contender]
    net, wrapped, at = start(model, optimizer, int(rank), address)
    inputs, labels = torch.randn(64, 784), torch.randint(10, (64,))
    taken = []
    while at()[0] < int(steps):
        if at()[0] + 1 == int(dies_before):
            os._exit(1)
        began_s = time.monotonic()
        wrapped.zero_grad()
        time.sleep(float(gradient_s))
        F.cross_entropy(net(inputs), labels).backward()
        wrapped.step()
        taken.append((*at(), time.monotonic() - began_s))
    print(json.dumps(taken), flush=True)
    os._exit(0)  # the threads of torchft would go on


def start_ddp(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, address: str
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], tuple[int, int]]]:
    """Return model, optimizer and a function to the number of steps and ranks, of DistributedDataParallel."""
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    optimizer.register_step_post_hook(count)
    return DistributedDataParallel(model), optimizer, lambda: (steps, RANKS)


def start_torchft(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, address: str
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], tuple[int, int]]]:
    """Return the same of torchft, each rank a replica."""
    import torchft

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"replica_{rank}_",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=address,
        hostname="localhost",
    )
    net = torchft.DistributedDataParallel(manager, model)
    net.store = store  # which torchft does not keep alive
    return net, torchft.Optimizer(manager, optimizer), lambda: (manager.current_step(), manager.num_participants())


if __name__ == "__main__":
    main()
