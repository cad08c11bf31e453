"""Plain DDP script that `record.py` records: one rank sleeps longer in one part of each step.

Every rank prints the true seconds of its own work in each step as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

SIZE, CLASSES, BATCH = 64, 10, 16
ANSWER = "answer: "


class Sleeper:
    """Sleeps of one rank: the same in each part, with an extra one in the slow part.

    Args:
        part_s: seconds of each part.
        extra_s: seconds by part, in addition.

    Attributes:
        slept_s: seconds that the rank was asked to sleep in the current step.
        taken_s: seconds that its sleeps took in the current step.
    """

    def __init__(self, part_s: float, extra_s: dict[str, float]) -> None:
        self._part_s = part_s
        self._extra_s = extra_s
        self.taken_s = 0.0

    def sleep(self, part: str) -> None:
        """Sleep as long as a part takes."""
        begun_s = time.perf_counter()
        time.sleep(self._part_s + self._extra_s.get(part, 0.0))
        self.taken_s += time.perf_counter() - begun_s

    def step(self) -> float:
        """Return the seconds of the sleeps since the last call."""
        taken_s, self.taken_s = self.taken_s, 0.0
        return taken_s


class _SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sleeper: Sleeper) -> Tensor:
        ctx.sleeper = sleeper
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.sleeper.sleep("backward")
        return gradients[0], None


class SleepyNet(nn.Module):
    """Small network whose passes sleep."""

    def __init__(self, sleeper: Sleeper, batch_norm: bool) -> None:
        super().__init__()
        self.sleeper = sleeper
        layers: list[nn.Module] = [nn.Linear(SIZE, SIZE), nn.ReLU()]
        if batch_norm:
            layers.append(nn.BatchNorm1d(SIZE))
        self.first = nn.Sequential(*layers)
        self.last = nn.Linear(SIZE, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        self.sleeper.sleep("forward")
        hidden: Tensor = _SleepInBackward.apply(self.first(x), self.sleeper)  # type: ignore[no-untyped-call]
        logits: Tensor = self.last(hidden)
        return logits


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_slow = dist.get_rank() == settings["slow_rank"]
    sleeper = Sleeper(settings["part_s"], {settings["part"]: settings["extra_s"]} if is_slow else {})
    model = DistributedDataParallel(SleepyNet(sleeper, settings["batch_norm"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank())
    taken_s = []
    for _ in range(settings["steps"]):
        sleeper.sleep("data")
        x = torch.randn(BATCH, SIZE)
        optimizer.zero_grad()
        F.cross_entropy(model(x), x[:, :CLASSES].argmax(1)).backward()
        optimizer.step()
        taken_s.append(sleeper.step())
    print(
        f"{ANSWER}{json.dumps([dist.get_rank(), taken_s])}\n", end="", flush=True
    )  # one write, as other ranks print too
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
