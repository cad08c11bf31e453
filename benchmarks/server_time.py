"""Server's time for an update against the time of the additions alone, from the same shared memory."""

from __future__ import annotations

from functools import partial
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl
from common import options, ratios, report, spread
from paceline.core.events import Accept, Apply
from paceline.processes.shared_memory import SharedMemory
from paceline.server.flat_buffers import FlatBuffers, FlatLayout
from paceline.server.parameter_server import ParameterServer
from paceline.server.version_store import VersionStore

BAR = 1.6


def main() -> None:
    parser = options(__doc__ or "", rounds=15)
    parser.add_argument("--parameters", type=int, default=11_700_000)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--updates", type=int, default=10, help="updates timed together in a round")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    model = Flat(args.parameters)
    layout = FlatLayout(model)
    server = ParameterServer(make_job(model), model, layout, per_epoch=None)
    slots = 2 * args.k + 4  # as in the local engine
    memory = SharedMemory(layout, workers=args.k, slots=slots)
    gradients = [memory.gradient(layout, worker) for worker in range(args.k)]
    for gradient in gradients:
        gradient.flat_parameters[0].normal_()
    free = iter(range(slots))
    versions = VersionStore(lambda: memory.version(layout, next(free)))
    total = torch.ones(args.parameters)

    ours = Stages()
    additions_s: list[float] = []
    for i in range(args.rounds + 1):
        measured = time_server(server, gradients, versions, first=i * args.updates, updates=args.updates)
        added_s = time_additions(total, [each.flat_parameters[0] for each in gradients], args.updates)
        if i > 0:  # the first update writes every page
            ours.add(measured)
            additions_s.append(added_s)
    memory.close()
    ratio = ratios(ours.total_s, additions_s)
    report(
        "server_time",
        args,
        {
            "bar": f"at most {BAR} times the additions alone, median of the ratios round by round, wall clock",
            "server_s": spread(ours.total_s),
            "additions_s": spread(additions_s),
            "ratio": {**ratio, "meets_bar": ratio["median"] <= BAR},
            "breakdown_s": {
                f"accumulate, {args.k} gradients": spread(ours.accumulate_s),
                "apply": spread(ours.apply_s),
                "publish": spread(ours.publish_s),
            },
        },
    )


class Flat(nn.Module):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(parameters))


class Stages:
    """Seconds per update of each stage, one value per round."""

    def __init__(self) -> None:
        self.accumulate_s: list[float] = []
        self.apply_s: list[float] = []
        self.publish_s: list[float] = []
        self.total_s: list[float] = []

    def add(self, seconds: tuple[float, float, float]) -> None:
        for stage, value in zip((self.accumulate_s, self.apply_s, self.publish_s), seconds, strict=True):
            stage.append(value)
        self.total_s.append(sum(seconds))


def make_job(model: nn.Module) -> pl.Job:
    return pl.Job(
        model=model,
        optimizer=partial(torch.optim.SGD, lr=1e-6),
        data=TensorDataset(torch.zeros(1)),
        batch_size=1,
        step=no_step,
    )


def no_step(model: nn.Module, batch: object) -> Tensor:
    raise NotImplementedError


def time_server(
    server: ParameterServer, gradients: list[FlatBuffers], versions: VersionStore, *, first: int, updates: int
) -> tuple[float, float, float]:
    """Return seconds per update in accumulate, apply and publish."""
    accumulate_s = apply_s = publish_s = 0.0
    accepted = tuple(Accept(worker, 1, 0, 1) for worker in range(len(gradients)))
    for version in range(first, first + updates):
        begun = perf_counter()
        for gradient in gradients:
            server.enqueue(gradient, samples=1)
        accumulated = perf_counter()
        server.apply(Apply(version, accepted, 1.0, ""))
        applied = perf_counter()
        server.publish(versions.publish(version))
        published = perf_counter()
        accumulate_s += accumulated - begun
        apply_s += applied - accumulated
        publish_s += published - applied
    return accumulate_s / updates, apply_s / updates, publish_s / updates


def time_additions(total: Tensor, gradients: list[Tensor], updates: int) -> float:
    """Return seconds per update of adding all gradients."""
    begun = perf_counter()
    for _ in range(updates):
        for gradient in gradients:
            total.add_(gradient)
    return (perf_counter() - begun) / updates


if __name__ == "__main__":
    main()
