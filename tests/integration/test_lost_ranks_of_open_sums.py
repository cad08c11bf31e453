"""Ranks without a server that lose one of them while several sums are open: each gradient counts in its own sum."""

import threading

import pytest

from paceline.core.records import GradientArrived
from paceline.engines.distributed.announced_sums.gradient_ledger import GradientLedger
from paceline.engines.distributed.announced_sums.update_follower import UpdateFollower
from paceline.engines.distributed.transport.announced_messages import LOST
from paceline.engines.distributed.transport.connection import ConnectionLost
from rank_threads import LIMIT_S, ranks
from ranks import flat, lost
from tiny_counting import BATCH, counting_job, times_applied

SUMS = {"server": False}
EPOCHS = 4


@pytest.fixture
def is_lost(monkeypatch):
    """Return an event that is set when the coordinator has noted the loss of a rank."""
    noted, lose = threading.Event(), GradientLedger.lose

    def noting(ledger, worker):
        lose(ledger, worker)
        noted.set()

    monkeypatch.setattr(GradientLedger, "lose", noting)
    return noted


def kill_when_announced(monkeypatch, made, chosen):
    """Kill the worker that `chosen` returns for a sum, once; return a list that is filled then."""
    killed, announce = [], GradientLedger.announce

    def killing(ledger, update):
        announced = announce(ledger, update)
        worker = None if killed else chosen(announced)
        if worker is not None:
            killed.append(worker)
            made.processes[worker or "beside"].kill()
        return announced

    monkeypatch.setattr(GradientLedger, "announce", killing)
    return killed


def assert_each_sample_counts_once(made, job, killed, samples):
    made.start_workers()
    end = made.serve()
    [worker] = killed
    ends = [end, *(made.end(each) for each in {1, 2, 3} - {worker})]
    assert [number for number, _ in lost(end)] == [worker]
    assert len({tuple(flat(each.parameters).tolist()) for each in ends}) == 1, "all ranks have the same bits"
    model = job.model()
    model.load_state_dict(end.parameters)
    assert times_applied(model) == [EPOCHS] * samples
    assert max(each.staleness for each in end.of(GradientArrived) if each.used) > 0


def test_a_recomputed_gradient_waits_for_the_sums_before_its_own(is_lost, monkeypatch):
    """All gradients are of version 0: the first sum is in progress when a rank with one of the second is lost."""
    samples, can_sum = 24 * BATCH, UpdateFollower._can_sum

    def summing(follower, gradients):
        assert follower._made or is_lost.wait(LIMIT_S)
        return can_sum(follower, gradients)

    def of_the_second(announced):
        return max(each.task.worker for each in announced.gradients) if announced.number == 2 else None

    monkeypatch.setattr(UpdateFollower, "_can_sum", summing)
    job = counting_job(samples)
    with ranks(4, job, SUMS, protocol="k_async(k=2)", stop=f"epochs={EPOCHS}") as made:
        killed = kill_when_announced(monkeypatch, made, of_the_second)
        assert_each_sample_counts_once(made, job, killed, samples)


def test_a_gradient_of_a_version_that_only_the_lost_rank_had_counts_in_its_sum(is_lost, monkeypatch):
    """The rank of the last gradient of the first sum has it alone, computes at its version, and is lost then."""
    samples, alone, waited, can_sum = 24 * BATCH, [], [], UpdateFollower._can_sum

    def summing(follower, gradients):
        if any(each.at == LOST for each in gradients):
            waited.append(follower)
        summed = can_sum(follower, gradients)
        if not follower._made and not is_lost.is_set() and gradients[-1].worker != follower._parameters._worker:
            assert is_lost.wait(LIMIT_S)
            follower._parameters.renew_total()
            follower._report(follower._generation, ConnectionLost("cut after the sum"))
            follower._recover()
            return False
        return summed

    def with_its_second(announced):
        workers = [each.task.worker for each in announced.gradients]
        alone.extend(workers[-1:] if announced.number == 1 else [])
        return alone[0] if announced.number > 1 and alone[0] in workers else None

    monkeypatch.setattr(UpdateFollower, "_can_sum", summing)
    job = counting_job(samples)
    with ranks(4, job, SUMS, protocol="k_batch_async(k=2)", stop=f"epochs={EPOCHS}") as made:
        killed = kill_when_announced(monkeypatch, made, with_its_second)
        assert_each_sample_counts_once(made, job, killed, samples)
    assert waited, "the later sum has failed before its version was there"
