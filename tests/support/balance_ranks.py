"""Ranks that run each training loop with equal shares, and with shares that change all the time.

Started with torchrun's variables; rank 0 prints the distance of the parameters of each loop as JSON.
"""

import json
import sys

import torch
import torch.distributed as dist

import paceline.shares.balancer as balancer_module
from balance_catalogue import LOOPS, REFERENCES
from balance_changing import force_changes
from paceline.shares.patches import Patches
from paceline.shares.settings import BalanceSettings


def parameters_of(model):
    values = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    return torch.cat([each.detach().flatten() for each in values])


def changed(name, patches):
    patches.install()
    try:
        return parameters_of(LOOPS[name]())
    finally:
        patches.remove()


def result_of(name):
    equal = parameters_of(REFERENCES.get(name, LOOPS[name])())
    patches = Patches(BalanceSettings(weigh=getattr(LOOPS[name], "weigh", "auto")))
    distance = (changed(name, patches) - equal).norm() / equal.norm()
    dist.all_reduce(distance, dist.ReduceOp.MAX)
    return {"loop": name, "distance": float(distance), "changes": patches.balancer._policy.changes}


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    force_changes(balancer_module)
    for name in sys.argv[1:] or LOOPS:
        result = result_of(name)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
