"""Ranks of a script that calls `paceline.balance` itself; it trains once without, once with shares that change."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import paceline as pl
from balance_changing import force_changes
from balance_models import data, net
from balance_updates import BATCH, adam, loader_of, plain
from paceline.errors import UsageError


def refusal_of(call):
    try:
        call()
    except UsageError as error:
        return str(error)
    return ""


def hooked():
    model = DistributedDataParallel(net())
    model.register_comm_hook(None, fp16_compress_hook)
    return model


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    force_changes()
    equal = DistributedDataParallel(net())
    plain(equal, adam(equal), loader_of(data()))
    shuffled = DataLoader(data(), batch_size=BATCH, shuffle=True)
    refused = [refusal_of(lambda: pl.balance(hooked())), refusal_of(lambda: pl.balance(equal, shuffled))]
    loader, sizes = loader_of(data()), set()
    model = pl.balance(DistributedDataParallel(net()), loader)
    model.register_forward_pre_hook(lambda _, inputs: sizes.add(len(inputs[0])))
    plain(model, adam(model), loader)
    with_shares, without = (nn.utils.parameters_to_vector(each.parameters()).detach() for each in (model, equal))
    if dist.get_rank() == 0:
        distance = float((with_shares - without).norm() / without.norm())
        print(json.dumps({"distance": distance, "sizes": sorted(sizes), "refused": refused}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
