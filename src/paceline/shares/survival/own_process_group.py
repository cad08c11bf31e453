"""Process group of torch in Python: what torch asks of it beside its collectives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch._compile import _disable_dynamo

dist: Any = torch.distributed  # it does not export the types of all its names
Tensors = Sequence[Any]


def untraced(group: type) -> type:
    """Return a process group that torch.compile does not trace: DDP calls it within a compiled forward pass."""
    for name, method in list(vars(group).items()):
        if inspect.isfunction(method) and name != "__init__" and hasattr(dist.ProcessGroup, name):
            setattr(group, name, _disable_dynamo(method))
    return group


def collective_of(name: str, carry_out: str) -> Callable[..., Any]:
    """Return a collective that a method carries out, which gets its name too.

    Args:
        name: name of the collective in a group of torch.
        carry_out: name of the method.
    """

    def collective(self: Any, *args: Any) -> Any:
        return getattr(self, carry_out)(name, *args)

    return collective


@untraced
class OwnProcessGroup(dist.ProcessGroup):  # type: ignore[misc]  # torch does not export its type
    """Process group without a backend of torch.

    Args:
        rank: place of this rank in it.
        size: number of ranks.

    Attributes:
        name: name under which torch finds it.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._place = rank, size
        self.name = ""

    def size(self) -> int:
        """Return the number of ranks, lost ones too."""
        return self._place[1]

    def rank(self) -> int:
        """Return the place of this rank among them."""
        return self._place[0]

    def getBackendName(self) -> str:  # noqa: N802  # of torch
        """Return a name that torch does not know: for gloo it would look for the C++ object of the backend."""
        return "survivor"

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        """Wait for the other ranks."""
        self.barrier()

    @property
    def group_name(self) -> str:
        """Name of the group; torch has that of a backend alone."""
        return self.name


def finished(tensors: Tensors) -> Any:
    """Return the work of a collective that has ended with these tensors."""
    future: Any = torch.futures.Future()
    future.set_result(list(tensors))
    return _create_work_from_future(future)


def copy(source: Tensors, target: Tensors) -> None:
    """Copy tensors to others."""
    with torch.no_grad():
        for each, value in zip(target, source, strict=True):
            each.copy_(value)


def flat(tensors: Any) -> Iterator[torch.Tensor]:
    """Return the tensors of a collective's argument, which may be lists of lists."""
    if isinstance(tensors, torch.Tensor):
        yield tensors
    else:
        for each in tensors:
            yield from flat(each)


def take_own(outputs: list[torch.Tensor], inputs: list[torch.Tensor], rank: int, ranks: int) -> None:
    """Fill the outputs of a collective as if all ranks had this rank's inputs."""
    for place, each in enumerate(outputs):
        given = inputs[place if len(inputs) == len(outputs) else rank if len(inputs) == ranks else 0]
        if each.numel() == given.numel():
            each.copy_(given.view_as(each))
        elif each.numel() > given.numel():
            each.view(ranks, -1).copy_(given.view(1, -1))
        else:
            each.copy_(given.view(ranks, -1)[rank].view_as(each))
