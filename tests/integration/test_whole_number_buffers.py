"""Buffers of whole numbers and booleans, as the position in a queue: one worker's values, never sums."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
import rank_threads
from allreduce_loops import AllReduceLoops
from attached_threads import AttachedThreads
from selections import parametrize_each_once, parametrize_few

SLOTS, BATCH = 8, 2
MEAN = torch.tensor([3.0, -1.0])
DATA = TensorDataset(MEAN + torch.tensor([[1.0, 2.0], [-1.0, -2.0]]).repeat(24, 1))  # each pair has this mean


class Queue(nn.Module):
    """Queue of features with the position of the next one, beside a cumulative batch norm."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.norm = nn.BatchNorm1d(2, affine=False, momentum=None)
        self.register_buffer("queue", torch.zeros(SLOTS, 2))
        self.register_buffer("position", torch.tensor(0))
        self.register_buffer("is_odd", torch.tensor(False))

    def forward(self, x):
        at = int(self.position)
        assert at in range(0, SLOTS, BATCH)
        if self.training:
            self.queue[at : at + BATCH] = x
            self.position.fill_((at + BATCH) % SLOTS)
            self.is_odd.logical_not_()
        return self.scale * self.norm(x) ** 2


def loss_of(model, batch):
    return model(batch[0]).sum() * 1e-3


def job():
    return pl.Job(
        model=Queue,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=DATA,
        batch_size=BATCH,
        step=loss_of,
        sampling="epoch",
        sampler=torch.utils.data.SequentialSampler(DATA),
    )


def check(tensors, steps):
    """Check the buffers after this number of steps of worker 0."""
    assert tensors["position"] == steps * BATCH % SLOTS
    assert tensors["is_odd"] == steps % 2
    assert tensors["norm.num_batches_tracked"] == steps
    assert torch.allclose(tensors["norm.running_mean"], MEAN, rtol=1e-5)


SYNCHRONOUS = ["bsp", "bsp + local_steps(H=2)", "all_reduce", "local_sgd(H=2)", "s3gd", "dc_s3gd"]


@parametrize_few("protocol", SYNCHRONOUS, keep=1)
def test_simulated_workers_count_as_worker_0_does(protocol):
    updates = 6
    model = pl.train(job(), protocol=protocol, cluster=pl.Cluster(4), stop=f"updates={updates}", progress=False).model
    check(model.state_dict(), updates * (2 if "local_steps" in protocol else 1))


@parametrize_few(
    ("protocol", "server"),
    [("bsp", False), ("all_reduce", True), ("local_sgd(H=2)", True), ("dc_s3gd", True), ("bsp", True)],
    keep=1,
)
def test_ranks_count_as_worker_0_does(protocol, server):
    ranks = rank_threads.Job(3, job(), {"server": server}, protocol=protocol, stop="updates=5")
    ranks.start_workers()
    check(ranks.serve().parameters, 5)


@parametrize_each_once(
    protocol=["asp", "k_batch_async(k=3)", "k_sync(k=2)", "k_async(k=2)"],
    cluster=[pl.Cluster(4), pl.LocalCluster(3)],
)
def test_a_stale_position_stays_in_the_queue(protocol, cluster):
    model = pl.train(job(), protocol=protocol, cluster=cluster, stop="updates=30", progress=False).model
    assert model.position in range(0, SLOTS, BATCH)
    assert 0 < model.norm.num_batches_tracked <= 30


@parametrize_few(
    ("protocol", "kind"),
    [("bsp", AttachedThreads), ("all_reduce", AllReduceLoops), ("dc_s3gd", AllReduceLoops)],
    keep=1,
)
def test_attached_loops_count_as_rank_0_does(protocol, kind):
    def make():
        model = Queue()
        return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(DATA, batch_size=BATCH)

    def loop(run, model, optimizer):
        for _ in run.epochs(1):
            for batch in run.loader:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()

    ranks = kind(4, make, protocol)
    assert ranks.run(loop) == [None] * 4
    for model, _, _ in ranks.parts:
        check(model.state_dict(), len(DATA) // BATCH // 4)
