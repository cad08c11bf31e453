"""Installation of what a rank does about losses: it tells the launcher of process groups, and may live through some."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from typing import Any

from paceline.clusters.launch_env import BOUND, LaunchEnv
from paceline.shares.survival.launcher_store import has_launcher_store, launcher_store
from paceline.shares.survival.surviving_training import SurvivingTraining
from paceline.utils.after_import import call_after_import

SHARDED = "torch.distributed.optim.zero_redundancy_optimizer"
SAVING = (
    ("torch", "save"),
    ("safetensors.torch", "save_file"),
    ("safetensors.torch", "save_model"),
    ("torch.distributed.checkpoint", "save"),
    ("torch.distributed.checkpoint", "async_save"),
)
ENV = (None, "env://")
MOVING = ("rename", "replace")  # of os, with which a script puts a whole file in the place of an older one
OWNERS = ("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.device_mesh")


def tell_launcher_of_groups(survival: SurvivingTraining | None) -> None:
    """Arrange that the launcher knows when this rank joins the process group of all ranks.

    A rank that comes back joins none until it is where the others are.
    """
    original: Callable[..., Any] = sys.modules[OWNERS[1]].init_process_group
    for owner in map(sys.modules.get, OWNERS):
        if getattr(owner, "init_process_group", None) is original:
            setattr(owner, "init_process_group", _telling(original, survival))  # noqa: B010  # of a module


def _telling(original: Callable[..., Any], survival: SurvivingTraining | None) -> Callable[..., Any]:
    made = 0  # groups of all ranks

    @wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        if has_launcher_store(os.environ):
            launcher_store(os.environ).set(BOUND, "1")
        if survival is not None and survival.groups.come_back():
            write_nothing(survival)
            return None
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        if made and has_launcher_store(os.environ) and not given.get("store") and given.get("init_method") in ENV:
            # Under the same keys a rank may read the address of an earlier group, which a slower one has not replaced.
            launch = LaunchEnv.from_environment(os.environ)
            given |= {"init_method": None, "rank": launch.rank, "world_size": launch.world_size}
            given["store"] = _own_keys(f"paceline/whole/{made}", given.get("timeout"))
        result = original(**given)
        made += 1
        return result

    return init_process_group


def _own_keys(prefix: str, timeout: Any) -> Any:
    """Return a client of the launcher's store, with keys under a prefix."""
    from torch.distributed import PrefixStore, default_pg_timeout  # type: ignore[attr-defined]

    store = launcher_store(os.environ)
    store.set_timeout(timeout or default_pg_timeout)
    return PrefixStore(prefix, store)


def write_nothing(survival: SurvivingTraining) -> None:
    """Let functions that save write nothing while this rank is alone: its parameters are not those of the run.

    Nor is a file that was not written moved to the place of one that was.
    """
    unwritten: set[str] = set()
    for module, path in SAVING:
        call_after_import(module, partial(_leave_out, survival, unwritten, module, path))
    for name in MOVING:
        setattr(os, name, _leaving_out_moves(getattr(os, name), unwritten))


def _leave_out(survival: SurvivingTraining, unwritten: set[str], module: str, path: str) -> None:
    original = getattr(sys.modules[module], path)

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        paths = _paths([*args[1:], *kwargs.values()])
        if survival.is_alone:
            unwritten.update(paths)
            return None
        unwritten.difference_update(paths)
        return original(*args, **kwargs)

    setattr(sys.modules[module], path, call)


def _leaving_out_moves(original: Callable[..., None], unwritten: set[str]) -> Callable[..., None]:
    @wraps(original)
    def call(src: Any, dst: Any, **kwargs: Any) -> None:
        if not unwritten & _paths([src]):
            original(src, dst, **kwargs)

    return call


def _paths(values: Iterable[Any]) -> set[str]:
    """Return the paths among values, also those of open files."""
    named = [getattr(each, "name", each) if hasattr(each, "write") else each for each in values]
    return {os.path.abspath(each) for each in named if isinstance(each, str | os.PathLike)}


def survival_of_rank(environment: Mapping[str, str], name: str) -> SurvivingTraining | None:
    """Return what lets this rank go on when others are lost; None where that is not possible.

    Args:
        environment: variables of this process.
        name: name that all starts of this rank by one launcher share.
    """
    if not has_launcher_store(environment):
        return None
    launch = LaunchEnv.from_environment(environment)
    if launch.world_size == 1:
        return None
    connect = partial(launcher_store, environment)
    survival = SurvivingTraining(connect, launch.rank, launch.world_size, is_one_host=launch.nodes == 1, launch=name)
    call_after_import(OWNERS[2], partial(_give_groups_to_meshes, survival))
    give_up = partial(_give_up_at, survival)
    give_up(OWNERS[0], "new_group", "the script makes groups of its own")
    call_after_import(SHARDED, partial(give_up, SHARDED, "ZeroRedundancyOptimizer.__init__", "it shards its optimizer"))
    return survival


def _give_groups_to_meshes(survival: SurvivingTraining) -> None:
    """Let a mesh of devices get its groups from the survival, in a rank that comes back."""
    owner: Any = sys.modules[OWNERS[2]]
    original = owner.new_group

    @wraps(original)
    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return survival.groups.of_mesh(ranks) if survival.is_alone else original(ranks, *args, **kwargs)

    owner.new_group = new_group


def _give_up_at(survival: SurvivingTraining, module: str, path: str, reason: str) -> None:
    """Give survival up when a function of torch is called."""
    owner: Any = sys.modules[module]
    *owners, name = path.split(".")
    for each in owners:
        owner = getattr(owner, each)
    original = getattr(owner, name)

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        survival.give_up(reason)
        return original(*args, **kwargs)

    setattr(owner, name, call)
