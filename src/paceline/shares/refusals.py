"""Ways to train on several devices that are refused under ``paceline run``, because they would train as without it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from paceline.core.events import Outcome
from paceline.errors import UsageError
from paceline.recording.why_ended import why_left
from paceline.shares.texts import WITHOUT
from paceline.utils.after_import import call_after_import

REFUSED_STATUS = 2  # of a wrong command, as which a launcher does not start it again
DDP = "torch.nn.parallel.distributed"
FSDP_GROUPS = (
    "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "torch.distributed._composable.fsdp._fsdp_param_group",
)
OWN_TRAINING = ("paceline.user_loop", "paceline.engines")  # of attached loops, and of workers
MOST_PASSES = 3  # of ranks that train without a model that is taken over
refused: list[str] = []  # sentences that have ended this process, one at most
unbalanced: list[str] = []  # why what a script has sharded cannot be balanced; it may still attach it


def refuse(text: str) -> NoReturn:
    """End the script with a sentence: its own handlers of errors are not meant."""
    print(f"paceline: {text}", file=sys.stderr, flush=True)
    refused.append(text)
    raise SystemExit(REFUSED_STATUS)


def outcome_of(error: BaseException | None) -> tuple[Outcome, str]:
    """Return how a script has ended, and the reason in one line.

    Args:
        error: error that has ended it; None without one.
    """
    if refused:
        return Outcome.FAILED, refused[0]
    return why_left(error) if error is not None else (Outcome.STOPPED, "the script has ended")


class Refusing:
    """Context that ends the script with the sentence of a UsageError."""

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the script, if there is such an error."""
        if isinstance(error, UsageError):
            refuse(str(error))


def check_group(model: torch.nn.Module, members: int) -> None:
    """Check that all ranks train a model.

    Raises:
        UsageError: some do not.
    """
    ranks = dist.get_world_size()
    if members != ranks:
        raise UsageError(
            f"{type(model).__name__} is trained by groups of {members} of the {ranks} ranks: models that are divided "
            "by tensors, layers or contexts are not balanced; train it with all ranks as one data-parallel group, "
            f"{WITHOUT}"
        )


def check_mesh(mesh: Any) -> None:
    """Check that all ranks train what FSDP shards over a mesh of devices.

    Raises:
        UsageError: some do not.
    """
    if mesh.size() != dist.get_world_size():
        raise UsageError(
            f"a module is sharded over {mesh.size()} of the {dist.get_world_size()} ranks: models that are divided by "
            f"tensors, layers or contexts are not balanced; shard it over all ranks, {WITHOUT}"
        )


class OtherTraining:
    """Training of several ranks with no model that is taken over."""

    def __init__(self) -> None:
        self._passes = 0

    def backward_began(self) -> None:
        """Note a backward pass before there is such a model.

        Raises:
            UsageError: ranks train in another way.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1 or any(name in sys.modules for name in OWN_TRAINING):
            return
        if unbalanced:
            raise UsageError(unbalanced[0])
        self._passes += 1
        if self._passes > MOST_PASSES:
            raise UsageError(
                f"{dist.get_world_size()} ranks train without DistributedDataParallel or fully_shard, so their batches "
                f"cannot be shared: wrap the model in one of them before it trains, {WITHOUT}"
            )


def refuse_others() -> None:
    """Replace what starts such a training by a sentence."""
    one, torchrun = "wrap the model in DistributedDataParallel", WITHOUT.removeprefix("or ")
    for module, path, advice in (
        ("torch.nn.parallel.data_parallel", "DataParallel.__init__", f"{one}, {WITHOUT}"),
        ("torch.nn.parallel", "data_parallel", f"{one}, {WITHOUT}"),
        (
            DDP,
            "DistributedDataParallel.join",
            f"all ranks have the same number of batches here: leave it out, {WITHOUT}",
        ),
        (DDP, "DistributedDataParallel.register_comm_hook", f"leave the hook out, {WITHOUT}"),
        (DDP, "DistributedDataParallel._register_builtin_comm_hook", f"leave the hook out, {WITHOUT}"),
        ("torch.distributed.algorithms.join", "Join.__init__", f"leave it out, {WITHOUT}"),
        ("torch.distributed.fsdp", "FullyShardedDataParallel.__init__", f"shard the model by fully_shard, {WITHOUT}"),
        ("torch.multiprocessing", "spawn", "the ranks are started already: call the function itself"),
        ("torch.multiprocessing", "start_processes", "the ranks are started already: call the function itself"),
        ("torch.distributed.pipelining", "PipelineStage.__init__", torchrun),
        ("torch.distributed.tensor.parallel", "parallelize_module", torchrun),
        ("torch.distributed.tensor.experimental", "context_parallel", torchrun),
        ("deepspeed", "initialize", torchrun),
        ("horovod.torch", "init", torchrun),
    ):
        call_after_import(module, _replacing(module, path, advice))
    for module in FSDP_GROUPS:  # of torch 2.6 and newer, and of older ones
        call_after_import(module, _checking_meshes(module))


def _replacing(module: str, path: str, advice: str) -> Callable[[], None]:
    def replace() -> None:
        *owners, name = path.split(".")
        owner: Any = sys.modules[module]
        for each in owners:
            owner = getattr(owner, each)
        original = getattr(owner, name, None)
        if original is None:  # in an older version
            return

        @wraps(original)
        def refused(*args: Any, **kwargs: Any) -> Any:
            refuse(f"{path.removesuffix('.__init__')} is not balanced: {advice}")

        setattr(owner, name, refused)

    return replace


def _checking_meshes(module: str) -> Callable[[], None]:
    def replace() -> None:
        owner = sys.modules[module].FSDPParamGroup
        original = owner.__init__

        @wraps(original)
        def init(group: Any, params: Any, modules: Any, mesh_info: Any, *args: Any, **kwargs: Any) -> None:
            try:
                check_mesh(mesh_info.mesh)
            except UsageError as error:
                unbalanced.append(str(error))
            original(group, params, modules, mesh_info, *args, **kwargs)

        owner.__init__ = init

    return replace
