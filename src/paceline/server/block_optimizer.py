"""SGD, Adam and AdamW of torch on blocks of flat vectors: an update reads and writes each vector once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from paceline.server.accumulator import MeanGradient
from paceline.server.kernels import step
from paceline.server.optimizer_rules import AdamRule, Rule, SGDRule, StepVectors
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout


class BlockOptimizer:
    """Steps of torch's SGD, Adam or AdamW on blocks of flat vectors, with the same bits as its own steps.

    While a block is in the cache, its mean gradient is computed and the parameters are stepped, in place or into the
    memory of a new version. The first step of a process is left to the optimizer itself, which makes its state; later
    the state is in views of flat vectors. A step in which other parameters have a gradient than in the one before is
    left to the optimizer too. Other optimizers, and options with other operations, are always left to themselves.

    Args:
        optimizer: optimizer of the parameters.
        parameters: parameters, in the order of the layout.
        layout: layout of the parameters.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], layout: FlatLayout
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._layout = layout
        self._written = set(range(len(parameters)))  # parameters with a gradient in the last step
        self._ranges = _ranges_of(optimizer, parameters, layout, self._written)
        self._has_stepped = False

    def step(self, mean: MeanGradient, state: FlatBuffers, new: FlatBuffers, factor: float) -> float | None:
        """Step the parameters with the mean gradient, unless the optimizer has to do that itself.

        Args:
            mean: mean gradient.
            state: current parameters.
            new: storage of the new parameters, which may be that of the current ones.
            factor: factor on the gradient, > 0.

        Returns:
            Number that is finite only if all new parameters are; None if the optimizer has to step.
        """
        are_same = mean.written == self._written
        if not are_same:
            self._written = mean.written
            self._ranges = _ranges_of(self._optimizer, self._parameters, self._layout, self._written)
        rules = self._next_rules() if self._has_stepped and are_same else None
        self._has_stepped = True
        if rules is None:
            return None
        check = 0.0
        for each, rule in zip(self._ranges, rules, strict=True):
            parameters = state.flat_parameters[each.number][each.elements]
            target = parameters if new is state else new.flat_parameters[each.number][each.elements]
            if rule is not None:
                gradient = mean.part(each.number, each.elements, factor)
                check += step(rule, StepVectors(gradient=gradient, parameters=parameters, new=target, state=each.state))
            elif new is not state:
                target.copy_(parameters)
        return check

    def _next_rules(self) -> list[Rule | None] | None:
        """Return the rule of the next step of each range, and count it; None if the optimizer has to step.

        There is no rule for parameters without a gradient, or that the optimizer does not hold: they stay as they are.
        """
        optimizer, kind = self._optimizer, _KINDS.get(type(self._optimizer))
        if kind is None or _is_hooked(optimizer):
            return None
        groups = [None if each.group is None else optimizer.param_groups[each.group] for each in self._ranges]
        for each, group in zip(self._ranges, groups, strict=True):
            if group is not None and not (
                _is_plain(group, _FLAGS[kind]) and each.gather(optimizer, _state_names(group))
            ):
                return None
        pairs = zip(self._ranges, groups, strict=True)
        return [None if group is None else each.next_rule(optimizer, group) for each, group in pairs]


@dataclass(kw_only=True)
class _Range:
    """Consecutive parameters of a flat vector in one parameter group.

    Attributes:
        number: number of the flat vector.
        elements: their range in it.
        group: number of their group; None for parameters that are not stepped.
        parameters: the parameters.
        state: flat vectors of the optimizer's state.
    """

    number: int
    elements: slice
    group: int | None
    parameters: list[nn.Parameter]
    state: list[Tensor] = field(default_factory=list)
    _views: list[tuple[Tensor, ...]] = field(default_factory=list)

    def gather(self, optimizer: torch.optim.Optimizer, names: Sequence[str]) -> bool:
        """Bring the optimizer's state into flat vectors, unless it is there; return False if it has not been made."""
        if not names:
            self.state = []
            self._views = []
            return True
        saved = [optimizer.state[parameter] for parameter in self.parameters]
        found = [tuple(each.get(name) for each in saved) for name in names]
        if len(found) == len(self._views) and all(map(_are_same, found, self._views)):
            return True
        if any(tensor is None for each in found for tensor in each) or len({_count(each) for each in saved}) > 1:
            return False
        del found
        self.state = []
        self._views = []
        for name in names:  # one after another, so that the memory of the first is free for the second
            self.state.append(torch.cat([each[name].reshape(-1) for each in saved]))
            self._views.append(_views_like(self.parameters, self.state[-1]))
            for each, view in zip(saved, self._views[-1], strict=True):
                each[name] = view
        return True

    def next_rule(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Rule:
        """Return the rule of the next step, and count it."""
        if "betas" not in group:
            return SGDRule.of(group)
        counts = [optimizer.state[parameter]["step"] for parameter in self.parameters]
        for count in counts:
            count.add_(1)
        return AdamRule.of(group, float(counts[0]), is_adamw=isinstance(optimizer, torch.optim.AdamW))


def _ranges_of(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], layout: FlatLayout, written: Container[int]
) -> list[_Range]:
    """Return the ranges of all flat vectors, each as long as possible, given the parameters with a gradient."""
    groups = {id(each): number for number, group in enumerate(optimizer.param_groups) for each in group["params"]}
    newest: dict[int, _Range] = {}
    ranges = []
    for i, (parameter, (number, elements)) in enumerate(zip(parameters, layout.parameter_ranges(), strict=True)):
        group = groups.get(id(parameter)) if i in written else None
        last = newest.get(number)
        if last is not None and last.group == group:
            last.elements = slice(last.elements.start, elements.stop)
            last.parameters.append(parameter)
        else:
            newest[number] = _Range(number=number, elements=elements, group=group, parameters=[parameter])
            ranges.append(newest[number])
    return ranges


def _views_like(parameters: Sequence[nn.Parameter], flat: Tensor) -> tuple[Tensor, ...]:
    parts = flat.split([parameter.numel() for parameter in parameters])
    return tuple(part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True))


_KINDS: Mapping[type[torch.optim.Optimizer], type[Rule]] = {
    torch.optim.SGD: SGDRule,
    torch.optim.Adam: AdamRule,
    torch.optim.AdamW: AdamRule,
}

# Options that choose other operations than those above.
_SGD_FLAGS = ("maximize", "foreach", "fused", "differentiable")
_ADAM_FLAGS = (*_SGD_FLAGS, "amsgrad", "capturable")
_FLAGS: Mapping[type[Rule], Sequence[str]] = {SGDRule: _SGD_FLAGS, AdamRule: _ADAM_FLAGS}


def _is_plain(group: Mapping[str, Any], flags: Sequence[str]) -> bool:
    """Return whether a group has none of these options, real parameters, and numbers that are not tensors."""
    numbers = (*group.values(), *group.get("betas", ()))
    return (
        not any(group[flag] for flag in flags)
        and not any(isinstance(number, Tensor) for number in numbers)
        and all(parameter.is_floating_point() for parameter in group["params"])
    )


def _is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step does more than the class of the optimizer says; torch has no public function for it."""
    own_step = vars(optimizer).get("step")
    return (
        bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        or any(map(_changes_steps, torch_optimizer._global_optimizer_pre_hooks.values()))
        or any(map(_changes_steps, torch_optimizer._global_optimizer_post_hooks.values()))
        or (own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"))  # that of a scheduler only counts
    )


def _changes_steps(hook: Callable[..., Any]) -> bool:
    return not getattr(hook, "changes_nothing", False)


def _state_names(group: Mapping[str, Any]) -> tuple[str, ...]:
    if "betas" in group:
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if group["momentum"] else ()


def _count(state: Mapping[str, Any]) -> float:
    return float(state.get("step", 0.0))


def _are_same(ones: Sequence[object], others: Sequence[object]) -> bool:
    return all(map(operator.is_, ones, others))
