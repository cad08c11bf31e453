"""Watch over the objects of a user's loop that attach has read: one look per step."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.jobs.job import trainable
from paceline.jobs.local_shards import local_of
from paceline.jobs.shared_memory import why_not_apart
from paceline.server.zero_gradients import shortened
from paceline.tensors.flat_buffers import bind
from paceline.user_loop.data.frozen_parameters import FrozenParameters
from paceline.user_loop.hooks.loop_tensors import copy_version
from paceline.worker.buffer_watch import BufferWatch
from paceline.worker.registered_objects import RegisteredObjects, are_identical
from paceline.worker.write_watch import WriteWatch

_REQUIRES_GRAD = operator.attrgetter("requires_grad")


class LoopWatch:
    """Watch over the objects of a user's loop, which attach reads once.

    A look compares identities, flags and version counters with those that were read. Only a difference leads to a
    closer look, which refuses a change by name.

    Args:
        model: model of the user.
        optimizer: optimizer of the user.

    Attributes:
        parameters: trained parameters, in the model's order.
        buffers: buffers, in the model's order.
        frozen: frozen parameters.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.parameters = trainable(model)
        self.buffers = list(model.buffers())
        self.frozen = FrozenParameters(model)
        self._buffers = BufferWatch(model)
        self._model = model
        self._optimizer = optimizer
        self._trained = {each: name for name, each in model.named_parameters() if each.requires_grad}
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._writes: WriteWatch | None = None
        self._version: dict[str, Tensor] = {}  # of which the parameters are copies; empty where they are not
        self._memory: list[Tensor] = []  # that the parameters are bound to; empty where they have their own
        self._read()

    def start(self, *, debug: bool) -> None:
        """Look at the start of the run, before which parameters may be written.

        Args:
            debug: whether every later look compares elements of the parameters, see `WriteWatch`.

        Raises:
            UsageError: other parameters are trained, or two share memory.
        """
        self.look()
        if reason := why_not_apart(self._model, with_frozen=False):
            raise UsageError(reason)
        self._writes = WriteWatch({name: local_of(each) for each, name in self._trained.items()}, always=debug)
        self.frozen.start()

    def load(self, model: nn.Module) -> None:
        """Copy a version into the parameters and buffers; it stays the same until the next look."""
        assert self._writes is not None
        trained = trainable(model)
        copy_version([*trained, *model.buffers()], self.parameters, self.buffers)
        self._version = dict(zip(self._trained.values(), trained, strict=True))
        self._writes.mark()

    def keep_version(self) -> None:
        """Keep a copy of the version, whose memory the server may use again from now on."""
        self._version = {name: each.detach().clone() for name, each in self._version.items()}

    @torch.no_grad()
    def bind(self, model: nn.Module) -> None:
        """Bind the parameters to the memory of a version, in which they may be written, and copy its buffers."""
        self._memory = [parameter.data for parameter in trainable(model)]
        bind(self.parameters, self._memory)
        for ours, theirs in zip(self.buffers, model.buffers(), strict=True):
            ours.copy_(theirs)

    def unbind(self) -> None:
        """Give the parameters memory of their own, so that files of some of them do not contain the rest."""
        self._memory = []
        bind(self.parameters, [parameter.data.clone() for parameter in self.parameters])

    def look(self) -> None:
        """Compare the objects of the loop with those that were read.

        Raises:
            UsageError: other parameters are trained, a parameter was written that is a copy of a version, or a buffer
                has another shape.
        """
        is_same = self._registered.are_same() and self._flags_now() == self._flags
        if not (is_same and are_identical(self._grouped(), self._seen_groups)):
            self._check_trained()
            self._check_groups()
            self._read()
        if self._buffers.have_other_shapes():
            self.buffers = self._buffers.current()
        if self._version:
            self._check_version()
        self._move_back()

    def _read(self) -> None:
        self.buffers = self._buffers.current()  # the loop may assign others
        self._registered = RegisteredObjects(self._model, "_parameters", "_buffers", "_modules")
        self._parameters = list(self._model.parameters())
        self._flags = self._flags_now()
        self._seen_groups = self._grouped()

    def _flags_now(self) -> list[bool]:
        return list(map(_REQUIRES_GRAD, self._parameters))

    def _grouped(self) -> list[object]:
        """Return the parameters of the optimizer, with None after each group."""
        return [each for group in self._optimizer.param_groups for each in (*group["params"], None)]

    def _check_trained(self) -> None:
        trained = {each: name for name, each in self._model.named_parameters() if each.requires_grad}
        begun = [name for each, name in trained.items() if each not in self._trained]
        ended = [name for each, name in self._trained.items() if each not in trained]
        if begun or ended:
            now = "trains" if begun else "no longer trains"
            raise _refusal(f"the model {now} {shortened(begun or ended)}")

    def _check_groups(self) -> None:
        groups = [list(group["params"]) for group in self._optimizer.param_groups]
        for number, group in enumerate(groups):
            if number == len(self._groups) or not are_identical(group, self._groups[number]):
                raise _refusal(f"parameter group {number} of the optimizer has other parameters")
        if len(groups) < len(self._groups):
            raise _refusal(f"parameter group {len(groups)} of the optimizer is missing")

    def _move_back(self) -> None:
        """Move the values of parameters whose data were replaced to the memory that the ranks average."""
        for parameter, memory in zip(self.parameters, self._memory, strict=False):
            if parameter.data_ptr() != memory.data_ptr():
                memory.copy_(parameter.data)
                parameter.data = memory

    def _check_version(self) -> None:
        assert self._writes is not None
        own = {name: each for each, name in self._trained.items()}
        differ = [name for name in self._writes.changed() if not _are_equal(own[name], self._version[name])]
        if differ:
            raise UsageError(
                f"the loop or a forward pass has written to {shortened(differ)} of the model, which the next "
                "version would overwrite: write before the first batch of run.loader, restore the values before the "
                "next step, or give a protocol under which each rank steps its own parameters, as all_reduce"
            )


def _refusal(change: str) -> UsageError:
    return UsageError(
        f"{change}, unlike when pl.attach read it: make the change before pl.attach, or finish this run, make the "
        "change, and call pl.attach again"
    )


def _are_equal(parameter: nn.Parameter, version: Tensor) -> bool:
    """Return whether a parameter, which may be on another device, is a copy of a version."""
    own = local_of(parameter.detach())
    return (own.shape, own.dtype) == (version.shape, version.dtype) and torch.equal(own.to(version.device), version)
