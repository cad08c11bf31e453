"""Process group of the ranks that hold the same shard of a model, one of each replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed

from paceline.shares.survival.group import SurvivingGroup
from paceline.shares.survival.own_process_group import OwnProcessGroup, Tensors, collective_of, untraced

dist: Any = torch.distributed  # it does not export the types of all its names
OF_SCRIPT = "_of_script"  # method of collectives that FSDP does not use


@untraced
class PeerGroup(OwnProcessGroup):
    """Process group of the peers of this rank, some of which may be lost: a part of the group of all ranks.

    FSDP sums the gradients of a backward pass in it, and does nothing else there. If the script does, the next loss is
    one of all ranks: a rank that lacks such a result may have no peer that has it.

    Args:
        whole: group of all ranks.
        ranks: numbers of the peers.
        original: group of torch in whose place it is; None in a rank that comes back.
        give_up: function that lets the next loss be one of all ranks, for a reason.
    """

    def __init__(
        self, whole: SurvivingGroup, ranks: Sequence[int], original: Any, give_up: Callable[[str], object]
    ) -> None:
        super().__init__(ranks.index(whole.rank()), len(ranks))
        self._whole = whole
        self._original = original
        self._give_up = give_up

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        """Reduce tensors over the peers that live."""
        opts = opts or dist.AllreduceOptions()
        if self._whole.is_in_backward:
            return self._whole.sum_of_backward(tensors, opts, among_peers=True)
        return self._of_script("allreduce", tensors, opts)

    allgather = collective_of("allgather", OF_SCRIPT)
    _allgather_base = all_gather_single = collective_of("_allgather_base", OF_SCRIPT)
    alltoall = collective_of("alltoall", OF_SCRIPT)
    alltoall_base = all_to_all_single = collective_of("alltoall_base", OF_SCRIPT)
    barrier = collective_of("barrier", OF_SCRIPT)
    broadcast = collective_of("broadcast", OF_SCRIPT)
    gather = collective_of("gather", OF_SCRIPT)
    recv = collective_of("recv", OF_SCRIPT)
    reduce = collective_of("reduce", OF_SCRIPT)
    reduce_scatter = collective_of("reduce_scatter", OF_SCRIPT)
    _reduce_scatter_base = collective_of("_reduce_scatter_base", OF_SCRIPT)
    scatter = collective_of("scatter", OF_SCRIPT)
    send = collective_of("send", OF_SCRIPT)

    def _of_script(self, name: str, *args: Any) -> Any:
        self._give_up(f"{name} is among the ranks with one shard")
        if self._original is None or self._whole.missing:
            self._whole.refuse(name)
        return getattr(self._original, name)(*args)
