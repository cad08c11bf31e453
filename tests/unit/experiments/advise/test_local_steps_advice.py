"""Local steps in advice: times per minibatch, the number H that is sufficient, and what is said of them."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from ddp_recordings import write_recording
from paceline.catalogue.parser import parse_plan
from paceline.experiments.advise import local_steps_prediction
from paceline.experiments.advise.local_steps_advice import sufficient_local_steps
from paceline.experiments.advise.local_steps_prediction import predict_local_steps, without_local_steps
from paceline.recording.run_folder import SavedRun
from selections import parametrize_few

pytestmark = pytest.mark.usefixtures("few_trips")
TRIPS = {name: getattr(local_steps_prediction, name) for name in ("MINIBATCHES", "LEAST_TRIPS")}  # not few
POWERS = [2**i for i in range(9)]
SECONDS = st.floats(1e-3, 1e3)
NETWORK = pl.timing.Network(latency_s=1.0)
RANDOM_TIMES = pl.timing.ShiftedExponential(shift_s=0.3, mean_s=0.7)


def record(out, network=NETWORK, protocol="bsp", updates=40, **changes):
    cluster = pl.Cluster(4, RANDOM_TIMES, network=network)
    job = pl.jobs.digits(batch_size=8, lr=0.1)
    stop = pl.Stop(updates=updates)
    return pl.train(job, protocol=protocol, cluster=cluster, stop=stop, out=out, measure_steps=True, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("local steps") / "run"
    record(folder, updates=150)
    return folder


@pytest.fixture(scope="module")
def advice(folder):
    return pl.advise(folder, protocols=["bsp + local_steps(H=6)"])


@pytest.fixture
def many_trips(monkeypatch):
    """Predict as precisely as a user's call does."""
    for name, trips in TRIPS.items():
        monkeypatch.setattr(local_steps_prediction, name, trips)


def predict(protocol, cluster, *, payload_bytes=None):
    return predict_local_steps(parse_plan(protocol), cluster, seed=0, payload_bytes=payload_bytes)


@parametrize_few(
    ("protocol", "transfers_s", "vectors"),
    [("bsp", 0.5 + 2.0 + 0.5 + 1.0, 2.0), ("all_reduce", 2 * 3 * (0.5 + 100 / 4 / 50), 1.5)],
    keep=1,
)
def test_constant_times_follow_the_formula(protocol, transfers_s, vectors):
    network = pl.timing.Network(latency_s=0.5, down_bytes_per_s=50, up_bytes_per_s=100)
    found = predict(protocol, pl.Cluster(4, pl.timing.Deterministic(3.0), network=network), payload_bytes=100)
    assert [each.H for each in found.times] == POWERS
    for each in found.times:
        assert each.seconds_per_minibatch == pytest.approx((transfers_s + 3.0 * each.H) / each.H / 4)
        assert each.vectors_per_minibatch == pytest.approx(vectors / each.H)
    assert found.transfer_share == pytest.approx(transfers_s / (transfers_s + 3.0))


@pytest.mark.slow
@pytest.mark.usefixtures("many_trips")
def test_workers_that_do_not_wait_have_the_sum_of_their_rates():
    cluster = pl.Cluster(
        4, pl.timing.Deterministic(1.0), speed=[1, 1, 1, 0.25], network=pl.timing.Network(latency_s=1.0)
    )
    for each in predict("asp", cluster).times:
        rate = sum(each.H / (2.0 + each.H / speed) for speed in cluster.speed)
        assert 1 / each.seconds_per_minibatch == pytest.approx(rate, rel=0.03)  # a run begins with idle links


@given(st.dictionaries(st.sampled_from(POWERS), SECONDS, min_size=1), st.floats(0.01, 1))
def test_the_smallest_h_with_this_share_of_the_speed_up_is_taken(seconds, share):
    found = sufficient_local_steps(seconds, share)
    shortest_s = min(seconds.values())
    assert share * seconds[found] <= shortest_s
    assert all(share * seconds[H] > shortest_s for H in seconds if found > H)
    assert sufficient_local_steps({H: 1024 * each for H, each in seconds.items()}, share) == found


def constant_times(transfers_s, compute_s):
    return {H: (transfers_s + H * compute_s) / H for H in POWERS}


@given(SECONDS, SECONDS)
def test_workers_compute_for_nine_tenths_of_the_time_that_the_largest_h_leaves_them(transfers_s, compute_s):
    seconds = constant_times(transfers_s, compute_s)
    found = sufficient_local_steps(seconds)
    assert compute_s / seconds[found] >= 0.9 * compute_s / seconds[256] * (1 - 1e-9)
    assert found <= sufficient_local_steps(constant_times(2 * transfers_s, compute_s))


def test_a_larger_h_than_the_largest_may_save_more():
    slow, fast = (
        predict("bsp", pl.Cluster(2, pl.timing.Deterministic(1.0), network=pl.timing.Network(latency_s=latency_s)))
        for latency_s in (500, 1)
    )
    assert slow.best.H == 256
    assert "A larger H may save more." in slow.sentences()[0]
    assert "A larger H" not in fast.sentences()[0]


@pytest.mark.parametrize(("transfers_s", "H"), [(0.05, 1), (0.11, 1), (0.12, 2), (1.0, 16), (1000.0, 256)])
def test_local_steps_pay_if_transfers_take_more_than_a_tenth_of_the_time(transfers_s, H):
    assert sufficient_local_steps(constant_times(transfers_s, 1.0)) == H


@pytest.mark.slow
@pytest.mark.usefixtures("many_trips")
@pytest.mark.parametrize("protocol", ["asp", "k_sync(k=3)", "bsp"])
def test_the_predicted_speed_up_is_that_of_a_simulation(protocol, folder):
    cluster = pl.Cluster(4, RANDOM_TIMES, network=NETWORK)
    [found] = pl.advise(folder, protocols=[f"{protocol} + local_steps(H=6)"]).local_steps
    assert found.pays
    each, all_ = (pl.simulate(text, cluster, updates=400, seed=3) for text in (protocol, found.best.protocol))
    speed_up = found.best.H * all_.totals.used / all_.time_s / (each.totals.used / each.time_s)
    assert found.speed_up(found.best) == pytest.approx(speed_up, rel=0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("many_trips")
def test_without_a_wish_the_best_protocol_gets_local_steps(folder):
    advice = pl.advise(folder, protocols=["bsp", "asp"])
    assert [each.protocol for each in advice.local_steps] == [advice.best.protocol]
    assert advice.local_steps[0].best.protocol == f"{advice.best.protocol} + local_steps(H=32)"


@pytest.mark.slow
def test_a_protocol_with_local_steps_is_ranked_without_them(folder):
    advice = pl.advise(folder, protocols=["bsp", "bsp + local_steps(H=6)", "k_sync(k=3) + local_steps(H=1000)"])
    assert {each.protocol for each in advice.ranking} == {"bsp", "k_sync(k=3)"}
    bsp, k_sync = advice.local_steps
    assert (bsp.protocol, [each.H for each in bsp.times]) == ("bsp", sorted({6, *POWERS}))
    assert k_sync.times[-1].protocol == "k_sync(k=3) + local_steps(H=1000)"


@pytest.mark.slow
def test_the_ranking_is_that_without_local_steps(folder):
    with_them = pl.advise(folder, protocols=["bsp + local_steps(H=6)", "asp"])
    assert with_them.ranking == pl.advise(folder, protocols=["bsp", "asp"]).ranking


def test_outer_optimizers_take_no_time():
    texts = ["bsp + local_steps(H=4, outer='nesterov')", "local_sgd(H=8, outer='nesterov')", "all_reduce"]
    wanted = without_local_steps(map(parse_plan, texts))
    assert list(wanted.plans) == ["bsp", "all_reduce"]
    assert wanted.local_steps == {"bsp": {4}, "all_reduce": {8}}


def test_the_text_and_the_values_have_the_times(advice):
    text = advice.text()
    assert max(map(len, text.splitlines())) <= 80
    assert "bsp + local_steps(H=256)" in text
    assert "which these times do not predict" in " ".join(text.split())
    [found] = json.loads(json.dumps(advice.as_json(), allow_nan=False))["local_steps"]
    assert found["best"] == advice.local_steps[0].best.protocol
    assert found["times"][0] == {
        **advice.local_steps[0].times[0]._asdict(),
        "speed_up": 1.0,
        "bytes_per_minibatch": 2 * 4 * 650,
    }


@pytest.mark.slow
def test_a_fast_network_is_one_sentence(tmp_path):
    record(tmp_path / "run", network=pl.timing.Network(latency_s=0.01))
    advice = pl.advise(tmp_path / "run", protocols=["asp"])
    [found] = advice.local_steps
    assert not found.pays
    assert found.best.H == 1
    assert "local_steps(" not in advice.text()
    text = advice.text().replace("\n", " ")
    assert re.search(r"Local steps would not pay: transfers take [12]\.\d% of a round trip of asp, and at most", text)


@pytest.mark.slow
def test_without_transfers_only_waits_are_saved(tmp_path):
    record(tmp_path / "run", network=pl.timing.Network())
    bsp, asp = pl.advise(
        tmp_path / "run", protocols=[f"{each} + local_steps(H=2)" for each in ("bsp", "asp")]
    ).local_steps
    assert (bsp.transfer_share, asp.transfer_share) == (0, 0)
    assert bsp.pays
    assert not asp.pays
    assert "transfers take 0.0% of a round trip" in asp.sentences()[0].lower()


def test_a_trace_has_no_bytes(folder, advice, tmp_path):
    pl.timing.Trace.of(SavedRun(folder)).to_csv(tmp_path / "trace.csv")
    [found] = pl.advise(tmp_path / "trace.csv", protocols=["bsp", "bsp + local_steps(H=6)"]).local_steps
    [own] = advice.local_steps
    assert found.times == own.times
    assert (found.payload_bytes, own.payload_bytes) == (None, 2600)
    assert "KB" not in found.grids()[0].text()[0]
    assert found.as_json()["times"][0]["bytes_per_minibatch"] is None


@pytest.mark.usefixtures("many_trips")
@pytest.mark.slow
def test_a_run_without_a_server_gets_local_sgd(tmp_path):
    record(tmp_path / "run", protocol="all_reduce")
    advice = pl.advise(tmp_path / "run", protocols=["all_reduce"])
    [found] = advice.local_steps
    assert found.best.protocol == f"local_sgd(H={found.best.H})"
    cluster = pl.Cluster(4, RANDOM_TIMES, network=NETWORK)
    each, all_ = (pl.simulate(text, cluster, updates=1024, seed=3) for text in ("all_reduce", found.best.protocol))
    assert found.speed_up(found.best) == pytest.approx(each.time_s / all_.time_s, rel=0.05)


def test_the_bandwidth_of_another_cluster_counts(folder):
    network = pl.timing.Network(up_bytes_per_s=1300, down_bytes_per_s=1300)
    cluster = pl.Cluster(4, pl.timing.Deterministic(1.0), network=network)
    advice = pl.advise(folder, protocols=["bsp"], cluster=cluster)
    assert advice.best.seconds_per_update == pytest.approx(1 + 2 * 2600 / 1300)
    assert advice.local_steps[0].times[0].seconds_per_minibatch == pytest.approx(5 / 4)
    assert advice.auto.gradients_per_s <= 4 / 5 * 1.05


@pytest.mark.slow
def test_a_ddp_recording_gets_local_sgd(tmp_path):
    work_ms = np.full((4, 40), 100.0)
    write_recording(tmp_path, work_ms, sum_ms=100.0)
    advice = pl.advise_recording(tmp_path, protocols=["bsp"])
    [found] = advice.local_steps
    for each in found.times:
        assert each.seconds_per_minibatch == pytest.approx((0.1 / each.H + 0.1) / 4)
    assert found.best.protocol == "local_sgd(H=16)"
    assert found.transfer_share == pytest.approx(0.5)
    assert found.as_json()["times"][0]["bytes_per_minibatch"] == pytest.approx(1.5 * advice.recording.payload_bytes)
    assert "local_sgd(H=16): 1.8" in str(advice)
    assert "local_sgd(H=256)  " in str(advice)
    assert max(map(len, str(advice).splitlines())) <= 80
    asked = pl.advise_recording(tmp_path, protocols=["bsp + local_steps(H=3)"])
    assert [each.protocol for each in asked.local_steps] == ["bsp"]
    assert "bsp + local_steps(H=3)" not in {each.protocol for each in asked.ranking}
    json.dumps(asked.as_json(), allow_nan=False)
