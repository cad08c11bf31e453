"""Training loops of models that FSDP shards."""

from torch import nn
from torch.nn.functional import mse_loss

from balance_models import data, net, sharded
from balance_updates import adam, epochs, loader_of, loop, plain


@loop
def fsdp2():
    model = sharded(net())
    return plain(model, adam(model), loader_of(data()))


@loop
def fsdp2_frozen_and_clipped():
    model = net()
    model[0].requires_grad_(False)
    model = sharded(model)
    optimizer = adam(model)
    for x, y in epochs(loader_of(data())):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return model
