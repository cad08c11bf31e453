"""Line at the start of an attached run: protocol, ranks, folder, and what a step of the loop is."""

from __future__ import annotations

from paceline.clusters.torchrun import Torchrun
from paceline.protocols.protocol import Plan
from paceline.recording.callbacks.progress_line import stderr_console
from paceline.run.config import RunConfig
from paceline.utils.rank_logger import rank_label
from paceline.utils.wording import counted


def start_line(
    plan: Plan,
    ranks: int,
    folder: object,
    *,
    has_server: bool = True,
    on_one_host: bool = True,
    draws_itself: bool = False,
    ranks_each: int = 1,
    unit: str = "host",
) -> str:
    """Return the line.

    Args:
        plan: protocol of each phase.
        ranks: workers of the run, >= 1.
        folder: folder of the run, None for a run without one.
        has_server: whether a server makes the steps, where the protocol can have one.
        on_one_host: whether all ranks are on one host.
        draws_itself: whether each rank draws its own data, which are dealt to no other one.
        ranks_each: ranks of a host, or of a group, that share the work of one worker, >= 1.
        unit: what they are.

    >>> from paceline.catalogue.parser import parse_plan
    >>> start_line(parse_plan("bsp"), 2, None)
    'bsp on 2 ranks, not recorded; optimizer.step() sends the gradient to the server, which makes the step'
    """
    record = "not recorded" if folder is None else f"recorded in {folder}"
    step = _step(plan, has_server=has_server)
    is_open = not on_one_host and (plan.allreduce is not None or not has_server)
    sums = "; sums between hosts are not encrypted" if is_open else ""
    data = "; each rank draws its own data, so a dropped gradient is a dropped batch" if draws_itself else ""
    workers = counted(ranks, "rank") if ranks_each == 1 else f"{counted(ranks, unit)} of {ranks_each} ranks"
    return f"{plan} on {workers}, {record}; optimizer.step() {step}{data}{sums}"


def _step(plan: Plan, *, has_server: bool) -> str:
    if plan.local_steps is not None:
        return "steps on this rank; the change of several steps goes to the server"
    if plan.allreduce is None and not has_server:
        is_stale = any(phase.protocol.max_staleness > 0 for phase in plan.phases)
        copied = ", and keeps a copy of the version that its gradient is of" if is_stale else ""
        return f"hands in the gradient; each rank steps with the sum of those that count{copied}"
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
    cluster = config.cluster
    line = start_line(
        config.plan,
        cluster.started,
        config.folder,
        has_server=cluster.has_server,
        on_one_host=cluster.ranks.local_world_size == cluster.ranks.world_size,
        draws_itself=config.job.is_iterable,
        ranks_each=cluster.place_in_worker[1],
        unit="group" if cluster.group_size > 1 else "host",
    )
    text = f"{rank_label(0)}paceline: {line}"
    stderr_console().print(text, highlight=False, markup=False, soft_wrap=True)
