"""A hundred spot notices at random moments: gradients handed in, and samples lost."""

import os
import threading
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from functools import partial
from random import Random

import pytest

import paceline as pl
import rank_threads
import ranks
from paceline.core.records import GradientArrived, WorkerLost, WorkInterrupted
from paceline.engines import notice_watch
from tiny_counting import BATCH, counting_job, mean_count, times_applied

NOTICES = 100
LEAST_IN_BSP = 95  # the notice may come while the first work of a joiner is interrupted
WORKERS = 3
MINIBATCHES = 2 * NOTICES  # in an epoch
EPOCHS = 4
SLOWNESS = pl.Cluster(WORKERS, timing=pl.timing.Uniform(0.01, 0.03))


def poll_often():
    notice_watch.POLL_S = 0.005


def this_rank():
    name = threading.current_thread().name
    return name.removeprefix("rank ") if name.startswith("rank ") else os.environ["RANK"]


def counted_step(folder, model, batch):
    """Record that this rank begins a minibatch, and publish its notice at one of the first three."""
    begun = folder / f"begun by {this_rank()}"
    with begun.open("ab") as file:
        file.write(b".")
    if begun.stat().st_size >= Random(str(batch)).randint(1, 3):
        (folder / f"notice of {this_rank()}").touch()
    return mean_count(model, batch)


def work_of_visits(end):
    """Return the kinds of the records of each worker's completed or interrupted work between two of its losses."""
    work, visits = defaultdict(list), {worker: [] for worker in range(WORKERS)}
    for record in end.records:
        match record:
            case GradientArrived() | WorkInterrupted():
                work[record.worker].append(type(record))
            case WorkerLost():
                visits[record.worker].append(work.pop(record.worker))
    return visits


@pytest.mark.slow
@pytest.mark.timeout(600)  # a hundred processes start
@pytest.mark.parametrize("kind", [rank_threads, ranks], ids=["threads", "processes"])
@pytest.mark.parametrize("protocol", ["bsp", "asp"])
def test_a_hundred_notices_lose_no_sample(protocol, kind, monkeypatch, tmp_path):
    monkeypatch.setattr(notice_watch, "POLL_S", notice_watch.POLL_S)
    poll_often()
    train = replace(counting_job(MINIBATCHES * BATCH), step=partial(counted_step, tmp_path))
    begun = {worker: [] for worker in range(WORKERS)}
    settings = {"protocol": protocol, "stop": f"epochs={EPOCHS}"}
    with kind.ranks(WORKERS + 1, train, {"slowness": SLOWNESS}, **settings) as job:

        def start(rank, notice):
            prepare = {"prepare": poll_often} if kind is ranks else {}
            job.start(rank, torchrun={"notice": notice}, **prepare)

        places = {rank: tmp_path / f"notice of {rank}" for rank in range(1, WORKERS + 1)}
        job.start(0)
        for rank in places:
            start(rank, str(places[rank]))
        for given in range(NOTICES):
            rank = 1 + given % WORKERS
            with suppress(SystemExit):
                job.end(rank)
            begun_by = tmp_path / f"begun by {rank}"
            begun[rank - 1].append(begun_by.stat().st_size)
            begun_by.unlink()
            places[rank].unlink()
            start(rank, str(places[rank]) if given < NOTICES - WORKERS else None)
        end = job.end(0)
    lost = [record.reason for record in end.of(WorkerLost)]
    assert len(lost) == NOTICES
    assert all(reason.endswith("exists") for reason in lost)
    visits = work_of_visits(end)
    for worker in begun:
        for work, count in zip(visits[worker], begun[worker], strict=True):
            assert work.count(GradientArrived) <= count <= len(work)  # an update interrupts the work of a joiner in bsp
    handed_in = sum(work[-1] is GradientArrived for worker in visits for work in visits[worker])
    print(f"{protocol}: {handed_in} of {NOTICES} handed in")
    assert handed_in >= (LEAST_IN_BSP if protocol == "bsp" else NOTICES)
    model = train.model()
    model.load_state_dict(end.parameters)
    assert times_applied(model) == [EPOCHS] * MINIBATCHES * BATCH
