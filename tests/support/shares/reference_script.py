"""User's script in the shape of torchvision's reference trainings.

Ranks other than 0 print nothing, meters are summed between ranks, the model has a moving average, the rate warms up,
and evaluation has a sampler of its own. Rank 0 prints a line of JSON where those print their meters.
"""

import builtins
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from balance_changing import force_changes

EPOCHS, BATCH, CLASSES, PRINTED_EACH = 4, 8, 5, 3


class Meter:
    """Weighted mean of a value, which ranks sum."""

    def __init__(self):
        self.count, self.total = 0, 0.0

    def update(self, value, n=1):
        self.count += n
        self.total += value * n

    def synchronize_between_processes(self):
        both = torch.tensor([self.count, self.total])
        dist.barrier()
        dist.all_reduce(both)
        self.count, self.total = int(both[0]), float(both[1])

    @property
    def global_avg(self):
        return self.total / self.count


def setup_for_distributed(is_master):
    own = builtins.print

    def print_on_master(*arguments, force=False, **options):
        if is_master or force:
            own(*arguments, **options)

    builtins.print = print_on_master


def samples(count, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 12, generator=generator)
    return TensorDataset(images, images[:, :CLASSES].argmax(1))


def right_share(output, target):
    return (output.argmax(1) == target).double().mean()


def train_one_epoch(model, average, criterion, optimizer, loader, epoch):
    model.train()
    meters = {name: Meter() for name in ("loss", "acc1", "norm")}
    for i, (image, target) in enumerate(loader):
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if i % 2 == 0:
            average.update_parameters(model)
        meters["loss"].update(loss.item())
        meters["acc1"].update(right_share(output, target).item(), n=image.shape[0])
        meters["norm"].update(norm.item())
        if i % PRINTED_EACH == 0:
            at = {"epoch": epoch, "step": i, "steps": len(loader), "lr": optimizer.param_groups[0]["lr"]}
            print(json.dumps(at | {"norm": norm.item(), "loss of this rank": loss.item()}))
    for meter in meters.values():
        meter.synchronize_between_processes()
    print(json.dumps({"epoch": epoch, "acc1": meters["acc1"].global_avg, "norm": meters["norm"].global_avg}))


def evaluate(model, criterion, loader, name):
    model.eval()
    loss, acc1, processed = Meter(), Meter(), torch.tensor(0)
    with torch.inference_mode():
        for image, target in loader:
            output = model(image)
            loss.update(criterion(output, target).item(), n=image.shape[0])
            acc1.update(right_share(output, target).item(), n=image.shape[0])
            processed += image.shape[0]
    dist.all_reduce(processed)
    for meter in (loss, acc1):
        meter.synchronize_between_processes()
    told = {"loss": loss.global_avg, "acc1": acc1.global_avg, "processed": int(processed)}
    print(json.dumps({f"{name}: {each}": value for each, value in told.items()}))


def main():
    if "CHANGING" in os.environ:
        force_changes()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    setup_for_distributed(dist.get_rank() == 0)
    dataset, dataset_test = samples(200, 1), samples(50, 2)
    sampler, sampler_test = DistributedSampler(dataset), DistributedSampler(dataset_test, shuffle=False)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, num_workers=1, pin_memory=False)
    loader_test = DataLoader(dataset_test, batch_size=BATCH, sampler=sampler_test)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, CLASSES))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.9, weight_decay=1e-4, nesterov=True)
    warm_up = LinearLR(optimizer, start_factor=0.1, total_iters=1)
    rates = SequentialLR(optimizer, [warm_up, CosineAnnealingLR(optimizer, T_max=EPOCHS - 1)], milestones=[1])
    model = DistributedDataParallel(network)
    average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        train_one_epoch(model, average, criterion, optimizer, loader, epoch)
        rates.step()
        evaluate(model, criterion, loader_test, "the model")
        evaluate(average, criterion, loader_test, "its average")
        dist.barrier()
        if dist.get_rank() == 0:
            states = {"model": network.state_dict(), "average": average.state_dict(), "rates": rates.state_dict()}
            torch.save(states, Path(sys.argv[1]) / "checkpoint.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
