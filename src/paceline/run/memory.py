"""Memory that a run needs, in vectors of the model's size."""

from __future__ import annotations

import psutil

from paceline.errors import UsageError
from paceline.protocols.allreduce import AllReduceConfig
from paceline.protocols.protocol import Plan
from paceline.tensors.flat_buffers import FlatLayout
from paceline.utils.wording import counted

OPTIMIZER = 2  # vectors of the state of Adam and AdamW; most optimizers have as many, or fewer


def memory_note(layout: FlatLayout, n: int) -> str:
    """Return the largest memory that the versions of n workers take, as text."""
    return (
        f"up to {n + 1} versions of {layout.nbytes / 2**20:.3g} MiB for {counted(n, 'worker')}: "
        f"{(n + 1) * layout.nbytes / 2**20:.3g} MiB"
    )


def check_memory(layout: FlatLayout, plan: Plan, n: int, *, is_compressed: bool) -> None:
    """Check that the vectors of a run fit into the memory of this host.

    Args:
        layout: layout of the model.
        plan: protocol of the run.
        n: number of workers whose vectors this host holds, >= 1.
        is_compressed: whether messages are differences to what the receiver has, of which both ends have a copy.

    Raises:
        UsageError: they do not fit.
    """
    needed = vectors_of(plan, n, is_compressed=is_compressed) * layout.nbytes
    available = psutil.virtual_memory().available
    if needed > available:
        raise UsageError(
            f"{memory_note(layout, n)}, and {needed / 2**20:.3g} MiB with gradients and the states of optimizers, but "
            f"{available / 2**20:.3g} MiB are available; use fewer workers or a smaller model"
        )


def vectors_of(plan: Plan, n: int, *, is_compressed: bool = False) -> int:
    """Return the largest number of vectors of the model's size.

    With a server: n + 1 versions, a vector for the parameters before and after the run, n gradients, their mean and the
    state of the optimizer; a protocol that waits for all workers needs one version. With local steps, each worker has a
    state of its optimizer before and after its work. Without a server, see `vectors_of_worker`.

    >>> from paceline.catalogue.parser import parse_plan
    >>> [vectors_of(parse_plan(each), n=4) for each in ("bsp", "bsp + local_steps(H=16)", "local_sgd(H=16)")]
    [13, 29, 36]
    """
    if plan.allreduce is not None:
        each = vectors_of_worker(plan.allreduce) + is_compressed
        return n * each if plan.allreduce.sums == "updates" else each
    states = 2 * OPTIMIZER if plan.local_steps is not None else 0
    return (n + 1) + n + 2 + OPTIMIZER + n * (states + is_compressed)


def vectors_of_worker(allreduce: AllReduceConfig) -> int:
    """Return the number of vectors of a worker without a server.

    They are the average, the gradient and the state of the optimizer; with sums of updates the weights and the payload
    too; and for sums that overlap steps, the steps since the last sum, and those in each sum under way, with its total.

    >>> vectors_of_worker(AllReduceConfig(sums="updates", period=8, lag=8))
    9
    """
    vectors = 2 + OPTIMIZER
    if allreduce.sums == "updates":
        vectors += 2
    if allreduce.outer is not None:
        vectors += 2
    if allreduce.separates_steps:
        interval = allreduce.period // allreduce.fragments
        under_way = 1 + (allreduce.lag - 1) // interval if allreduce.lag else 1
        vectors += 1 + 2 * -(-under_way // allreduce.fragments)
    return vectors
