"""Advice from DDP recordings."""

from math import inf, isnan

import numpy as np
import pytest

import paceline as pl
from ddp_recordings import MODEL, describe, write_recording
from paceline.ddp_recording.recording import GradientSample
from paceline.errors import UsageError
from paceline.experiments.advise.protocol_choice import score
from paceline.experiments.advise.recorded_noise import NoiseScale, noise_scale
from paceline.policies.noise_rule import NoiseRule
from selections import parametrize_few

pytestmark = pytest.mark.usefixtures("short_predictions")
STEPS = 40
PROTOCOLS = ["bsp", "k_sync(k=3)", "k_batch_async(k=4)"]


def work_ms(slow=200.0):
    work = np.full((4, STEPS), 100.0)
    work[3] = slow
    return work


def gradients(ratio, squared_norm=1.0, ranks=4, samples=20):
    """Return samples with V = ratio and N = squared_norm, the same in all steps."""
    mean, local = squared_norm + ratio / ranks, squared_norm + ratio
    return [[(50 * i, 2.0 - i / samples, local, mean) for i in range(samples)]] * ranks


@pytest.fixture(scope="module")
def advice(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rec")
    write_recording(folder, work_ms(), sum_ms=6.0, hosts=list("aabb"), gradients=gradients(8.0))
    return pl.advise_recording(folder, protocols=PROTOCOLS, price=3.0)


def named(advice, protocol):
    return next(each for each in advice.ranking if each.protocol == protocol)


@pytest.mark.slow
def test_waiting_is_given_in_per_cent_hours_and_money(advice):
    assert advice.shares.waiting_share == pytest.approx(3 * 0.1 / (4 * 0.206))
    assert advice.waiting_hours == pytest.approx(STEPS * 0.3 / 3600)
    assert advice.waiting_cost == pytest.approx(STEPS * 0.9 / 3600)
    assert "36.4% of the rank-time was waiting" in str(advice).replace("\n", " ")


def test_seconds_per_update_are_those_of_the_recorded_times(advice):
    update_s = {each.protocol: each.seconds_per_update for each in advice.ranking}
    assert update_s["DDP as recorded"] == pytest.approx(0.206)
    assert update_s["bsp"] == pytest.approx(0.206, rel=0.01)
    assert update_s["k_sync(k=3)"] == pytest.approx(0.106, rel=0.01)
    assert update_s["bsp without ranks 2, 3"] == pytest.approx(0.106, rel=0.01)  # their host


def test_seconds_to_the_loss_follow_from_the_noise(advice):
    ddp, k_sync = named(advice, "DDP as recorded"), named(advice, "k_sync(k=3)")
    assert advice.noise.ratio == pytest.approx(8.0)
    assert ddp.seconds == pytest.approx(STEPS * 0.206)
    assert k_sync.seconds == pytest.approx(STEPS * 0.106 * (1 + 8 / 3) / (1 + 8 / 4), rel=0.01)
    assert k_sync.low_s <= k_sync.seconds <= k_sync.high_s
    assert [each.seconds for each in advice.ranking] == sorted(each.seconds for each in advice.ranking)


def test_a_server_has_more_traffic_than_a_link_of_the_ring(advice):
    assert named(advice, "DDP as recorded").link_bits_per_s == pytest.approx(8 * 1.5 * 4e6 / 0.206)
    assert named(advice, "bsp").link_bits_per_s == pytest.approx(8 * 4 * 4e6 / 0.206, rel=0.02)


def test_without_samples_protocols_are_ranked_by_seconds_per_update(tmp_path):
    advice = pl.advise_recording(write_recording(tmp_path, work_ms()), protocols=["bsp", "k_sync(k=3)"])
    assert advice.ranking[0].protocol == "k_sync(k=3)" or "without" in advice.ranking[0].protocol
    assert all(isnan(each.seconds) for each in advice.ranking)
    assert "or with sample=10" in str(advice).replace("\n", " ")
    assert advice.as_json()["ranking"][0]["seconds"] is None


def test_no_rank_is_dropped_without_a_straggler(tmp_path):
    advice = pl.advise_recording(write_recording(tmp_path, work_ms(slow=100.0)), protocols=["bsp"])
    assert [each.protocol for each in advice.ranking] != []
    assert not any("without" in each.protocol for each in advice.ranking)
    assert "No rank was slow" in str(advice)


def test_the_rank_alone_is_dropped_where_all_are_on_its_host(tmp_path):
    advice = pl.advise_recording(write_recording(tmp_path, work_ms()), protocols=["bsp"])
    assert "bsp without rank 3" in {each.protocol for each in advice.ranking}


@pytest.mark.slow
def test_auto_is_ranked_as_its_choice_without_being_named(tmp_path):
    folder = write_recording(tmp_path, work_ms(), gradients=gradients(8.0))
    found = pl.advise_recording(folder)
    assert found.auto.phi == pytest.approx(8.0)
    assert found.auto.progress_per_s == pytest.approx(
        found.auto.gradients_per_s / (found.auto.k * found.auto.price + 8.0)
    )
    alone = pl.advise_recording(folder, protocols=["auto"])
    assert alone.auto == found.auto
    assert found.auto.protocol in {each.protocol for each in alone.ranking}
    assert named(found, found.auto.protocol).seconds <= 1.05 * found.ranking[0].seconds
    assert f"would choose {found.auto.protocol}" in str(found).replace("\n", " ")
    assert found.as_json()["auto"]["protocol"] == found.auto.protocol


def test_auto_without_samples_is_refused_if_it_is_alone(tmp_path):
    folder = write_recording(tmp_path, work_ms())
    with pytest.raises(UsageError, match="0 samples of gradients, and auto needs at least 10"):
        pl.advise_recording(folder, protocols=["auto"])
    found = pl.advise_recording(folder, protocols=["auto", "asp"])
    assert found.auto is None
    assert "would choose" not in str(found)


def test_stale_protocols_pay_the_price_of_their_schedule(advice):
    ratio = named(advice, "k_batch_async(k=4)")
    per_update = ratio.seconds / ratio.seconds_per_update / STEPS
    price = per_update * (1 + 8 / 4) - 8 / 4
    assert price == pytest.approx(
        score(pl.k_batch_async(4), [[0.106]] * 3 + [[0.206]], NoiseRule(K=4, learning_rate=0.1)).price, rel=0.05
    )
    assert price > 1.2


@parametrize_few(
    ("optimizer", "rule", "says"),
    [
        (
            None,
            NoiseRule(K=4, learning_rate=0.1),
            "The recording lacks the optimizer: stale gradients cost as much as without momentum.",
        ),
        (("SGD", 0.0, False), NoiseRule(K=4, learning_rate=0.1), ""),
        (
            ("SGD", 0.9, False),
            NoiseRule(K=4, learning_rate=0.1, momentum=0.9),
            "cost as much as with SGD and momentum 0.9.",
        ),
        (
            ("AdamW", 0.9, True),
            NoiseRule(K=4, learning_rate=0.1, momentum=0.9, adaptive=True),
            "cost as much as with AdamW and beta1 0.9.",
        ),
    ],
    keep=1,
)
def test_the_price_is_that_of_the_optimizer(optimizer, rule, says, tmp_path):
    folder = write_recording(tmp_path / "rec", work_ms(), sum_ms=6.0, gradients=gradients(8.0))
    if optimizer is not None:
        for rank in range(4):
            facts = dict(zip(("name", "momentum", "is_adaptive"), optimizer, strict=True))
            describe(folder, rank, 0, optimizer=facts, world_size=4)
    advice = pl.advise_recording(folder, protocols=["asp"])
    asp = named(advice, "asp")
    price = asp.seconds / asp.seconds_per_update / STEPS * (1 + 8 / 4) - 8
    assert price == pytest.approx(score(pl.asp(), [[0.106]] * 3 + [[0.206]], rule).price, rel=0.05)
    text = " ".join(str(advice).split())
    assert says in text
    assert ("stale gradients" in text.lower()) == bool(says)


def test_protocols_with_controllers_are_refused(tmp_path):
    with pytest.raises(UsageError, match="give constant knobs"):
        pl.advise_recording(write_recording(tmp_path, work_ms()), protocols=["dbw"])


def test_the_table_fits_into_80_columns(advice):
    assert max(map(len, str(advice).splitlines())) <= 80


def test_the_noise_is_that_of_the_gradients():
    rng = np.random.default_rng(0)
    gradient, d, ranks = np.full(1000, 0.1), 1000, 4
    local = gradient + rng.normal(0, 0.2, (500, ranks, d))
    samples = [
        GradientSample(
            step=i, loss=1.0, mean_square=float((each**2).sum(1).mean()), squared_norm=float((each.mean(0) ** 2).sum())
        )
        for i, each in enumerate(local)
    ]
    noise = noise_scale(samples, ranks)
    assert noise.variance == pytest.approx(0.04 * d, rel=0.02)
    assert noise.squared_norm == pytest.approx(10.0, rel=0.02)


def test_the_limits_of_little_and_much_noise():
    assert NoiseScale(0.0, 1.0, 4).relative_updates(2) == 1.0
    assert NoiseScale(1.0, 0.0, 4).ratio == inf
    assert NoiseScale(1.0, 0.0, 4).relative_updates(2) == 2.0
    assert NoiseScale(4.0, 1.0, 4).relative_updates(4, price=3.0) == (3 + 1) / 2


def test_times_of_a_model_on_a_device_are_said_to_be_those_of_the_host(tmp_path):
    folder = write_recording(tmp_path, work_ms())
    assert "does not wait for the device" not in str(pl.advise_recording(folder, protocols=["bsp"]))
    describe(folder, 1, 0, models=[{**MODEL, "device": "cuda:0"}])
    text = str(pl.advise_recording(folder, protocols=["bsp"])).replace("\n", " ")
    assert "from the timers of DDP on the device" in text
