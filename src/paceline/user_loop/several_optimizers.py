"""Several optimizers of a loop as one: each steps its own parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from paceline.catalogue.protocols import balanced
from paceline.core.stop import Stop
from paceline.errors import UsageError
from paceline.policies.controllers.balance import Balance
from paceline.protocols.protocol import Phase, Plan
from paceline.user_loop.hooks.loss_reader import reader_of_losses


class SeveralOptimizers(torch.optim.Optimizer):
    """Optimizers of different parameters as one, with their groups in order, and the state of each parameter.

    Args:
        optimizers: optimizers, two or more.

    Attributes:
        optimizers: the same.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # Not Optimizer.__init__, which would make groups and a state of its own.
        self.optimizers = tuple(optimizers)
        self.defaults = dict(chain.from_iterable(each.defaults.items() for each in reversed(self.optimizers)))
        self._states = _States(self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # an attribute there
        """Parameter groups of all optimizers."""
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> MutableMapping[Any, Any]:  # type: ignore[override]  # an attribute there
        """State of each parameter."""
        return self._states

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # no loss
        """Let each optimizer step of which a parameter has a gradient."""
        for each in self.optimizers:
            if any(parameter.grad is not None for parameter in parameters_of(each)):
                each.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in the form of one optimizer with all groups."""
        state: dict[int, Any] = {}
        groups = []
        for first, each in self._with_first():
            own = each.state_dict()
            state |= {first + number: value for number, value in own["state"].items()}
            groups += [{**group, "params": [first + each for each in group["params"]]} for group in own["param_groups"]]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore such a state."""
        groups = list(state_dict["param_groups"])
        for first, each in self._with_first():
            own, groups = groups[: len(each.param_groups)], groups[len(each.param_groups) :]
            count = len(list(parameters_of(each)))
            state = {number - first: value for number, value in state_dict["state"].items()}
            each.load_state_dict(
                {
                    "state": {number: value for number, value in state.items() if 0 <= number < count},
                    "param_groups": [{**group, "params": [each - first for each in group["params"]]} for group in own],
                }
            )

    def _with_first(self) -> Iterator[tuple[int, torch.optim.Optimizer]]:
        """Yield each optimizer after the number of the parameters before its own."""
        first = 0
        for each in self.optimizers:
            yield first, each
            first += len(list(parameters_of(each)))


class _States(MutableMapping[Any, Any]):
    """State of each parameter, which is in that of its optimizer."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._owners = {parameter: each for each in optimizers for parameter in parameters_of(each)}

    def __getitem__(self, parameter: Any) -> Any:
        return self._owners[parameter].state[parameter]

    def __setitem__(self, parameter: Any, value: Any) -> None:
        self._owners[parameter].state[parameter] = value

    def __delitem__(self, parameter: Any) -> None:
        del self._owners[parameter].state[parameter]

    def __contains__(self, parameter: object) -> bool:  # `[]` makes an empty state
        return any(parameter in each.state for each in self._optimizers)

    def get(self, parameter: Any, default: Any = None) -> Any:
        """Return the state of a parameter, the default if it has none."""
        states = (each.state[parameter] for each in self._optimizers if parameter in each.state)
        return next(states, default)

    def clear(self) -> None:
        """Forget the states."""
        for each in self._optimizers:
            each.state.clear()

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(each.state for each in self._optimizers)

    def __len__(self) -> int:
        return sum(len(each.state) for each in self._optimizers)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """Yield the parameters in the groups of an optimizer."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def parts_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that the loop steps: several, or this one."""
    return optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else (optimizer,)


def as_one(optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return several optimizers as one; one stays as it is.

    Raises:
        UsageError: there is none, or two hold the same parameter.
    """
    if isinstance(optimizers, torch.optim.Optimizer):
        return optimizers
    if not optimizers:
        raise UsageError("attach was given no optimizer, expected one, or a list as [opt_g, opt_d]")
    if len(optimizers) == 1:
        return optimizers[0]
    seen: dict[int, int] = {}
    for number, each in enumerate(optimizers):
        for parameter in parameters_of(each):
            if seen.setdefault(id(parameter), number) != number:
                raise UsageError(
                    f"optimizers {seen[id(parameter)]} and {number} both hold a parameter of shape "
                    f"{list(parameter.shape)}, but each update is a step of one of them: give it to one optimizer"
                )
    return SeveralOptimizers(optimizers)


def as_module(models: nn.Module | Iterable[nn.Module]) -> nn.Module:
    """Return several models as one module; one stays as it is."""
    return models if isinstance(models, nn.Module) else nn.ModuleList(models)


def check_several(plan: Plan, stop: Stop | None, accumulate: int) -> None:
    """Check that a protocol can update the parameters of several optimizers in turn.

    Args:
        plan: protocol of each phase.
        stop: conditions that end the run, None for the number of epochs.
        accumulate: batches of each step, >= 1.

    Raises:
        UsageError: its ranks step alone, its updates mix gradients of several versions, or it reads the loss.
    """
    instead = "type bsp, balanced(m=8), k_sync(k=3) or asp"
    if plan.allreduce is not None or plan.local_steps is not None:
        raise UsageError(f"{plan} with several optimizers: its ranks step alone; {instead}")
    if any(phase.protocol.max_staleness and phase.protocol.quorum != 1 for phase in plan.phases):
        raise UsageError(f"{plan} with several optimizers: its updates have gradients of several versions; {instead}")
    if reader := reader_of_losses(plan, stop or Stop(updates=1)):
        raise UsageError(f"{reader} needs one loss, but each of several optimizers has its own: {instead}, and no loss")
    if accumulate > 1:
        raise UsageError(f"accumulate={accumulate} with several optimizers: omit it; each step has one backward pass")


def with_one_lease(plan: Plan) -> Plan:
    """Return a plan in which each worker has one share in an update; other protocols stay as they are.

    >>> from paceline.catalogue.parser import parse_plan
    >>> str(with_one_lease(parse_plan("balanced(m=4)")))
    'balanced(m=4, leases=1)'
    """
    return replace(plan, phases=tuple(map(_with_one_lease, plan.phases)))


def _with_one_lease(phase: Phase) -> Phase:
    for balance in phase.controllers:
        if isinstance(balance, Balance) and balance.queue:
            one = balanced(balance.pieces, leases=1, max_share=balance.max_share)
            others = [each for each in phase.controllers if each is not balance]
            return replace(phase, protocol=one.protocol, controllers=(*one.controllers, *others), name=one.name)
    return phase
