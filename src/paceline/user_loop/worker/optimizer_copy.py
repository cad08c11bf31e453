"""Copy of a user's optimizer of any class, which steps the parameters of a server, or those of its rank."""

from __future__ import annotations

import io
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.processes.shared_pickle import ValuePickler, ValueUnpickler
from paceline.server.optimizer import OWN_OPTIONS, own_options
from paceline.user_loop.server.optimizer_state import OptimizerFactory, can_travel
from paceline.user_loop.several_optimizers import as_one, parameters_of, parts_of

HOOKS = "_optimizer_"  # beginning of the names of torch's attributes for the hooks of one optimizer


def copies_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerFactory:
    """Return a factory of copies of an optimizer, as a job has one.

    Args:
        optimizer: optimizer of the user; the copies have its options, without its state, its hooks and its scheduler.
        model: model of the user, whose parameters it has.
    """
    return partial(_copies, optimizers=parts_of(optimizer), names=_names(model), sparse=_sparse(model))


def pickled_by_value(optimizer: torch.optim.Optimizer, model: nn.Module) -> bytes:
    """Return an optimizer for a child process, which makes copies of it by `copies_of_pickle`.

    Its parameters are their names. A class of the main module is pickled by value, another one by name.

    Args:
        optimizer: optimizer of the user; the copies have its options, without its state, its hooks and its scheduler.
        model: model of the user, whose parameters it has.

    Raises:
        UsageError: the optimizer cannot be pickled.
    """
    stream = io.BytesIO()
    for each in parts_of(optimizer):
        try:
            _Pickler(stream, _names(model)).dump((type(each), _attributes(each), _sparse(model)))
        except Exception as error:
            raise UsageError(
                f"the optimizer {type(each).__name__} cannot be sent to the process of the server, which steps a copy "
                f"of it ({type(error).__name__}: {error}): give a protocol that needs no server, as balanced(m=8) or "
                "bsp"
            ) from error
    return stream.getvalue()


def copies_of_pickle(content: bytes) -> OptimizerFactory:
    """Return a factory of copies of what `pickled_by_value` has returned, as a job has one."""
    return partial(_unpickle, content=content)


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _sparse(model: nn.Module) -> list[str]:
    """Return the names of the parameters whose gradients are sparse, as the modules of a model say."""
    return [
        f"{name}.weight".removeprefix(".") for name, each in model.named_modules() if getattr(each, "sparse", False)
    ]


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer but for its state, its hooks and methods that others have replaced."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("state", "step", "eval", "train") and not name.startswith(HOOKS)
    }


def _copies(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    optimizers: Sequence[torch.optim.Optimizer],
    names: dict[int, str],
    sparse: Sequence[str],
) -> torch.optim.Optimizer:
    """Return a copy that holds other parameters of the same names in place of those of the user.

    Raises:
        UsageError: an optimizer cannot be copied.
    """
    own = dict(named_parameters)
    return as_one([_assembled(type(each), _copied(each, own, names), sparse, own) for each in optimizers])


def _copied(optimizer: torch.optim.Optimizer, own: dict[str, nn.Parameter], names: dict[int, str]) -> dict[str, Any]:
    """Return copies of the attributes of an optimizer, with other parameters."""
    theirs = parameters_of(optimizer)
    memo: dict[int, Any] = {id(each): own.get(names.get(id(each), ""), each) for each in theirs}  # frozen ones stay
    try:
        return deepcopy(_attributes(optimizer), memo)
    except Exception as error:
        raise UsageError(
            f"the optimizer {type(optimizer).__name__} cannot be copied, but without a server a copy of it steps on "
            f"each rank ({type(error).__name__}: {error}): give all_reduce, under which it steps itself"
        ) from error


def _unpickle(named_parameters: Iterable[tuple[str, nn.Parameter]], *, content: bytes) -> torch.optim.Optimizer:
    """Return a copy that holds these parameters in place of those of the user."""
    own = dict(named_parameters)
    stream = io.BytesIO(content)
    optimizers = []
    while stream.tell() < len(content):
        kind, attributes, sparse = _Unpickler(stream, own).load()
        unpickled = _assembled(kind, attributes, sparse, own)
        unpickled._patch_step_function()  # for the hooks of torch, which pickling has left out
        optimizers.append(unpickled)
    return as_one(optimizers)


def _assembled(
    kind: type[torch.optim.Optimizer], attributes: dict[str, Any], sparse: Sequence[str], own: dict[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """Return an optimizer of these attributes, without frozen parameters.

    Args:
        kind: its class.
        attributes: its attributes.
        sparse: names of the parameters whose gradients its steps get as sparse ones, without the rows of zeros.
        own: trained parameters by name.
    """
    copied = object.__new__(kind)
    hooks = {name: OrderedDict[int, Any]() for name in vars(torch.optim.SGD(own.values())) if name.startswith(HOOKS)}
    vars(copied).update(attributes, state=defaultdict(dict), **hooks)
    trained = set(own.values())
    for group in copied.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter in trained]
    with_sparse = [own[name] for name in sparse if name in own]
    if with_sparse:
        copied.register_step_pre_hook(lambda *_: _make_sparse(with_sparse))
    _StepWatch(copied)
    return copied


def _make_sparse(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is not None and not parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_sparse(1)


class _Pickler(ValuePickler):
    """Pickler that leaves out the parameters of a model, and the hooks around steps.

    Args:
        stream: stream that is written.
        names: names of the parameters, by identity.
    """

    def __init__(self, stream: io.BytesIO, names: dict[int, str]) -> None:
        super().__init__(stream)
        self._names = names

    def persistent_id(self, content: object) -> str | tuple[object] | None:
        """Return the name of a parameter, and a step without hooks, which are of this process; None otherwise."""
        if isinstance(content, nn.Parameter):
            return self._names.get(id(content))
        own = _without_hooks(content) if isinstance(content, FunctionType) else content
        return None if own is content else (own,)


def _without_hooks(function: Any) -> Any:
    """Return what a step is below all wrappers that call hooks; wrappers of the user stay."""
    found, inner = function, function
    while inner is not None:
        is_hook = getattr(inner, "hooked", False) or inner.__globals__.get("__name__", "").startswith("paceline.")
        inner = getattr(inner, "__wrapped__", None)
        if is_hook and inner is not None:
            found = inner
    return found


class _Unpickler(ValueUnpickler):
    """Unpickler of what `_Pickler` has written.

    Args:
        stream: stream that is read.
        parameters: parameters by name; a frozen one has no elements.
    """

    def __init__(self, stream: io.BytesIO, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__(stream)
        self._parameters = parameters

    def persistent_load(self, left_out: str | tuple[object]) -> object:
        """Return the parameter of a name, or a step."""
        if isinstance(left_out, tuple):
            return left_out[0]
        if left_out not in self._parameters:
            return nn.Parameter(torch.empty(0), requires_grad=False)
        return self._parameters[left_out]


class _StepWatch:
    """Watch over the steps of a copy, whose options come from the loop, but for its own, and whose state has to travel.

    Args:
        optimizer: the copy.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._options: list[list[dict[str, Any]]] = []  # a step may call that of its base class, with its hooks
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._options.append(_options_of(optimizer))

    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Check a step, and note the options that it has changed, which are its own from now on.

        Raises:
            UsageError: it has changed the learning rate, or its own options or its state cannot travel.
        """
        kind = type(optimizer).__name__
        own = own_options(optimizer)
        for before, after in zip(self._options.pop(), _options_of(optimizer), strict=True):
            own |= {name for name in after if name not in before or not _are_equal(before[name], after[name])}
            if "lr" in own:
                raise UsageError(
                    f"a step of the optimizer {kind} changes its learning rate, but that of the loop is used: give "
                    "all_reduce, under which it steps itself"
                )
            for name in own & after.keys():
                if not can_travel(after[name]):
                    raise UsageError(
                        f"a step of the optimizer {kind} changes its option {name}, which is of type "
                        f"{type(after[name]).__name__}, expected tensors, numbers and plain containers of them: give "
                        "all_reduce, under which it steps itself"
                    )
        if own:
            for group in optimizer.param_groups:
                group[OWN_OPTIONS] = sorted(own)
        for state in optimizer.state.values():
            for key, value in state.items():
                if not can_travel(value):
                    raise UsageError(
                        f"{key} in the state of the optimizer {kind} is of type {type(value).__name__}, expected "
                        "tensors, numbers and plain containers of them: give all_reduce, under which it steps itself"
                    )


def _options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    left_out = ("params", OWN_OPTIONS)
    return [{name: value for name, value in group.items() if name not in left_out} for group in optimizer.param_groups]


def _are_equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one is other or one == other
