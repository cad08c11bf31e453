"""Copy of a user's optimizer of any class, which steps the parameters of its rank."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.user_loop.server.optimizer_state import PLAIN

HOOKS = "_optimizer_"  # beginning of the names of torch's attributes for the hooks of one optimizer


def copies_of(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]:
    """Return a factory of copies of an optimizer, as a job has one.

    Args:
        optimizer: optimizer of the user; the copies have its options, without its state, its hooks and its scheduler.
        model: model of the user, whose parameters it has.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return partial(_copy, optimizer=optimizer, names=names)


def _copy(
    named_parameters: Iterable[tuple[str, nn.Parameter]], *, optimizer: torch.optim.Optimizer, names: dict[int, str]
) -> torch.optim.Optimizer:
    """Return a copy that holds other parameters of the same names in place of those of the user.

    Raises:
        UsageError: the optimizer cannot be copied.
    """
    own = dict(named_parameters)
    theirs = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    memo: dict[int, Any] = {id(each): own.get(names.get(id(each), ""), each) for each in theirs}  # frozen ones stay
    left_out = {name for name in vars(optimizer) if name.startswith(HOOKS)} | {"state", "step"}  # a scheduler's step
    try:
        parts = deepcopy({name: value for name, value in vars(optimizer).items() if name not in left_out}, memo)
    except Exception as error:
        raise UsageError(
            f"the optimizer {type(optimizer).__name__} cannot be copied, but without a server a copy of it steps on "
            f"each rank ({type(error).__name__}: {error}): give all_reduce, under which it steps itself"
        ) from error
    copied: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(copied).update(parts, state=defaultdict(dict))
    vars(copied).update({name: OrderedDict() for name in left_out if name.startswith(HOOKS)})
    trained = set(own.values())
    for group in copied.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter in trained]
    _StepWatch(copied)
    return copied


class _StepWatch:
    """Watch over the steps of a copy, whose options come from the loop and whose state has to travel.

    Args:
        optimizer: the copy.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._options: list[dict[str, Any]] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._options = _options_of(optimizer)

    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Check a step.

        Raises:
            UsageError: it has changed an option, or its state is not of tensors and numbers.
        """
        kind = type(optimizer).__name__
        for before, after in zip(self._options, _options_of(optimizer), strict=True):
            changed = sorted(name for name in after if name not in before or not _are_equal(before[name], after[name]))
            if changed:
                raise UsageError(
                    f"a step of the optimizer {kind} changes its option {changed[0]}, but those of the loop are used "
                    "on each rank: give all_reduce, under which it steps itself"
                )
        for state in optimizer.state.values():
            for key, value in state.items():
                if value is not None and not isinstance(value, torch.Tensor | PLAIN):
                    raise UsageError(
                        f"{key} in the state of the optimizer {kind} is of type {type(value).__name__}, expected a "
                        "tensor or a number: give all_reduce, under which it steps itself"
                    )


def _options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _are_equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one is other or one == other
