"""Policies of a step: where the optimizer of an attached loop steps, and what becomes of its state meanwhile."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.errors import RunError
from paceline.user_loop.hooks.optimizer_modes import OptimizerModes
from paceline.user_loop.server.optimizer_state import load_named_state
from paceline.user_loop.several_optimizers import parts_of
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)
ReadState = Callable[[], dict[str, Tensor]]


class StepPolicy(ABC):
    """Policy of the steps of a run.

    Attributes:
        leader: name of the process that ends the run.
        are_here: whether the optimizer of each rank steps, with the gradient that its worker gives it.
        are_common: whether all ranks make the same steps.
    """

    leader: str
    are_here: bool
    are_common: bool

    @abstractmethod
    def start(self, read_state: ReadState | None) -> None:
        """Begin the run, whose server has a copy of the state if there is one.

        Args:
            read_state: returns the state of the server's optimizer, as of `named_state`; None if it is not beside this
                rank.
        """

    @abstractmethod
    def end(self) -> None:
        """Note that this rank takes no further part."""

    @abstractmethod
    def take_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the last state of the server, if it is that of the user's optimizer."""

    @abstractmethod
    def close(self) -> None:
        """Leave the optimizer to the user."""

    @abstractmethod
    def release(self) -> None:
        """Remove what a closed run has left on the optimizer, before another run of it."""


class ServerSteps(StepPolicy):
    """Steps of the server, or of a copy of the optimizer at each rank, which has the state during the run.

    `state_dict()` has the state of the copy. With a server that is so at rank 0; on the other ranks it has none.

    Args:
        optimizer: optimizer of the user.
        model: model of the user.
        read_copy: returns the state of the copy at this rank; None with a server.
        has_shards: whether the state is at several servers until the run ends.
    """

    leader = "the coordinator"
    are_here = False
    are_common = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        read_copy: ReadState | None = None,
        *,
        has_shards: bool = False,
    ) -> None:
        self._has_shards = has_shards
        self._optimizer = optimizer
        self._model = model
        self._read_copy = read_copy
        self._read_state: ReadState | None = None
        self._modes: list[OptimizerModes] = []
        self._on_saves: list[RemovableHandle] = []
        self._on_loads: list[RemovableHandle] = []

    def start(self, read_state: ReadState | None) -> None:
        """Free the state here, which has been sent."""
        self._read_state = self._read_copy or (None if self._has_shards else read_state)
        self._optimizer.state.clear()
        for each in parts_of(self._optimizer):
            self._modes.append(OptimizerModes(each, self._optimizer, self._model, self._read_state))
            self._on_saves.append(each.register_state_dict_pre_hook(self._on_save))
            self._on_loads.append(each.register_load_state_dict_pre_hook(self._on_load))

    def end(self) -> None:
        """Do nothing: the server has the state until the run has ended for all ranks."""

    def take_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the last state of the server."""
        self.close()
        load_named_state(self._optimizer, self._model, state)

    def close(self) -> None:
        """Leave the optimizer to the user, with the state of a copy.

        Without one, `state_dict()` on another rank than 0 still warns that there is no state.
        """
        if self._read_state is not None:
            for each in self._modes:
                each.close()
        if self._read_copy is not None and self._on_saves:
            load_named_state(self._optimizer, self._model, self._read_copy())
        for hook in [*self._on_loads, *(self._on_saves if self._read_state is not None else [])]:
            hook.remove()

    def release(self) -> None:
        """Warn no more: the next run does."""
        for each in self._modes:
            each.close()
        for hook in [*self._on_loads, *self._on_saves]:
            hook.remove()

    def _on_save(self, _: torch.optim.Optimizer) -> None:
        if self._read_state is not None:
            load_named_state(self._optimizer, self._model, self._read_state())
        elif not self._optimizer.state:
            at_the_end = "with several shards rank 0 has it after the end of the run"
            where = at_the_end if self._has_shards else "that of rank 0 has the server's"
            LOG.warning("state_dict() of the optimizer has no state on this rank: %s", where)

    def _on_load(self, *_: object) -> None:
        raise RunError(
            "optimizer.load_state_dict() during the run, when a copy of it has the state: load it before the first "
            "batch of run.loader"
        )


class RankSteps(StepPolicy):
    """Steps of each rank, of which the server gets the change that several steps make.

    The worker restores the state of this rank before each work, so that the loop may not load one.

    Args:
        optimizer: optimizer of the user.
    """

    leader = "the coordinator"
    are_here = True
    are_common = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._hooks: list[RemovableHandle] = []

    def start(self, read_state: ReadState | None) -> None:
        """Keep the state at this rank."""
        loop = threading.get_ident()

        def on_load(*_: object) -> None:
            if threading.get_ident() == loop:
                raise RunError(
                    "optimizer.load_state_dict() during the run, whose next work begins with the state after the last "
                    "accepted one: load it before the first batch of run.loader"
                )

        self._hooks = [self._optimizer.register_load_state_dict_pre_hook(on_load)]

    def end(self) -> None:
        """Let the loop load a state again."""
        for hook in self._hooks:
            hook.remove()

    def take_state(self, state: Mapping[str, Tensor]) -> None:
        """Keep the state of this rank; the server has another optimizer."""

    def close(self) -> None:
        """Leave the optimizer to the user."""
        self.end()

    def release(self) -> None:
        """Do nothing: nothing is left."""


class CommonSteps(StepPolicy):
    """Steps that all ranks make together, without a server."""

    leader = "rank 0"
    are_here = True
    are_common = True

    def start(self, read_state: ReadState | None) -> None:
        """Do nothing: each rank has the state of its own optimizer."""

    def end(self) -> None:
        """Do nothing, as `start`."""

    def take_state(self, state: Mapping[str, Tensor]) -> None:
        """Do nothing, as `start`."""

    def close(self) -> None:
        """Do nothing, as `start`."""

    def release(self) -> None:
        """Do nothing, as `start`."""
