"""Description of a user's training: what the server needs of it, without code and without data."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from typing import IO, Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.jobs.job import Job
from paceline.jobs.local_shards import local_of
from paceline.processes.shared_pickle import by_value, from_value
from paceline.protocols.protocol import Plan
from paceline.recording.callback import Callback
from paceline.user_loop.data.loop_data import ATTACHED, LoopData, LoopJob, UserLoop
from paceline.user_loop.run_options import RunOptions
from paceline.user_loop.server.frames import from_json, read_frame, read_tensors, to_json, write_frame, write_tensors

Groups = Sequence[tuple[Sequence[str], dict[str, Any]]]  # names and options of each


class ParameterGroup(msgspec.Struct, frozen=True):
    """Parameter group of an optimizer.

    Attributes:
        names: names of the parameters.
        options: options of the optimizer for them, as the learning rate.
    """

    names: list[str]
    options: dict[str, Any]


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """Training of a user, equal on all ranks.

    Attributes:
        modules: names of all modules, each before its children.
        parameters: names of the trainable parameters, in the model's order.
        buffers: names of the buffers, in the model's order.
        optimizer: name of the optimizer's class.
        is_of_torch: whether the class is in `torch.optim` and steps with dense gradients, so that another process makes
            it anew.
        groups: its parameter groups; empty if it steps on each rank.
        data: training data.
        clip_norm: largest norm of the mean gradient, None for no clipping.
    """

    modules: list[str]
    parameters: list[str]
    buffers: list[str]
    optimizer: str
    is_of_torch: bool
    groups: list[ParameterGroup]
    data: LoopData
    clip_norm: float | None


class ServerRun(msgspec.Struct, frozen=True, kw_only=True):
    """Run, as the process of the server receives it.

    Attributes:
        training: description of the training.
        plan: protocol of each phase, as JSON.
        stop: stop conditions as text.
        options: seed, folder, checkpoints and limits.
        cluster: arguments of `Torchrun`.
        ranks: launch settings of the server.
    """

    training: Description
    plan: list[Any]
    stop: str
    options: RunOptions
    cluster: dict[str, Any]
    ranks: dict[str, Any]


class FirstTensors(NamedTuple):
    """Tensors with which a run begins, by name.

    Attributes:
        model: trainable parameters and buffers.
        state: state of the optimizer, as of `named_state`.
    """

    model: dict[str, Tensor]
    state: dict[str, Tensor]


class SentRun(NamedTuple):
    """What the process of the server receives of a run.

    Attributes:
        run: the run.
        first: tensors with which it begins.
        optimizer: optimizer that is pickled by value; empty if it is of torch, or steps on each rank.
        own: `OwnCode` that is pickled by value; empty for none.
    """

    run: ServerRun
    first: FirstTensors
    optimizer: bytes = b""
    own: bytes = b""


class OwnCode(NamedTuple):
    """Objects of the user that the process of the server calls; they travel over its pipe alone.

    Attributes:
        plan: protocol of each phase, if it has controllers or compensators of the user; else None.
        callbacks: callbacks of the run.
    """

    plan: Plan | None = None
    callbacks: tuple[Callback, ...] = ()

    def by_value(self) -> bytes:
        """Return the objects pickled by value; empty for none.

        Raises:
            UsageError: they cannot be pickled.
        """
        if self == OwnCode():
            return b""
        try:
            return by_value(tuple(self))
        except Exception as error:
            what = "the callbacks" if self.plan is None else f"the protocol {self.plan}"
            raise UsageError(
                f"{what} cannot be sent to the process of the coordinator, which calls them "
                f"({type(error).__name__}: {error}): let them open files and connections in on_start"
            ) from error

    @classmethod
    def of(cls, content: bytes) -> OwnCode:
        """Return what `by_value` has pickled."""
        return cls(*from_value(content)) if content else cls()


def describe(loop: UserLoop, *, steps_here: bool = False) -> Description:
    """Return the description of a training.

    Args:
        loop: parts of the loop.
        steps_here: whether the optimizer steps on each rank, so that the server needs its name only.

    Raises:
        UsageError: the optimizer needs more than gradients, or holds parameters of another model.
    """
    model, optimizer = loop.model, loop.optimizer
    if not steps_here:
        _check_optimizer(optimizer)
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    groups = [] if steps_here else enumerate(optimizer.param_groups)
    return Description(
        modules=[name for name, _ in model.named_modules()],
        parameters=list(names.values()),
        buffers=[name for name, _ in model.named_buffers()],
        optimizer=type(optimizer).__name__,
        is_of_torch=_is_of_torch(optimizer),
        groups=[_describe_group(number, group, names, optimizer.defaults) for number, group in groups],
        data=LoopData.of_loop(loop),
        clip_norm=None if loop.clip_norm is None else float(loop.clip_norm),
    )


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether another process can make the optimizer from its options, which steps with dense gradients."""
    kind = type(optimizer)
    return getattr(torch.optim, kind.__name__, None) is kind and kind is not torch.optim.SparseAdam


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            f"the optimizer {kind} evaluates the loss within a step, but a copy of it steps from gradients alone: give "
            "an optimizer whose step() needs gradients only"
        )


def _describe_group(
    number: int, group: dict[str, Any], names: dict[nn.Parameter, str], known: Container[str]
) -> ParameterGroup:
    own = [parameter for parameter in group["params"] if parameter.requires_grad]
    if any(parameter not in names for parameter in own):
        raise UsageError(
            f"parameter group {number} of the optimizer holds parameters that are not in the model: give the model "
            "whose parameters the optimizer has"
        )
    return ParameterGroup([names[parameter] for parameter in own], plain_options(number, group, known))


def plain_options(number: int, group: Mapping[str, Any], known: Container[str]) -> dict[str, Any]:
    """Return the options of a parameter group that its optimizer knows: schedulers add some of their own.

    Without "capturable", for CUDA graphs of the loop: the server steps on the CPU, where torch refuses it.
    """
    options = {name: value for name, value in group.items() if name in known and name != "capturable"}
    return {name: _plain(value, f"parameter group {number} has {name}") for name, value in options.items()}


def _plain(value: object, where: str) -> Any:
    """Return an option of an optimizer without types of numpy and torch."""
    if isinstance(value, np.generic | np.ndarray | Tensor) and value.ndim == 0:
        return value.item()
    if isinstance(value, list | tuple):
        return tuple(_plain(each, where) for each in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(f"{where} of type {type(value).__name__}, expected a number: give float(...)")


class ParameterBag(nn.Module):
    """Parameters and buffers under the names of a user's model, without its code.

    Args:
        training: description of the training.
        tensors: values by name.
    """

    def __init__(self, training: Description, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        modules = add_modules(self, training.modules)
        for name in training.parameters:
            parent, _, child = name.rpartition(".")
            modules[parent].register_parameter(child, nn.Parameter(tensors[name]))
        for name in training.buffers:
            parent, _, child = name.rpartition(".")
            modules[parent].register_buffer(child, tensors[name])


def add_modules(root: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Add empty modules to a module, also under the name of a method, as "type"; return all of them by name.

    Args:
        root: module that has the name "".
        names: names of the modules, each before its children.
    """
    modules = {"": root}
    for name in filter(None, names):
        parent, _, child = name.rpartition(".")
        modules[name] = nn.Module()
        setattr(modules[parent], child, modules[name])
    return modules


def make_job(training: Description, tensors: dict[str, Tensor]) -> Job:
    """Return the job of a described training, which the ranks compute in the user's loop."""
    groups = [(group.names, group.options) for group in training.groups]
    kind = training.optimizer
    factory = partial(make_optimizer if training.is_of_torch else hold_optimizer, kind=kind, groups=groups)
    return LoopJob(
        name=ATTACHED,
        model=ParameterBag(training, tensors),
        optimizer=factory,
        step=computed_by_the_user,
        clip_norm=training.clip_norm,
        **training.data.job_settings(),
    )


def make_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    kind: str,
    groups: Groups,
) -> torch.optim.Optimizer:
    """Return an optimizer of `torch.optim` with these parameter groups."""
    optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(_groups(named_parameters, groups))
    return optimizer


def hold_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], *, kind: str, groups: Groups
) -> torch.optim.Optimizer:
    """Return the holder of the state of an optimizer whose class is not known here, only its name."""
    holder: type[HeldOptimizer] = type(kind, (HeldOptimizer,), {})  # for the fingerprint of the job
    return holder(_groups(named_parameters, groups))


def _groups(named_parameters: Iterable[tuple[str, nn.Parameter]], groups: Groups) -> list[dict[str, Any]]:
    parameters = dict(named_parameters)
    return [{**options, "params": [parameters[name] for name in names]} for names, options in groups]


class HeldOptimizer(torch.optim.Optimizer):
    """Options and state of an optimizer that steps in other processes.

    Args:
        groups: parameter groups with all their options.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        self.defaults = {name: value for group in reversed(groups) for name, value in group.items() if name != "params"}

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # no loss
        """Raise: the class of the optimizer is not known here."""
        raise NotImplementedError(f"{type(self).__name__} steps on each rank")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state as it is: the class of the optimizer knows which types its parts have."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.state.clear()
        self.state.update({parameters[number]: dict(state) for number, state in state_dict["state"].items()})
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})


def computed_by_the_user(model: nn.Module, batch: object) -> Tensor:
    """Raise: the loss of an attached job is computed in the loop of the user."""
    raise NotImplementedError("the loss is computed in the loop of the user")


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return what this rank has of trainable parameters and buffers, by name, mostly in their memory."""
    named = [pair for pair in model.named_parameters() if pair[1].requires_grad]
    return {name: local_of(tensor.detach()).contiguous() for name, tensor in [*named, *model.named_buffers()]}


def first_of_coordinator(tensors: Mapping[str, Tensor], group_size: int) -> dict[str, Tensor]:
    """Return copies of the tensors of a model for its coordinator: without rows where each rank has a shard."""
    return {name: (each if group_size == 1 else each[:0]).cpu().clone() for name, each in tensors.items()}


def send_run(stream: IO[bytes], sent: SentRun) -> None:
    """Write a run to the process of its server."""
    write_frame(stream, to_json(sent.run))
    for tensors in sent.first:
        write_tensors(stream, tensors)
    write_frame(stream, sent.optimizer)
    write_frame(stream, sent.own)


def recv_run(stream: IO[bytes]) -> SentRun:
    """Read what `send_run` has written."""
    run = from_json(read_frame(stream), ServerRun)
    first = FirstTensors(read_tensors(stream), read_tensors(stream))
    return SentRun(run, first, optimizer=read_frame(stream), own=read_frame(stream))
