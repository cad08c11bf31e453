"""Ranks whose gradients come too late, as threads: they send notices, and nothing else changes."""

import threading
from dataclasses import replace
from math import isnan

import pytest
from torch import nn

import paceline as pl
import rank_threads
from paceline.core.records import GradientArrived
from paceline.engines.distributed.transport.connection import Connection
from paceline.engines.distributed.transport.task_messages import GradientUnneeded
from paceline.recording.run_folder import SavedRun
from paceline.tensors.flat_buffers import FlatLayout
from pausing_job import LR, large_job, sgd_over
from rank_threads import LIMIT_S, ranks
from rounding import single_job
from selections import each_value_once
from tiny_jobs import batch_norm_net, sgd, tiny_job

UPDATES = 24
MESSAGE_BYTES = 1200  # of the small messages for a gradient, at most


def wide_net():
    return nn.Sequential(nn.Linear(5, 4000), nn.Linear(4000, 3)).double()


class Late(pl.callbacks.Callback):
    """Holds the second worker back, so that three updates are made while it computes a gradient."""

    def __init__(self):
        self._updates = 0
        self._changed = threading.Condition()

    def on_start(self, run):
        self.received = run.network

    def on_update(self, update):
        with self._changed:
            self._updates += 1
            self._changed.notify_all()

    def hold(self, job):
        """Return the job with a loss that waits."""

        def waiting(*arguments):
            if threading.current_thread().name == "rank 2":
                with self._changed:
                    until = min(self._updates + 3, UPDATES)
                    assert self._changed.wait_for(lambda: self._updates >= until, LIMIT_S)
            return job.loss(*arguments)

        return replace(job, loss=waiting)


def run(job, torchrun=None, **settings):
    late = Late()
    settings = {"protocol": "backup(k=1)", "stop": f"updates={UPDATES}", "callbacks": [late], **settings}
    with ranks(3, late.hold(job), torchrun, **settings) as started:
        started.start_workers()
        end = started.serve()
    return end, end.of(GradientArrived), late.received


JOBS = {
    "small": (tiny_job(model=batch_norm_net), {}),
    "shards": (tiny_job(model=batch_norm_net), {"shards": 2}),
    "rounded": (single_job(), {"wire": "bf16"}),
    "compressed": (single_job(), {"wire": "int8"}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "protocol"), each_value_once(list(JOBS), ["backup(k=1)", "pull(k=1)", "ringmaster(r=2)"])
)
def test_late_workers_send_notices_which_the_replay_drops(name, protocol, tmp_path):
    job, torchrun = JOBS[name]
    _, arrivals, _ = run(job, torchrun, protocol=protocol, out=tmp_path / "run")
    late = [each for each in arrivals if each.worker == 1]
    assert len(late) >= 2  # the others may make many updates between two of them
    assert not any(each.used for each in late)
    assert {each.reason for each in late} == {"too stale"}
    assert sum(each.unsent_s >= 0 for each in late) > len(late) // 2  # some are sent before they are known to be late
    assert all(isnan(each.unsent_s) and each.used for each in arrivals if each.worker == 0)
    assert all(each.compute_s > 0 and each.loss > 0 for each in late)
    assert SavedRun(tmp_path / "run").history.totals.notices == sum(each.unsent_s >= 0 for each in arrivals)
    assert pl.replay(tmp_path / "run").is_same


@pytest.mark.parametrize(
    "job", [tiny_job(model=wide_net, optimizer=sgd(LR)), pytest.param(large_job(), marks=pytest.mark.slow)]
)
def test_the_used_gradients_are_those_of_plain_sgd_and_are_all_that_is_sent(job):
    end, arrivals, network = run(job)
    used = [each for each in arrivals if each.used]
    expected = sgd_over(used, job, 2)
    assert all((tensor == expected[name]).all() for name, tensor in end.parameters.items())
    nbytes = FlatLayout(job.model()).nbytes
    assert len(arrivals) >= len(used) + 4
    most = len(used) + 2  # one is under way when the run ends, and one may be before its worker is told
    assert network.received_bytes < most * nbytes + len(arrivals) * MESSAGE_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["k_sync(k=1)", "bsp", "k_async(k=1)"])
def test_protocols_that_interrupt_late_work_or_use_it_send_no_notice(protocol, monkeypatch):
    sent, send = [], Connection.send

    def recorded(connection, message, buckets=()):
        sent.append(message)
        send(connection, message, buckets)

    monkeypatch.setattr(Connection, "send", recorded)
    [end, *_] = rank_threads.run(3, tiny_job(), protocol=protocol, stop="updates=20")
    assert not any(isinstance(message, GradientUnneeded) for message in sent)
    assert all(isnan(each.unsent_s) for each in end.of(GradientArrived))
