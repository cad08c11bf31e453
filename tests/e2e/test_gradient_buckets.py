"""Ranks whose gradients leave during the backward pass: the same numbers, also where it is interrupted."""

import pytest
import torch

import rank_threads
import ranks
from end_when import EndWhen
from paceline.core.records import GradientArrived
from paceline.engines.distributed.transport.buckets import BUCKET_BYTES
from paceline.engines.distributed.transport.connection import Connection
from paceline.engines.distributed.transport.messages import decode
from paceline.engines.distributed.transport.task_messages import GradientStarted, RemoteTaskCancelled
from paceline.worker.replica import Replica
from pausing_job import large_job, sgd_over
from tiny_jobs import tiny_job


@pytest.fixture
def heard(monkeypatch):
    """Return the messages that rank 0, this process, receives."""
    messages = []
    handle = Connection.on_message

    def noted(self, content, *others):
        messages.append(decode(bytes(content)))
        handle(self, content, *others)

    monkeypatch.setattr(Connection, "on_message", noted)
    return messages


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protocol", "n", "run"),
    [
        ("k_sync(k=1)", 2, rank_threads.run),
        pytest.param("k_sync(k=1)", 2, ranks.run, marks=pytest.mark.slow),
        pytest.param("bsp", 1, ranks.run, marks=pytest.mark.slow),
    ],
    ids=["threads", "processes", "one worker"],
)
def test_every_gradient_is_that_of_its_minibatch(protocol, n, run, heard):
    def is_enough(seen):
        sent_early = {message.draw for message in heard if isinstance(message, GradientStarted)}
        is_interrupted = any(
            isinstance(message, RemoteTaskCancelled) and message.draw in sent_early for message in heard
        )
        return seen.updates >= 6 and (n == 1 or is_interrupted)

    job = large_job()
    settings = {"protocol": protocol, "stop": "seconds=30", "callbacks": [EndWhen(is_enough)]}
    [end, *_] = run(n + 1, job, {"share_memory": False}, **settings)
    arrivals = [record for record in end.of(GradientArrived) if record.used]
    expected = sgd_over(arrivals, job, n)
    assert end.stopped_by == "interrupted"  # because it was enough
    assert sum(isinstance(message, GradientStarted) for message in heard) >= 6
    assert all(torch.equal(tensor, expected[name]) for name, tensor in end.parameters.items())


@pytest.mark.slow
def test_a_short_gradient_goes_at_once(heard):
    ranks.run(2, tiny_job(), {"share_memory": False}, protocol="bsp", stop="updates=5")
    assert not any(isinstance(message, GradientStarted) for message in heard)
    assert Replica(tiny_job(), 1, 1).layout.nbytes < BUCKET_BYTES
