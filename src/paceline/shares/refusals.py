"""Ways to train on several devices that are refused under ``paceline run``, because they would train as without it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from paceline.errors import UsageError
from paceline.shares.texts import WITHOUT
from paceline.utils.after_import import call_after_import

REFUSED_STATUS = 2  # of a wrong command, as which a launcher does not start it again
DDP = "torch.nn.parallel.distributed"
refused: list[str] = []  # sentences that have ended this process, one at most


def refuse(text: str) -> NoReturn:
    """End the script with a sentence: its own handlers of errors are not meant."""
    print(f"paceline: {text}", file=sys.stderr, flush=True)
    refused.append(text)
    raise SystemExit(REFUSED_STATUS)


@contextmanager
def refusing() -> Iterator[None]:
    """End the script with the sentence of a UsageError."""
    try:
        yield
    except UsageError as error:
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


def refuse_others() -> None:
    """Replace what starts such a training by a sentence."""
    one = "wrap the model in DistributedDataParallel"
    for module, path, advice in (
        ("torch.nn.parallel.data_parallel", "DataParallel.__init__", f"{one}, {WITHOUT}"),
        (
            DDP,
            "DistributedDataParallel.join",
            f"all ranks have the same number of batches here: leave it out, {WITHOUT}",
        ),
        (DDP, "DistributedDataParallel.register_comm_hook", f"leave the hook out, {WITHOUT}"),
        (DDP, "DistributedDataParallel._register_builtin_comm_hook", f"leave the hook out, {WITHOUT}"),
        ("torch.multiprocessing", "spawn", "the ranks are started already: call the function itself"),
        ("torch.distributed.pipelining", "PipelineStage.__init__", WITHOUT.removeprefix("or ")),
        ("deepspeed", "initialize", WITHOUT.removeprefix("or ")),
        ("horovod.torch", "init", WITHOUT.removeprefix("or ")),
    ):
        call_after_import(module, _replacing(module, path, advice))


def _replacing(module: str, path: str, advice: str) -> Callable[[], None]:
    def replace() -> None:
        *owners, name = path.split(".")
        owner: Any = sys.modules[module]
        for each in owners:
            owner = getattr(owner, each)
        original = getattr(owner, name)

        @wraps(original)
        def refused(*args: Any, **kwargs: Any) -> Any:
            refuse(f"{path.removesuffix('.__init__')} is not balanced: {advice}")

        setattr(owner, name, refused)

    return replace
