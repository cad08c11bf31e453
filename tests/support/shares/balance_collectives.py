"""Ranks whose training loops call collectives at every place, with equal shares and with shares that change.

Each case is a place and a function. It returns a value that does not depend on how the samples of an update are
divided, so both trainings have the same values; or it is refused. Rank 0 prints a line of JSON for each case.
"""

import json
import sys
from functools import cache

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from balance_changing import force_changes
from balance_models import data, net
from balance_updates import adam, loader_of
from paceline.shares.patches import Patches
from paceline.shares.settings import BalanceSettings

CASES = {}
EPOCHS = 2


def case(place):
    def add(function):
        CASES[function.__name__] = (place, function)
        return function

    return add


def rank():
    return dist.get_rank()


def last():
    return dist.get_world_size() - 1


def outputs(tensor):
    return [torch.empty_like(tensor) for _ in range(dist.get_world_size())]


def errors(model, x, y):
    """Return the sum of the squared errors of the samples."""
    with torch.no_grad():
        return (model.module(x) - y).pow(2).sum()


@case("loop")
def sum_of_errors(model, x, y):
    total = errors(model, x, y)
    dist.all_reduce(total)
    return total


@case("loop")
def sum_of_errors_without_waiting(model, x, y):
    total = errors(model, x, y)
    dist.all_reduce(total, async_op=True).wait()
    return total


@case("loop")
def mean_of_errors_by_two_sums(model, x, y):
    sums = torch.stack([errors(model, x, y), torch.tensor(float(len(x)))])
    dist.all_reduce(sums)
    return sums[0] / sums[1]


@case("loop")
def largest_sample(model, x, y):
    largest = x.max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest


@case("loop")
def sum_at_rank_0(model, x, y):
    total = errors(model, x, y)
    dist.reduce(total, 0)
    return total if rank() == 0 else None


@case("loop")
def gathered_errors(model, x, y):
    found = outputs(total := errors(model, x, y))
    dist.all_gather(found, total)
    return sum(found)


@case("loop")
def gathered_errors_in_one_tensor(model, x, y):
    found = torch.empty(dist.get_world_size())
    dist.all_gather_into_tensor(found, errors(model, x, y)[None])
    return found.sum()


@case("loop")
def gathered_errors_at_rank_0(model, x, y):
    total = errors(model, x, y)
    dist.gather(total, found := outputs(total) if rank() == 0 else None)
    return sum(found) if rank() == 0 else None


@case("loop")
def gathered_counts(model, x, y):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, len(x))
    return sum(found)


@case("loop")
def gathered_samples_as_objects(model, x, y):
    found = [None] * dist.get_world_size() if rank() == 0 else None
    dist.gather_object(x, found)
    return torch.cat(found).sort(dim=0).values.flatten() if rank() == 0 else None


@case("loop")
def gathered_sums_of_features(model, x, y):
    found = outputs(total := x.sum(0))
    dist.all_gather(found, total)
    return torch.stack(found).sum(0)


@case("loop")
def tensor_of_rank_0(model, x, y):
    given = torch.arange(3.0) + rank()
    dist.broadcast(given, 0)
    return given


@case("loop")
def object_of_rank_0(model, x, y):
    given = [{"lr": 0.5 + rank()}]
    dist.broadcast_object_list(given, 0)
    return given[0]["lr"]


@case("loop")
def scattered_tensors(model, x, y):
    mine = torch.empty(2)
    dist.scatter(mine, [torch.full((2,), float(each)) for each in range(last() + 1)] if rank() == 0 else None)
    return mine


@case("loop")
def scattered_objects(model, x, y):
    mine = [None]
    dist.scatter_object_list(mine, [{"seed": each} for each in range(last() + 1)] if rank() == 0 else None)
    return mine[0]["seed"]


@case("loop")
def exchanged_numbers(model, x, y):
    given, taken = torch.arange(last() + 1.0) + 10 * rank(), torch.empty(last() + 1)
    dist.all_to_all_single(taken, given)
    return taken


@case("loop")
def number_from_the_last_rank(model, x, y):
    given = torch.tensor([float(rank())])
    if rank() == last():
        dist.send(given, 0)
    elif rank() == 0:
        dist.recv(given, last())
    return given


@case("loop")
def numbers_without_waiting(model, x, y):
    given, taken = torch.tensor([float(rank())]), torch.empty(1)
    around = [dist.P2POp(dist.isend, given, (rank() + 1) % (last() + 1))]
    around.append(dist.P2POp(dist.irecv, taken, (rank() - 1) % (last() + 1)))
    for work in dist.batch_isend_irecv(around):
        work.wait()
    return taken


@case("loop")
def barriers(model, x, y):
    dist.barrier()
    dist.monitored_barrier()


@case("loop")
def sum_in_a_group_of_all(model, x, y):
    total = errors(model, x, y)
    dist.all_reduce(total, group=group_of(tuple(range(last() + 1))))
    return total


@case("loop")
def sum_in_a_group_of_rank_0(model, x, y):
    total = torch.tensor(3.0)
    group = group_of((0,))
    if rank() == 0:
        dist.all_reduce(total, group=group)
    return total


@case("loop")
def norm_of_the_gradients(model, x, y):
    total = sum(each.grad.pow(2).sum() for each in model.parameters())
    dist.all_reduce(total)
    return total


@case("loop")
def weights_in_an_ema_of_rank_0(model, x, y):
    weights = model.module[0].weight.detach().clone()
    dist.broadcast(weights, 0)
    return weights.flatten()


@case("loop")
def work_of_rank_0_alone(model, x, y):
    if rank() == 0 and len(x) > 1:
        loss = mse_loss(net(3, 1)(y), torch.ones(len(y), 1))
        loss.backward()


@case("loop")
def exchanged_equal_parts_of_samples(model, x, y):
    found = torch.empty(last() + 1)
    dist.all_to_all_single(found, x.sum().expand(last() + 1).contiguous())
    return found.sum()


@case("loop")
def exchanged_parts_of_unequal_sizes(model, x, y):
    counts = [torch.zeros(1) for _ in range(last() + 1)]
    dist.all_gather(counts, torch.tensor([float(len(x))]))
    sizes, given = [int(each) for each in counts], x[:, 0].repeat(last() + 1)
    found = torch.empty(sum(sizes))
    dist.all_to_all_single(found, given, output_split_sizes=sizes, input_split_sizes=[len(x)] * (last() + 1))
    return found.sort().values


REFUSED = {
    *("gathered_samples", "gathered_samples_in_one_tensor", "gathered_samples_at_rank_0", "exchanged_samples"),
    *("exchanged_lists_of_samples", "sum_of_samples", "sum_of_samples_at_rank_0", "samples_of_rank_0"),
}


@case("loop")
def gathered_samples(model, x, y):
    dist.all_gather(outputs(x), x)


@case("loop")
def gathered_samples_in_one_tensor(model, x, y):
    dist.all_gather_into_tensor(torch.empty((last() + 1) * len(x), 6), x)


@case("loop")
def gathered_samples_at_rank_0(model, x, y):
    dist.gather(x, outputs(x) if rank() == 0 else None)


@case("loop")
def exchanged_samples(model, x, y):
    even = x[: len(x) // (last() + 1) * (last() + 1)]
    dist.all_to_all_single(torch.empty_like(even), even)


@case("loop")
def exchanged_lists_of_samples(model, x, y):
    dist.all_to_all(outputs(x), [x] * (last() + 1))


@case("loop")
def sum_of_samples(model, x, y):
    dist.all_reduce(x)


@case("loop")
def sum_of_samples_at_rank_0(model, x, y):
    dist.reduce(x, 0)


@case("loop")
def samples_of_rank_0(model, x, y):
    dist.broadcast(x, 0)


@case("epoch")
def sum_of_an_epoch(model, held):
    total = torch.tensor(float(rank()))
    dist.all_reduce(total)
    return total


@case("epoch")
def evaluation_of_all_ranks(model, held):
    total = torch.stack([errors(model, x, y) for x, y in held]).sum()
    dist.all_reduce(total)
    return total


@case("epoch")
def predictions_of_all_ranks(model, held):
    with torch.no_grad():
        own = torch.cat([model(x) for x, _ in held])
    dist.all_gather(found := outputs(own), own)
    return torch.cat(found).flatten()


@case("epoch")
def evaluation_of_rank_0_alone(model, held):
    total = torch.zeros(())
    if rank() == 0:
        total += sum(errors(model, x, y) for x, y in held)
    dist.broadcast(total, 0)
    return total


@case("epoch")
def checkpoint_of_rank_0(model, held):
    if rank() == 0:
        state = {name: value.clone() for name, value in model.module.state_dict().items()}
    dist.barrier()
    given = [state if rank() == 0 else None]
    dist.broadcast_object_list(given, 0)
    return torch.cat([each.flatten() for each in given[0].values()])


@case("epoch")
def decision_of_rank_0_to_stop(model, held):
    is_done = torch.tensor(float(rank() != 0))
    dist.broadcast(is_done, 0)
    return is_done


@cache
def group_of(ranks):
    return dist.new_group(ranks)


def values_of(name):
    """Return the values of a case in a training, and the parameters; or that it was refused."""
    place, function = CASES[name]
    model, loader, held = DistributedDataParallel(net()), loader_of(data(96)), loader_of(data(32))
    optimizer, found = adam(model), []
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            if place == "loop":
                found.append(function(model, x, y))
        if place == "epoch":
            found.append(function(model, held))
    found += [each.detach().flatten() for each in model.parameters()]
    return torch.cat([torch.as_tensor(each, dtype=torch.float64).flatten() for each in found if each is not None])


def result_of(name):
    equal, patches = values_of(name), Patches(BalanceSettings())
    patches.install()
    try:
        distance = (values_of(name) - equal).abs().max()
    except SystemExit as end:
        return {"case": name, "refused": end.code}
    finally:
        patches.remove()
        patches.balancer.close()
    dist.all_reduce(distance, dist.ReduceOp.MAX)
    return {"case": name, "distance": float(distance), "changes": patches.balancer._division.policy.changes}


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    force_changes()
    for name in sys.argv[1:] or CASES:
        result = result_of(name)
        if rank() == 0:
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
