"""Line at the start of an attached run: protocol, ranks, folder, and what a step of the loop is."""

from __future__ import annotations

from paceline.clusters.torchrun import Torchrun
from paceline.protocols.protocol import Plan
from paceline.recording.callbacks.progress_line import stderr_console
from paceline.run.config import RunConfig
from paceline.utils.rank_logger import rank_label
from paceline.utils.wording import counted


def start_line(plan: Plan, ranks: int, folder: object) -> str:
    """Return the line.

    Args:
        plan: protocol of each phase.
        ranks: ranks of the run, >= 1.
        folder: folder of the run, None for a run without one.

    >>> from paceline.catalogue.parser import parse_plan
    >>> start_line(parse_plan("bsp"), 2, None)
    'bsp on 2 ranks, not recorded; optimizer.step() sends the gradient to the server, which makes the step'
    """
    record = "not recorded" if folder is None else f"recorded in {folder}"
    return f"{plan} on {counted(ranks, 'rank')}, {record}; optimizer.step() {_step(plan)}"


def _step(plan: Plan) -> str:
    if plan.local_steps is not None:
        return "steps on this rank; the change of several steps goes to the server"
    if plan.allreduce is None:
        return "sends the gradient to the server, which makes the step"
    if plan.allreduce.sums == "gradients":
        return "steps with the mean gradient of all ranks"
    return "steps with the gradient of this rank; the ranks average"


def print_start_line(config: RunConfig) -> None:
    """Print the line of a run if this is rank 0."""
    assert isinstance(config.cluster, Torchrun)
    if config.cluster.ranks.launch_rank:
        return
    text = f"{rank_label(0)}paceline: {start_line(config.plan, config.cluster.started, config.folder)}"
    stderr_console().print(text, highlight=False, markup=False, soft_wrap=True)
