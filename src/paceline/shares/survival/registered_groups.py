"""Groups of ours in the place of torch's, where torch and scripts look for process groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed import distributed_c10d

from paceline.shares.survival.group import SurvivingGroup
from paceline.shares.survival.peer_group import PeerGroup
from paceline.shares.survival.roll_call import TIMEOUT

c10d: Any = distributed_c10d
NAME = "paceline"
DEFAULT_TAG = "default"


def become_default(group: SurvivingGroup, store: Any) -> None:
    """Put a group in the place of torch's default group, with its store; with another one, where there is none."""
    world = c10d._world
    store = store if world.default_pg is None else world.pg_map[world.default_pg][1]
    _register(group, range(group.size()), NAME, DEFAULT_TAG, store)
    c10d._update_default_pg(group)


def replace_group(original: Any, group: PeerGroup, ranks: Sequence[int]) -> None:
    """Put a group in the place of one of torch, which it takes its name from."""
    world = c10d._world
    name, tag, store = original.group_name, world.pg_to_tag[original], world.pg_map[original][1]
    for known in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        known.pop(original, None)
    for groups in world.tags_to_pg.values():
        groups[:] = [each for each in groups if each is not original]
    c10d._unregister_process_group(name)
    _register(group, ranks, name, tag, store)


def add_peers(group: PeerGroup, ranks: Sequence[int], store: Any) -> PeerGroup:
    """Add a group that torch has not made, in a rank that comes back, and return it."""
    name = f"{NAME}_peers"
    _register(group, ranks, name, f"user:{name}", store)
    return group


def add_replica(ranks: Sequence[int], rank: int, store: Any) -> Any:
    """Return a group of torch of the ranks of a replica that comes back, all of which do the same."""
    group, _ = c10d._new_process_group_helper(
        len(ranks), ranks.index(rank), list(ranks), "gloo", store, group_name=f"{NAME}_replica", timeout=TIMEOUT
    )
    c10d._world.pg_group_ranks[group] = {each: place for place, each in enumerate(ranks)}
    return group


def _register(group: Any, ranks: Sequence[int], name: str, tag: str, store: Any) -> None:
    world = c10d._world
    world.pg_map[group] = ("gloo", store)
    world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    world.pg_backend_config[group] = "cpu:gloo,cuda:gloo"
    world.pg_names[group] = name
    world.pg_to_tag[group] = tag
    world.tags_to_pg.setdefault(tag, []).append(group)
    group.name = name
    group._set_group_name(name)
    c10d._register_process_group(name, group)
