"""Server's time for an update, against adding its gradients, from the same shared memory.

- `update`: all gradients have arrived; the seconds until the new version can be read. SGD with momentum. A worker still
  reads the version before, so the new one is written to other memory.
- `in place`: the same under a protocol that waits for all workers: nothing reads the version before.
- `last`: the seconds from the arrival of the last gradient, when the others are accumulated already.
- `adamw`: as `update`, against the fused AdamW of torch plus the additions, which make no version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl
from common import options, ratios, report, spread, timed
from paceline.core.events import Accept, Apply
from paceline.processes.shared_memory import SharedMemory
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout
from paceline.tensors.version_store import VersionStore

UPDATE_BAR, LAST_BAR, ADAMW_BAR = 1.1, 3.0, 1.0
MOMENTUM = partial(torch.optim.SGD, lr=1e-6, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=1e-6)


def main() -> None:
    parser = options(__doc__ or "", rounds=15)
    parser.add_argument("--parameters", type=int, default=11_700_000)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--updates", type=int, default=5, help="updates timed together in a round")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    momentum, adamw = (Server(optimizer, args.parameters, args.k) for optimizer in (MOMENTUM, ADAMW))
    total = torch.ones(args.parameters)
    fused = FusedAdamW(args.parameters)
    gradients = [gradient.flat_parameters[0] for gradient in momentum.gradients]
    cases: dict[str, Callable[[], float]] = {
        "update": partial(momentum.seconds, accumulated=0),
        "in place": partial(momentum.seconds, accumulated=0, is_read=False),
        "last": partial(momentum.seconds, accumulated=args.k - 1),
        "adamw": partial(adamw.seconds, accumulated=0),
        "fused adamw": partial(timed, partial(fused.update, gradients)),
        "addition": lambda: timed(partial(add, total, gradients)) / len(gradients),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(args.rounds + 1):
        for name, measure in cases.items():
            each_s = [measure() for _ in range(args.updates)]
            if i > 0:  # the first updates write every page
                seconds[name].append(sum(each_s) / args.updates)
    additions = [args.k * each for each in seconds["addition"]]
    compared = {
        "update, against its additions": (seconds["update"], additions, UPDATE_BAR),
        "update in place, against its additions": (seconds["in place"], additions, UPDATE_BAR),
        "last gradient, against one addition": (seconds["last"], seconds["addition"], LAST_BAR),
        "AdamW, against fused AdamW and its additions": (seconds["adamw"], seconds["fused adamw"], ADAMW_BAR),
    }
    results: dict[str, object] = {
        "bar": "median of the ratios round by round, wall clock",
        "seconds": {name: spread(each) for name, each in seconds.items()},
    }
    for name, (ours, theirs, bar) in compared.items():
        ratio = ratios(ours, theirs)
        results[name] = {**ratio, "bar": bar, "meets_bar": ratio["median"] <= bar}
    report("server_time", args, results)


class Flat(nn.Module):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(parameters))


class Server:
    """Server and its gradients and versions in shared memory, as in the local engine."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer], parameters: int, k: int) -> None:
        model = Flat(parameters)
        layout = FlatLayout(model)
        self._server = ParameterServer(make_job(model, optimizer), model, layout, per_epoch=None)
        slots = 2 * k + 4
        memory = SharedMemory(layout, workers=k, slots=slots)
        self.gradients = [memory.gradient(layout, worker) for worker in range(k)]
        for gradient in self.gradients:
            gradient.flat_parameters[0].normal_()
        self._versions = VersionStore(partial(next, self._storage(memory, layout, slots)))
        self._server.publish(self._versions.publish(0))

    @staticmethod
    def _storage(memory: SharedMemory, layout: FlatLayout, slots: int) -> Iterator[FlatBuffers]:
        for slot in range(slots):
            yield memory.version(layout, slot)

    def seconds(self, accumulated: int, *, is_read: bool = True) -> float:
        """Return the seconds of an update.

        Args:
            accumulated: gradients that were accumulated before, >= 0.
            is_read: whether a worker still reads the version before.
        """
        for gradient in self.gradients[:accumulated]:
            self._server.enqueue(gradient, weight=1)
            self._server.accumulate()
        accepted = tuple(Accept(worker=worker, draw=1, staleness=0, samples=1) for worker in range(len(self.gradients)))
        read = self._versions.newest
        if is_read:
            self._versions.acquire(read)
        update = Apply(version=read + 1, gradients=accepted, lr_scale=1.0, reason="")
        begun = perf_counter()
        for gradient in self.gradients[accumulated:]:
            self._server.enqueue(gradient, weight=1)
        self._server.apply(update, self._versions.publish(read + 1))
        seconds = perf_counter() - begun
        if is_read:
            self._versions.release(read)
        return seconds


class FusedAdamW:
    """Fused AdamW of torch, whose gradient is a sum."""

    def __init__(self, parameters: int) -> None:
        self._weight = nn.Parameter(torch.zeros(parameters))
        self._weight.grad = torch.zeros(parameters)
        self._optimizer = ADAMW([self._weight], fused=True)

    def update(self, gradients: list[Tensor]) -> None:
        """Add the gradients, and step."""
        assert self._weight.grad is not None
        add(self._weight.grad, gradients)
        self._optimizer.step()


def add(total: Tensor, gradients: list[Tensor]) -> None:
    for gradient in gradients:
        total.add_(gradient)


def make_job(model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> pl.Job:
    return pl.Job(model=model, optimizer=optimizer, data=TensorDataset(torch.zeros(1)), batch_size=1, step=no_step)


def no_step(model: nn.Module, batch: object) -> Tensor:
    raise NotImplementedError


if __name__ == "__main__":
    main()
