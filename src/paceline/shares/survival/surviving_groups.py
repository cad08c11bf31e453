"""Process groups of a rank that lives on: of all ranks, of its replica, and of its peers with the same shard."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NoReturn

import torch
import torch.distributed
from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]

from paceline.errors import RunError
from paceline.shares.survival.group import SurvivingGroup, Training
from paceline.shares.survival.own_replica import OwnReplica
from paceline.shares.survival.peer_group import PeerGroup
from paceline.shares.survival.registered_groups import add_peers, add_replica, become_default, replace_group
from paceline.shares.survival.rejoining import goes_on_without
from paceline.shares.survival.replicas import Replicas, await_replica, tell_replicas
from paceline.shares.survival.roll_call import RollCall

MESH_DIMS = 2  # of replicas and shards
MADE_ANEW = "the script has destroyed its process group and made another one"


class SurvivingGroups:
    """Process groups of one rank, in the place of torch's from its first model on.

    Args:
        connect: function that returns a new client of the launcher's store.
        rank: number of this rank.
        ranks: number of ranks.
        training: training of this rank.
        is_one_host: whether all ranks are on one host.
        launch: name that all starts of this rank by one launcher share.

    Attributes:
        whole: process group of all ranks, from the first model on.
        replica: replica of this rank.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        rank: int,
        ranks: int,
        training: Training,
        *,
        is_one_host: bool,
        launch: str,
    ) -> None:
        self._connect = connect
        self._rank = rank
        self._ranks = ranks
        self._training = training
        self._is_one_host = is_one_host
        self._launch = launch
        self.whole: SurvivingGroup | None = None
        self.replica = OwnReplica((rank,), rank)
        self._has_ended = False

    @cached_property
    def calls(self) -> RollCall:
        """Roll call of all ranks."""
        return RollCall(self._connect, self._rank, self._ranks, is_one_host=self._is_one_host)

    def come_back(self) -> bool:
        """Return whether the other ranks go on without this one; it then begins alone, with the ranks of its replica.

        Raises:
            SystemExit: the others have ended meanwhile.
        """
        calls = self.calls
        if not goes_on_without(calls.store, self._rank, self._ranks, self._launch):
            return False
        members = calls.replicas.of(self._rank)
        self.replica = OwnReplica(members, self._rank)
        losses = await_replica(calls.store, members, self._rank, calls.others_have_ended)
        if losses is None:
            self._leave()
        self.replica.watch(self._connect(), losses)
        self._begin(is_alone=True)
        if self.replica.is_several:
            store = PrefixStore(f"paceline/replica/{members[0]}/{losses}", self._connect())
            self.replica.group = add_replica(members, self._rank, store)
        return True

    def check_others(self) -> None:
        """End the script in a rank that comes back, if the others have ended without it.

        Raises:
            SystemExit: they have.
        """
        if self.calls.others_have_ended():
            self._leave()

    def _leave(self) -> NoReturn:
        self.calls.leave()
        print("paceline: the others have ended without this rank", file=sys.stderr, flush=True)
        raise SystemExit(0)

    def begin_with_model(self, module: torch.nn.Module, group: Any) -> str:
        """Begin with a model that DDP wraps; return why this rank cannot live on, empty if it can.

        Args:
            module: the model.
            group: process group that the script gives to DDP; None for the default one.
        """
        if self._has_ended:
            return MADE_ANEW
        if group is not None and group is not self.whole:
            return "the script gives DDP a process group"
        if self.replica.is_several:
            return "it trains models in DDP and sharded ones"
        if self.whole is None:
            if not all(_is_summed_by_gloo(each.device) for each in module.parameters()):
                return "gloo does not sum the gradients"
            self._begin(is_alone=False)
        return ""

    def begin_with_shards(self, mesh: Any) -> str:
        """Begin with a module that FSDP shards over a mesh; return why this rank cannot live on, empty if it can.

        Args:
            mesh: what FSDP knows of the mesh, and of its groups.
        """
        if self._has_ended:
            return MADE_ANEW
        original = getattr(mesh, "replicate_process_group", None)
        if original is None or mesh.mesh.ndim != MESH_DIMS or mesh.replicate_mesh_dim != 0:
            return "each rank has a shard of its model"
        if isinstance(original, PeerGroup):
            return ""
        if self.whole is not None:
            return "it shards over several meshes"
        if not _is_summed_by_gloo(torch.device(mesh.mesh.device_type)):
            return "gloo does not sum the gradients"
        replicas = Replicas(tuple(map(tuple, mesh.mesh.mesh.tolist())))
        self.replica = OwnReplica(replicas.of(self._rank), self._rank)
        self.replica.group = mesh.shard_process_group
        self.calls.replicas = replicas
        if self._rank == 0:
            tell_replicas(self.calls.store, replicas)
        self.replica.watch(self._connect())
        peers = replicas.peers(self._rank)
        group = PeerGroup(self._begin(is_alone=False), peers, original, self._training.give_up)
        replace_group(original, group, peers)
        mesh.replicate_process_group = group
        return ""

    def of_mesh(self, ranks: Sequence[int]) -> Any:
        """Return the group of these ranks of a mesh, in a rank that comes back; no group without this rank.

        Raises:
            RunError: there is none.
        """
        assert self.whole is not None
        peers = self.calls.replicas.peers(self._rank)
        if self._rank not in ranks:
            return torch.distributed.GroupMember.NON_GROUP_MEMBER
        if tuple(ranks) == self.replica.members:
            return self.replica.group
        if tuple(ranks) == peers:
            return add_peers(PeerGroup(self.whole, peers, None, self._training.give_up), peers, self.calls.store)
        shown = ", ".join(map(str, ranks))
        raise RunError(f"this rank cannot come back: the script makes a group of the ranks {shown}")

    def finish(self, *, has_failed: bool) -> None:
        """Wait for the end of the other ranks, unless the script has failed, and go on without groups."""
        try:
            if self.whole is not None:
                self.whole.finish(has_failed=has_failed)
        finally:
            self.replica.end(self.calls.store)
            self._has_ended |= self.whole is not None
            self.whole = None

    def _begin(self, *, is_alone: bool) -> SurvivingGroup:
        self.whole = SurvivingGroup(
            self.calls, self._rank, self._ranks, self._training, replica=self.replica, is_alone=is_alone
        )
        become_default(self.whole, self.calls.store)
        return self.whole


def _is_summed_by_gloo(device: torch.device) -> bool:
    """Return whether gloo sums tensors of a device among all ranks."""
    backend: Any = distributed_c10d._get_default_group()._get_backend(device)
    return bool(backend.name() == "gloo")
