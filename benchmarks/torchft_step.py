"""Seconds of a step of torchft against DistributedDataParallel, four ranks that sleep for a gradient; and a death.

- `step`: seconds of a step. What torchft needs more is `TORCHFT_STEP_S` of `papers/ddp/settings.py`.
- `death`: the longest step of a rank that goes on when another one dies, and the step at which a new one takes part.

torchft is no dependency of paceline: `pip install torchft` first.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any

from common import options, ratios, report, spread
from torchft_ranks import RANKS

SCRIPT = Path(__file__).with_name("torchft_ranks.py")
GRADIENT_S = 0.1
STEPS, WARM_UP = 60, 10
DEATH_AT, DEATH_STEPS = 40, 300
LIMIT_S = 300
Steps = list[tuple[int, int, float]]  # number of the step, replicas and seconds


def main() -> None:
    args = options(__doc__ or "").parse_args()
    found: dict[str, list[float]] = {"ddp": [], "torchft": []}
    for _ in range(args.rounds):
        for contender, seconds in found.items():
            seconds.append(median(each[2] for each in run(contender, STEPS)[0][WARM_UP:]))
    more = [ours - ddp for ours, ddp in zip(found["torchft"], found["ddp"], strict=True)]
    step = {"seconds": {name: spread(each) for name, each in found.items()}, "more_s": spread(more)}
    results = {"step": {**step, "ratio": ratios(found["torchft"], found["ddp"])}, "death": death()}
    report("torchft_step", args, results, "torchft")


def run(contender: str, steps: int, dies_before: int = 0) -> list[Steps]:
    """Return the steps of each rank; the last one dies before a step, unless it is 0, and a new one is started."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=200)
    address = lighthouse.address() if contender == "torchft" else f"file://{mkdtemp()}/store"

    def start(rank: int, dies_before: int) -> subprocess.Popen[str]:
        settings = (contender, rank, address, steps, GRADIENT_S, dies_before)
        command = [sys.executable, str(SCRIPT), *map(str, settings)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    ranks = [start(rank, dies_before if rank == RANKS - 1 else 0) for rank in range(RANKS)]
    if dies_before:
        assert ranks[-1].wait(LIMIT_S) == 1
        ranks[-1] = start(RANKS - 1, 0)
    taken: list[Steps] = [json.loads(rank.communicate(timeout=LIMIT_S)[0]) for rank in ranks]
    lighthouse.shutdown()
    return taken


def death() -> dict[str, Any]:
    """Return what a death costs the others, and when the new rank takes part."""
    others, new = (taken := run("torchft", DEATH_STEPS, DEATH_AT))[0], taken[-1]
    after = [each for each in others if each[0] >= DEATH_AT]
    assert any(replicas < RANKS for _, replicas, _ in after), "no step was made without the rank that died"
    return {"longest_step_s": max(seconds for _, _, seconds in after), "new_rank_from_step": new[0][0]}


if __name__ == "__main__":
    main()
