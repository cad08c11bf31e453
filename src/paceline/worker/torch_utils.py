"""Devices, and the model as every process builds it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from paceline.errors import UsageError
from paceline.jobs.job import Batch, Job
from paceline.utils.rng import derived_seed
from paceline.utils.user_code import at_place


def usable_device(device: str) -> str:
    """Return the device.

    Raises:
        UsageError: this machine has no such device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device='cuda', but this machine has no GPU that torch can use; give device='cpu'")
    return device


def leave_out_compiler() -> None:
    """Let this process use optimizers without torch's compiler, whose import takes a second; it must compile nothing.

    At their first call the methods of torch's optimizers import it, to keep themselves out of compiled code.
    """
    for method in (Optimizer.add_param_group, Optimizer.state_dict, Optimizer.load_state_dict, Optimizer.zero_grad):
        function = getattr(method, "__wrapped__", None)
        if function is not None:
            setattr(function, "__dynamo_disable", function)  # as torch notes that it has done so
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, Optimizer):
            function = getattr(kind.step, "__wrapped__", None)
            if function is not None:
                kind.step = torch.no_grad()(function)  # type: ignore[method-assign]


def build_model(job: Job, seed: int) -> nn.Module:
    """Return the job's model, with the same parameters in every process of the run."""
    with at_place(f"the model of job {job.name} could not be built"):
        return job.build_model(derived_seed(seed, "model"))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move every tensor of a batch to a device."""
    if device.type == "cpu":
        return batch
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
