"""Places in torch where a rank is timed: the end of a backward pass's own graph, and the collectives it waits in."""

from __future__ import annotations

from collections.abc import Callable

import torch

COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object"),
    *("monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
    *("scatter", "scatter_object_list", "send"),
)  # of torch.distributed; older versions lack some


def call_at_end_of_graph(root: torch.Tensor, mark: Callable[[], None]) -> None:
    """Call a function when the next backward pass from this tensor has done its own graph.

    A hook on the root queues it when the pass begins. DDP queues its wait for the sums later, so the mark comes first.
    """
    waiting = [mark]

    def on_root(gradient: torch.Tensor) -> None:
        if waiting:  # a second pass through a graph that was kept runs the hook again
            torch.autograd.Variable._execution_engine.queue_callback(waiting.pop())

    root.register_hook(on_root)
