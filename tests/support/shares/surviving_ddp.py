"""User's script: DDP in which ranks are killed at given places; each rank writes down what it has computed.

Arguments: folder of the notes, and the losses as ``rank:iteration:place``, with the places "forward", "sum" (when the
first gradients are summed), "step", "stepped" and "evaluation". With ``RETURNS_AT`` ranks wait at these
iterations until the lost ones have come there in their next life; with ``CHANGING`` shares change by a rule, not by
speed. With ``MEMORY`` rank 0 has memory for so many samples in a backward pass, and the other ranks are slow.
With ``SHARDS`` the model is not in DDP: replicas of so many ranks shard it.
With ``LATE`` a rank that comes back waits at first until rank 0 has passed its place.
With ``COMPILED`` the model in DDP is compiled. With ``CHECKPOINTS`` rank 0 saves one after each epoch, and each rank
begins from it. ``LIVES`` are those under an earlier launcher of this host.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from balance_changing import force_changes
from balance_models import sharded
from on_device import DEVICE, use_device
from paceline.shares.survival.group import SurvivingGroup

SHARDS = int(os.environ.get("SHARDS", "1"))
SAMPLES, EPOCHS, BATCH = 96, int(os.environ.get("EPOCHS", "2")), 4
EVALUATED_EACH = 5


class Numbered(Dataset):
    """Samples with their numbers."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
        self.y = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.x[index], self.y[index], index


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def schedule_of(optimizer, ranks, epochs=EPOCHS):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * SAMPLES // BATCH // ranks)


def wrapped(model, ranks):
    if SHARDS > 1:
        return sharded(model, mesh=init_device_mesh("cpu", (ranks // SHARDS, SHARDS), mesh_dim_names=("to", "in")))
    # With a compiled model as large a bucket as torch's, else several ones.
    return DistributedDataParallel(model, bucket_cap_mb=25 if "COMPILED" in os.environ else 0.001)


def flat(model):
    """Return the parameters, of the shard of this rank alone where there is one."""
    own = [each.to_local() if SHARDS > 1 and hasattr(each, "to_local") else each for each in model.parameters()]
    return torch.cat([each.detach().flatten() for each in own]).cpu()


def await_all(folder, iteration, rank, ranks):
    """Wait until all ranks have come to an iteration."""
    (folder / f"{rank}.{iteration}.there").touch()
    while not all((folder / f"{each}.{iteration}.there").exists() for each in range(ranks)):
        time.sleep(0.01)


def be_late(folder):
    """Let this rank tell at first that it comes back when rank 0 has passed its place."""
    come_back = SurvivingGroup.come_back

    def passed(group):
        SurvivingGroup.come_back = come_back
        while (folder / "0.jsonl").read_text().count("digest") < group.position:
            time.sleep(0.01)
        return come_back(group)

    SurvivingGroup.come_back = passed


def main():
    folder, faults = Path(sys.argv[1]), [each.split(":") for each in sys.argv[2:]]
    if "CHANGING" in os.environ:
        force_changes()
    torch.set_num_threads(1)
    use_device()
    dist.init_process_group("gloo")
    rank, ranks, iteration = dist.get_rank(), dist.get_world_size(), 0
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + int(os.environ.get("LIVES", "0"))
    if life and "LATE" in os.environ:
        be_late(folder)
    returns_at = [int(each) for each in os.environ.get("RETURNS_AT", "").split(",") if each]

    def fault(place):
        if [str(rank), str(iteration), place] in faults and not (folder / f"{rank}.{iteration}.lost").exists():
            (folder / f"{rank}.{iteration}.lost").touch()
            os.kill(os.getpid(), getattr(signal, os.environ.get("WITH", "SIGKILL")))

    data = Numbered()
    sampler = DistributedSampler(data, seed=3)
    workers = int(os.environ.get("LOADER_PROCESSES", "0"))
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, num_workers=workers)
    is_compiled = "COMPILED" in os.environ
    model = wrapped(net(), ranks)
    module = getattr(model, "module", model)
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer, ranks)
    next(iter(model.parameters())).register_post_accumulate_grad_hook(lambda _: fault("sum"))
    batch_size = 0

    def take_memory(_):
        if rank == 0 and batch_size > int(os.environ.get("MEMORY", "1000")):
            if DEVICE == "cuda":
                torch.empty(1 << 50, device=DEVICE)
            raise torch.OutOfMemoryError

    if SHARDS == 1:
        module[2].weight.register_hook(take_memory)
    trained = torch.compile(model, backend="eager") if is_compiled else model
    notes = (folder / f"{rank}.jsonl").open("a")
    checkpoint, parts, first_epoch = folder / "checkpoint.pt", (module, optimizer, schedule), 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        first_epoch, iteration = saved["epoch"], saved["iteration"]
        for part, state in zip(parts, saved["states"], strict=True):
            part.load_state_dict(state)
    for epoch in range(first_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for x, y, indices in loader:
            if iteration in returns_at:
                await_all(folder, iteration, rank, ranks)
            is_missing = SHARDS * len(list(folder.glob("*.lost"))) > len(list(folder.glob("*.back")))
            takes_part = not life or (folder / f"{rank}.{life}.back").exists()
            time.sleep((0.2 if is_missing else 0.02) if returns_at and takes_part else 0)  # so that others come back
            note = {"iteration": iteration, "epoch": epoch, "life": life}
            print(json.dumps(note | {"samples": indices.tolist()}), file=notes, flush=True)
            before, batch_size = flat(model), len(x)
            time.sleep(0.01 * len(x) if rank and "MEMORY" in os.environ else 0)
            optimizer.zero_grad()
            fault("forward")
            nn.functional.mse_loss(trained(x), y).backward()
            fault("step")
            optimizer.step()
            schedule.step()
            fault("stepped")
            if life and not torch.equal(before, flat(model)):
                (folder / f"{rank}.{life}.back").touch()
            note |= {"stepped": not torch.equal(before, flat(model)), "rate": schedule.get_last_lr()[0]}
            print(json.dumps(note | {"digest": flat(model).sum().item().hex()}), file=notes, flush=True)
            if iteration % EVALUATED_EACH == EVALUATED_EACH - 1:
                with torch.no_grad():
                    loss = model(data.x.to(DEVICE)).pow(2).mean()
                fault("evaluation")
                dist.all_reduce(torch.stack([loss, torch.ones_like(loss)]))
                if "GATHERS" in os.environ:
                    dist.all_gather_object([None] * ranks, rank)
            iteration += 1
        if rank == 0 and "CHECKPOINTS" in os.environ:
            states = [part.state_dict() for part in parts]
            saved = {"epoch": epoch + 1, "iteration": iteration, "states": states}
            torch.save(saved, folder / "unfinished.pt")
            (folder / "unfinished.pt").replace(checkpoint)
    whole = [getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters()]
    torch.save(torch.cat([each.detach().flatten() for each in whole]).cpu(), folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
