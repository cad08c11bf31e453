"""Advice from recorded runs: what it predicts, what it says, and what it refuses."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from scipy.stats import spearmanr

import paceline as pl
from paceline.cli import main
from paceline.clusters.timing.trace import Trace
from paceline.core.records import UpdateMade
from paceline.policies.controllers.auto_candidates import default_candidates
from selections import parametrize_few

pytestmark = pytest.mark.usefixtures("short_predictions")
CLUSTER = pl.Cluster(8, pl.timing.ShiftedExponential(shift_s=0.3, mean_s=0.7))
UPDATES = 60
PROTOCOLS = ["bsp", "k_sync(k=2)", "k_sync(k=4)", "k_async(k=4)", "k_batch_async(k=8)", "asp"]


def job(**changes):
    digits = pl.jobs.digits(batch_size=8, lr=0.1)
    return replace(digits, eval_data=digits.data, **changes)


def record(out, protocol="k_sync(k=4)", updates=UPDATES, measure_steps=True, **changes):
    stop = pl.Stop(updates=updates)
    return pl.train(job(**changes), protocol=protocol, cluster=CLUSTER, stop=stop, out=out, measure_steps=measure_steps)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("advise") / "run"
    record(folder)
    return folder


@pytest.fixture(scope="module")
def advice(folder):
    return pl.advise(folder, protocols=PROTOCOLS)


@pytest.mark.slow
@pytest.mark.parametrize("protocols", [["bsp", "asp"], PROTOCOLS], ids=["two", "all"])
def test_the_ranking_equals_that_of_training(protocols, folder, advice):
    reached = pl.train(job(), protocol="k_sync(k=4)", cluster=CLUSTER, stop=pl.Stop(updates=UPDATES)).metrics["loss"]
    stop = pl.Stop(eval_loss=reached, updates=1000)

    def time_to(protocol):
        return pl.train(job(), protocol=protocol, cluster=CLUSTER, stop=stop, evaluate_every="updates=5", seed=1).time_s

    predicted = {each.protocol: each.seconds for each in advice.ranking if each.protocol in protocols}
    trained = {protocol: time_to(protocol) for protocol in predicted}
    assert spearmanr(list(predicted.values()), list(trained.values())).statistic > 0.9
    assert predicted["bsp"] == pytest.approx(trained["bsp"], rel=0.25)


@pytest.mark.slow
def test_the_recorded_protocol_needs_the_recorded_updates(advice):
    [own] = [each for each in advice.ranking if each.protocol == "k_sync(k=4)"]
    assert own.updates == pytest.approx(UPDATES)
    assert own.low_s <= own.seconds * 1.1
    assert own.high_s >= own.seconds * 0.9


def test_the_shares_of_wins_sum_to_one(advice):
    assert sum(each.wins for each in advice.ranking) == 5
    assert [each.seconds for each in advice.ranking] == sorted(each.seconds for each in advice.ranking)


@pytest.mark.slow
def test_a_proportional_learning_rate_makes_small_quorums_need_more_updates(tmp_path):
    record(tmp_path / "run", protocol="bsp", lr_rule="proportional")
    found = {each.protocol: each.updates for each in pl.advise(tmp_path / "run", protocols=PROTOCOLS[:2]).ranking}
    assert found["k_sync(k=2)"] == pytest.approx(4 * found["bsp"], rel=0.1)


def test_another_cluster_gives_its_own_times(folder):
    [bsp] = pl.advise(folder, protocols=["bsp"], cluster="3*deterministic(value=2)").ranking
    assert bsp.seconds_per_update == 2


@pytest.mark.slow
def test_all_reduce_equals_bsp_if_sums_take_no_time(folder):
    ours, theirs = pl.advise(folder, protocols=["all_reduce", "bsp"], cluster="4*exp(mean=1)").ranking
    assert (ours.updates, ours.seconds, ours.staleness) == (theirs.updates, theirs.seconds, 0)


@pytest.mark.slow
def test_a_trace_gives_only_times(folder, tmp_path):
    Trace.of(pl.train(job(), protocol="bsp", cluster=CLUSTER, stop="updates=30")).to_csv(tmp_path / "trace.csv")
    advice = pl.advise(tmp_path / "trace.csv", protocols=["bsp", "asp"])
    assert [each.protocol for each in advice.ranking] == ["asp", "bsp"]
    assert advice.seen is None
    assert "no gradients" in advice.text()


@pytest.mark.slow
def test_by_default_the_protocols_of_the_papers_are_ranked(folder):
    names = {each.protocol for each in pl.advise(folder).ranking}
    assert {"bsp", "asp", "k_sync(k=1)", "k_async(k=4)", "k_batch_sync(k=8)", "k_batch_async(k=2)"} <= names
    assert len(names) == 14


def test_the_table_fits_a_terminal(advice):
    text = advice.text()
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"in [0-5] of 5 predictions", text)


@pytest.fixture(scope="module", params=["k_sync(k=4)", pytest.param("auto", marks=pytest.mark.slow)])
def noisy_rate(request, tmp_path_factory):
    """Return a run whose learning rate followed the noise, and its folder, without measured steps of all updates."""
    folder = tmp_path_factory.mktemp("noise") / "run"
    return record(folder, protocol=request.param, updates=60, measure_steps=False, lr_rule="noise"), folder


@pytest.mark.slow
def test_protocols_are_ranked_by_progress_per_second_if_the_rate_followed_the_noise(noisy_rate):
    run, folder = noisy_rate
    phi, price, progress, weighted, workload = None, 1.0, 0.0, 0.0, 0
    for record in run.history:
        if getattr(record, "kind", "") == "learning_rate":
            phi, price = record.numbers["phi"], record.numbers["d"]
        elif isinstance(record, UpdateMade):
            k, workload = record.workload - workload, record.workload  # gradients may be of parts of minibatches
            own = k / (k * price + phi)
            progress, weighted = progress + own, weighted + own * phi
    advice = pl.advise(folder, protocols=["asp", "bsp", "k_async(k=4)"])
    assert advice.seen.phi == pytest.approx(weighted / progress)
    for each in advice.ranking:
        K = each.gradients_per_s * each.seconds_per_update
        assert each.progress_per_s == pytest.approx(each.gradients_per_s / (K * each.price + advice.seen.phi))
        assert each.seconds == pytest.approx(progress / each.progress_per_s)
        assert each.low_s <= each.seconds * 1.1
        assert each.high_s >= each.seconds * 0.9
    prices = {each.protocol: each.price for each in advice.ranking}
    assert prices["bsp"] == 1 < prices["asp"]
    assert "followed the noise" in advice.text()
    assert max(map(len, advice.text().splitlines())) <= 80
    json.dumps(advice.as_json(), allow_nan=False)


@pytest.mark.slow
def test_auto_takes_its_candidate_with_the_most_progress_per_second(folder):
    auto = pl.advise(folder, protocols=["auto"]).auto
    names = [each.name for each in default_candidates(8)]
    ranked = pl.advise(folder, protocols=names).ranking
    best = max(ranked, key=lambda each: each.progress_per_s)
    assert auto.progress_per_s == pytest.approx(auto.gradients_per_s / (auto.k * auto.price + auto.phi))
    [chosen] = [each for each in ranked if each.protocol == auto.protocol]
    assert chosen.progress_per_s == pytest.approx(auto.progress_per_s, rel=0.15)  # other lengths of the simulation
    assert chosen.progress_per_s > 0.85 * best.progress_per_s


@pytest.mark.slow
def test_auto_stands_for_its_choice(folder):
    advice = pl.advise(folder, protocols=["auto", "bsp"])
    assert {each.protocol for each in advice.ranking} == {advice.auto.protocol, "bsp"}
    text = advice.text().replace("\n", " ")
    assert f'auto, with lr_rule="noise", would choose {advice.auto.protocol}: S = Lambda / (K d + phi)' in text
    assert advice.as_json()["auto"]["protocol"] == advice.auto.protocol


@pytest.mark.slow
def test_the_rank_of_a_protocol_falls_as_its_noise_floor_comes_near_the_loss(tmp_path):
    record(tmp_path / "run", protocol="bsp", updates=60, optimizer=partial(torch.optim.SGD, lr=0.4), batch_size=1)
    protocols = ["bsp", "k_sync(k=4)", "k_sync(k=2)", "asp"]
    found = {each.protocol: each.updates for each in pl.advise(tmp_path / "run", protocols=protocols).ranking}
    assert found["bsp"] < found["k_sync(k=4)"] < found["k_sync(k=2)"] < found["asp"]


@pytest.mark.slow
def test_phi_of_momentum_is_that_of_a_whole_movement(tmp_path):
    for name, momentum in (("plain", 0.0), ("heavy", 0.75)):
        optimizer = partial(torch.optim.SGD, lr=0.1 * (1 - momentum), momentum=momentum)
        record(tmp_path / name, updates=60, optimizer=optimizer)
    plain, heavy = (pl.advise(tmp_path / name, protocols=["asp"]) for name in ("plain", "heavy"))
    assert heavy.seen.phi > 0.5 * plain.seen.phi
    assert heavy.best.price > 7 * plain.best.price


def paceline(*arguments):
    return subprocess.run([sys.executable, "-m", "paceline", *map(str, arguments)], capture_output=True, text=True)


def test_the_command_prints_the_table(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["paceline", "advise", str(folder), "--protocols", "bsp, k_sync(k=2)"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert "k_sync(k=2): " in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_prints_json(folder):
    told = paceline("advise", folder, "--protocols", "bsp, asp", "--format", "json")
    assert {each["protocol"] for each in json.loads(told.stdout)["ranking"]} == {"bsp", "asp"}


@parametrize_few(
    ("recorded", "message"),
    [
        ({"measure_steps": False}, "has 0 measured steps, .*measure_steps=True"),
        ({"updates": 10}, "10 measured steps, expected at least 20"),
        ({"protocol": "dc_s3gd", "measure_steps": False}, "take steps of their own"),
        ({"protocol": "asp"}, "noise cannot be estimated from updates of a single gradient"),
        ({"protocol": "k_async(k=4) + staleness_weight"}, "compensators have changed"),
        (
            {"optimizer": partial(torch.optim.SGD, lr=0.05, maximize=True)},
            "the loss went from .* which is no progress",
        ),
    ],
    keep=1,
)
def test_a_run_without_the_needed_measurements_is_refused(recorded, message, tmp_path):
    record(tmp_path / "run", **{"updates": 30, **recorded})
    with pytest.raises(pl.UsageError, match=message):
        pl.advise(tmp_path / "run")


@parametrize_few(
    ("options", "message"),
    [
        ({"protocols": ["dbw"]}, "give protocols with constant knobs"),
        ({"protocols": ["bsp@25% >> asp"]}, "give protocols with constant knobs"),
        ({"protocols": ["dc_s3gd"]}, "its number of updates cannot be predicted"),
        ({"protocols": ["bsp + local_steps(seconds=4)"]}, "no fixed number of local steps .* local_steps\\(H=16\\)"),
        ({"protocols": ["all_reduce"]}, "all_reduce needs those of the sums of a run without a server"),
        ({"cluster": "local:4"}, "runs in real time"),
        ({"cluster": "4*exp(mean=1) + 4*pareto(shape=1,scale=1)"}, "has an infinite mean"),
        ({"protocols": ["k_sync(k=9)"]}, "k = 9"),
    ],
    keep=1,
)
def test_unpredictable_protocols_are_refused(folder, options, message):
    with pytest.raises(pl.UsageError, match=message):
        pl.advise(folder, **options)


@pytest.mark.slow
def test_adam_and_momentum_use_their_effective_step(tmp_path):
    record(tmp_path / "run", optimizer=partial(torch.optim.SGD, lr=0.02, momentum=0.8))
    [own] = pl.advise(tmp_path / "run", protocols=["k_sync(k=4)"]).ranking
    assert own.updates == pytest.approx(UPDATES)


@pytest.mark.slow
def test_single_gradients_need_microbatches_to_measure_noise(tmp_path):
    record(tmp_path / "run", protocol="asp", updates=200, microbatches=4)
    found = {each.protocol: each for each in pl.advise(tmp_path / "run", protocols=["asp", "bsp"]).ranking}
    assert found["asp"].updates == pytest.approx(200, rel=0.3)
    assert found["bsp"].updates < found["asp"].updates
