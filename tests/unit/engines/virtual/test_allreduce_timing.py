"""Simulated time of all-reduce iterations, against the paper's equations and plain loops, and their traces."""

import pytest

import paceline as pl
from allreduce_runs import ALGORITHMS, N, trained
from paceline.catalogue.parser import parse_plan
from selections import each_value_once, parametrize_few
from tiny_jobs import (
    tiny_job,
)


def iteration_s(protocol, cluster, updates=200, payload_bytes=1000.0):
    return pl.simulate(protocol, cluster, updates=updates, payload_bytes=payload_bytes).seconds_per_update


@pytest.mark.slow
@pytest.mark.parametrize("sum_s", [0.2, 1.5, 0.8])
def test_iteration_time_matches_the_equations_of_the_paper(sum_s):
    network = pl.timing.Network(up_bytes_per_s=2 * 3 / 4 * 1000 / sum_s)
    cluster = pl.Cluster(4, pl.timing.Deterministic(1.0), network=network)
    assert network.all_reduce_s(4, 1000.0) == pytest.approx(sum_s)
    assert iteration_s("all_reduce", cluster) == pytest.approx(1 + sum_s)  # eq. (13)
    assert iteration_s("dc_s3gd", cluster, updates=2000) == pytest.approx(max(1, sum_s), rel=1e-3)  # eq. (14)
    assert iteration_s("local_sgd(H=4)", cluster) == pytest.approx(1 + sum_s / 4)


def plain_end_times(compute_s, sum_s, allreduce):
    """Return when each iteration ends, given the compute time of each worker in each of them, and a latency."""
    free = [0.0] * len(compute_s[0])
    ends, before, summed, interval = [], 0.0, {}, allreduce.period // allreduce.fragments
    for t, row in enumerate(compute_s, 1):
        finished = [begun + seconds for begun, seconds in zip(free, row, strict=True)]
        reported = [max(end, before) for end in finished]
        if t % interval == 0:
            summed[t] = max(reported) + sum_s
        before = max([*reported, summed.get(t - max(0, allreduce.lag - 1), 0.0)])
        waits = t % interval == 0 and not allreduce.lag
        free = [before] * len(row) if waits else reported
        ends.append(before)
    return ends


@parametrize_few("protocol", ALGORITHMS, keep=1)
def test_iterations_of_heterogeneous_workers_end_at_the_computed_times(protocol):
    n, updates, sum_s = 5, 20, 0.7
    cluster = pl.Cluster(
        n, pl.timing.Exponential(1.0), speed=[1, 2, 1, 1, 0.3], network=pl.timing.Network(latency_s=sum_s / 8)
    )
    trips = cluster.round_trips(seed=0)
    compute_s = [[trips.times(worker, t, 0.0).compute_s for worker in range(n)] for t in range(1, updates + 1)]
    allreduce = parse_plan(protocol).allreduce
    ends_s = plain_end_times(compute_s, sum_s, allreduce)
    run = pl.train(tiny_job(), protocol=protocol, cluster=cluster, stop=pl.Stop(updates=updates))
    assert [record.now_s for record in run.history.of(pl.callbacks.UpdateMade)] == pytest.approx(ends_s)
    assert pl.simulate(protocol, cluster, updates=updates).time_s == pytest.approx(ends_s[-1])


@pytest.mark.slow
def test_a_gradient_records_its_compute_time_and_the_exposed_communication_time(tmp_path):
    cluster = pl.Cluster(
        4, pl.timing.Deterministic(1.0), speed=[1, 1, 1, 2], network=pl.timing.Network(latency_s=1.5 / 6)
    )
    for protocol, exposed_s in (("all_reduce", 1.5), ("dc_s3gd", 0.5), ("local_sgd(H=3)", None)):
        run = pl.train(tiny_job(), protocol=protocol, cluster=cluster, stop="updates=9")
        gradients = list(run.history.of(pl.callbacks.GradientArrived))
        assert [record.compute_s for record in gradients[-4:]] == [1.0, 1.0, 1.0, 0.5]
        if exposed_s is not None:
            assert {record.pull_s for record in gradients[:4]} == {0.0}
            assert [record.pull_s for record in gradients[4:]] == pytest.approx([exposed_s] * 32)


@pytest.mark.slow
@pytest.mark.parametrize("lag", [2, 3])
def test_latencies_overlap_each_other_and_bytes_do_not(lag):
    latency, rate = pl.timing.Network(latency_s=1.8 / 6), pl.timing.Network(up_bytes_per_s=2 * 3 / 4 * 1000 / 1.8)
    slow, wide = (pl.Cluster(4, pl.timing.Deterministic(1.0), network=network) for network in (latency, rate))
    for cluster in (slow, wide):
        assert cluster.network.all_reduce_s(4, 1000.0) == pytest.approx(1.8)
    assert iteration_s(f"dc_s3gd(lag={lag})", slow, updates=2000) == pytest.approx(max(1, 1.8 / lag), rel=1e-2)
    assert iteration_s(f"dc_s3gd(lag={lag})", wide, updates=2000) == pytest.approx(1.8, rel=1e-2)


@pytest.mark.slow
def test_a_fragment_is_hidden_where_the_whole_model_is_not():
    wide = pl.Cluster(4, pl.timing.Deterministic(1.0), network=pl.timing.Network(up_bytes_per_s=2 * 3 / 4 * 1000 / 1.6))
    assert iteration_s("local_sgd(H=4, lag=1)", wide, updates=2000) == pytest.approx(1 + 0.6 / 4, rel=1e-3)
    assert iteration_s("local_sgd(H=4, lag=1, fragments=2)", wide, updates=2000) == pytest.approx(1.0, rel=1e-3)
    assert iteration_s("local_sgd(H=4, fragments=2)", wide, updates=2000) == pytest.approx(1 + 1.6 / 4, rel=1e-3)


# A trace does not tell latency from bytes, so several sums at a time take longer when it is replayed.
ONE_SUM_AT_A_TIME = [each for each in ALGORITHMS if "dc_s3gd(lag" not in each]


@pytest.mark.slow
@pytest.mark.parametrize(("protocol", "sum_s"), each_value_once(ONE_SUM_AT_A_TIME, [0.05, 0.7, 3.0]))
def test_a_trace_reproduces_a_run_with_overlapped_sums(protocol, sum_s, tmp_path):
    network = pl.timing.Network(latency_s=sum_s / 6)
    run = pl.train(tiny_job(), protocol=protocol, cluster=pl.Cluster(N, network=network), stop="updates=20")
    pl.timing.Trace.of(run).to_csv(tmp_path / "trace.csv")
    trace = pl.timing.Trace.from_csv(tmp_path / "trace.csv")
    assert trace == pl.timing.Trace.of(run)
    again = pl.train(tiny_job(), protocol=protocol, cluster=pl.Cluster(N, trace), stop="updates=20")
    ours, theirs = ([record.now_s for record in each.history.of(pl.callbacks.UpdateMade)] for each in (again, run))
    assert ours == pytest.approx(theirs, rel=1e-12)
    assert pl.simulate(protocol, pl.Cluster(N, trace), updates=20).time_s == pytest.approx(run.time_s, rel=1e-12)
    for other in ONE_SUM_AT_A_TIME:  # the sums are those of this network, under every protocol that makes some
        simulated_s = pl.simulate(other, pl.Cluster(N, network=network), updates=20).time_s
        assert pl.simulate(other, pl.Cluster(N, trace), updates=20).time_s == pytest.approx(simulated_s, rel=1e-9)


def test_a_trace_without_the_needed_communication_times_is_refused(tmp_path):
    with_server, without = (
        pl.timing.Trace.of(trained(protocol, tiny_job(), updates=9)) for protocol in ("bsp", "all_reduce")
    )
    assert (with_server.has_server, without.has_server) == (True, False)
    with pytest.raises(
        pl.UsageError,
        match=r"the times of the sums .*, but asp needs those of the pulls and pushes .*: give such a trace",
    ):
        pl.simulate("asp", pl.Cluster(N, without), updates=9)
    with pytest.raises(
        pl.UsageError, match=r"the times of the pulls and pushes .*, but dc_s3gd needs those of the sums"
    ):
        pl.simulate("dc_s3gd", pl.Cluster(N, with_server), updates=9)
    network = pl.timing.Network(latency_s=0.25)
    for trace in (with_server, without):
        times = [[row.compute_s for row in trace.rows if row.draw == draw] for draw in range(1, 10)]
        for protocol, sent_s in (("bsp", 0.5), ("all_reduce", 1.5)):
            if trace.has_server != (protocol == "bsp"):
                took_s = pl.simulate(protocol, pl.Cluster(N, trace, network=network), updates=9).time_s
                assert took_s == pytest.approx(sum(max(each) + sent_s for each in times))
