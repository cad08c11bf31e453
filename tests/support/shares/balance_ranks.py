"""Ranks that run each training loop with equal shares, and with shares that change all the time.

Started with torchrun's variables; for each loop rank 0 prints as JSON the relative distances of the
parameters and of the steps.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from balance_catalogue import LOOPS, REFERENCES
from balance_changing import force_changes
from on_device import use_device
from paceline.shares.patches import Patches
from paceline.shares.settings import BalanceSettings


def flat(tensors):
    values = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in tensors]
    return torch.cat([each.detach().flatten() for each in values])


def trained(train):
    """Return the parameters after a training, and the learning rate and the norm of the gradient of each step."""
    steps = []

    def note(optimizer, *_):
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        gradients = [each.grad for each in parameters if each.grad is not None]  # none before the first closure
        steps.append([optimizer.param_groups[0]["lr"], float(flat(gradients).norm()) if gradients else 0.0])

    hook = register_optimizer_step_pre_hook(note)
    try:
        return flat(train().parameters()), torch.tensor(steps)
    finally:
        hook.remove()


def distance_of(found, reference):
    same_shape = found.shape == reference.shape
    distance = ((found - reference).norm() / reference.norm()).cpu() if same_shape else torch.tensor(float("inf"))
    dist.all_reduce(distance, dist.ReduceOp.MAX)
    return float(distance)


def result_of(name):
    reference = trained(REFERENCES.get(name, LOOPS[name]))
    patches = Patches(BalanceSettings(weigh=getattr(LOOPS[name], "weigh", "auto")))
    patches.install()
    try:
        found = trained(LOOPS[name])
    finally:
        patches.remove()
    parameters, steps = (distance_of(*each) for each in zip(found, reference, strict=True))
    return {
        "loop": name,
        "parameters": parameters,
        "steps": steps,
        "changes": patches.balancer._division.policy.changes,
    }


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    force_changes()
    use_device()
    for name in sys.argv[1:] or LOOPS:
        result = result_of(name)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
