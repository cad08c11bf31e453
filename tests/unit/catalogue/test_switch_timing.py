"""`sync_switch`: what it stands for, which runs a timing file fits, and plans of which a part is never reached."""

import pytest

import paceline as pl
from paceline.catalogue.parser import PLANS, parse_plan
from paceline.checkpoint.fingerprint import model_in_short
from paceline.worker.torch_utils import build_model
from tiny_jobs import batch_norm_net, tiny_job

CLUSTER = pl.Cluster(4)
MODEL = model_in_short(build_model(tiny_job(), 0))
FOUND = {
    "job": "tiny",
    "model": MODEL,
    "batch_size": 8,
    "workers": 4,
    "first": "bsp",
    "then": "asp",
    "fraction": 0.25,
}


@pytest.fixture
def timing(tmp_path, monkeypatch):
    """Write a timing file, with changes; None leaves an entry out."""
    monkeypatch.chdir(tmp_path)

    def write(**changes):
        entries = {name: value for name, value in {**FOUND, **changes}.items() if value is not None}
        lines = [f"{name} = {value!r}" for name, value in entries.items()]
        (tmp_path / "timing.toml").write_text("\n".join(lines) + "\n")
        return "timing.toml"

    return write


def train(protocol, job=None, cluster=CLUSTER, stop="gradients=32", **options):
    return pl.train(job or tiny_job(), protocol=protocol, cluster=cluster, stop=stop, **options)


def updates(result):
    return [record.k for record in result.history.of(pl.callbacks.UpdateMade)]


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("sync_switch(fraction=0.0625)", "bsp@6.25% >> asp"),
        (
            "sync_switch(fraction=0.25, first='ssp(lead=2)', then='k_async(k=2) + staleness_weight')",
            "ssp(lead=2)@25% >> k_async(k=2) + staleness_weight",
        ),
        ("dbw@10% >> sync_switch(fraction=0.25)", "dbw@10% >> bsp@25% >> asp"),
        ("sync_switch(timing=timing.toml)", "bsp@25% >> asp"),
        (
            "sync_switch(timing=timing.toml, first='bsp + elastic', then='asp + momentum(rule=zero)')",
            "bsp + elastic@25% >> asp + momentum(rule=zero)",
        ),
    ],
)
def test_sync_switch_expands_to_a_plan(timing, text, same):
    timing()
    assert parse_plan(text).phases == parse_plan(same).phases


def test_a_file_with_fraction_1_is_the_first_protocol_alone(timing):
    assert parse_plan(f"sync_switch(timing={timing(fraction=1.0)})").phases == parse_plan("bsp").phases


def test_it_is_named_with_its_paper():
    assert "Paper: Li et al." in PLANS["sync_switch"].__doc__


def test_a_run_switches_at_the_fraction_of_the_file(timing, tmp_path):
    result = train(f"sync_switch(timing={timing()})", out=tmp_path / "run")
    assert updates(result) == [4, 4] + [1] * 24
    assert pl.replay(tmp_path / "run").is_same


@pytest.mark.slow
def test_a_run_of_a_timing_file_is_resumed(timing, tmp_path):
    plan = f"sync_switch(timing={timing()})"
    whole = train(plan)
    train(plan, stop="gradients=32,updates=5", out=tmp_path / "run")
    resumed = train(plan, resume=tmp_path / "run")
    assert updates(resumed) == updates(whole)
    assert resumed.time_s == whole.time_s
    (tmp_path / "timing.toml").write_text((tmp_path / "timing.toml").read_text().replace("0.25", "0.5"))
    with pytest.raises(pl.UsageError, match="has a run with other settings: protocol bsp until 8 gradients"):
        train(plan, resume=tmp_path / "run")


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({"cluster": pl.Cluster(3)}, "timing.toml was found for workers 4, and this run has 3; search again"),
        ({"job": tiny_job(name="other")}, "was found for job tiny, and this run has other"),
        ({"job": tiny_job(batch_size=4)}, "was found for batch_size 8, and this run has 4"),
        ({"job": tiny_job(model=batch_norm_net)}, f"was found for model {MODEL}, and this run has 91 parameters"),
    ],
)
@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_a_file_that_does_not_fit_is_refused(timing, tmp_path, run, words, fraction):
    plan = f"sync_switch(timing={timing(fraction=fraction)})"
    with pytest.raises(pl.UsageError) as refusal:
        train(plan, out=tmp_path / "run", **run)
    assert words in str(refusal.value)
    asked = {"job": tiny_job(), "cluster": CLUSTER, "stop": "gradients=32", **run}
    with pytest.raises(pl.UsageError) as refusal:
        pl.compare(asked.pop("job"), protocols=["bsp", plan], out=tmp_path / "all", **asked)
    assert words in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["timing.toml"]


def test_a_simulation_of_another_cluster_is_refused(timing):
    with pytest.raises(pl.UsageError, match="was found for workers 4, and this run has 3"):
        pl.simulate(f"sync_switch(timing={timing(fraction=1.0)})", pl.Cluster(3), updates=5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fraction": None}, "timing file timing.toml: no fraction; expected a file that paceline search has written"),
        ({"fraction": "half"}, "fraction = 'half'"),
        ({"fraction": 25}, "fraction = 25, expected a share, > 0 and at most 1"),
        ({"fraction": 0.0}, "fraction = 0.0, expected a share"),
        ({"workers": "4"}, "workers = '4'"),
        ({"model": None}, "no model"),
        ({"first": "bps"}, "'bps' is not known; did you mean 'bsp'?"),
    ],
)
def test_a_broken_file_is_refused(timing, changes, words):
    with pytest.raises(pl.UsageError) as refusal:
        parse_plan(f"sync_switch(timing={timing(**changes)})")
    assert words in str(refusal.value)


def test_a_missing_file_and_a_file_that_is_not_toml_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pl.UsageError, match=r"cannot read the timing file nowhere\.toml"):
        pl.sync_switch(timing="nowhere.toml")
    (tmp_path / "broken.toml").write_text("fraction = = 3")
    with pytest.raises(pl.UsageError, match=r"cannot read the timing file broken.toml \(.*line 1"):
        pl.sync_switch(timing="broken.toml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sync_switch", "needs either a fraction or the timing file"),
        ("sync_switch(fraction=0.25, timing=timing.toml)", "needs either a fraction or the timing file"),
        ("sync_switch(fraction=6.25)", "if this is percent, type 0.0625"),
        ("sync_switch(fraction=0)", "there would be no switch, so type the second protocol alone"),
        ("sync_switch(fraction=1)", "there would be no switch, so type the first protocol alone"),
        ("sync_switch(fraction=-0.5)", "expected a share between 0 and 1, as 0.0625"),
        ("sync_switch(fraction=half)", "fraction='half', expected a number, a share"),
        ("sync_switch(fraction=true)", "fraction=True, expected a number, a share"),
        ("sync_switch(fraction=0.25, first='bsp@3%')", "first = 'bsp@3%', expected the text of one protocol"),
        ("sync_switch(fraction=0.25, then='asp >> bsp')", "expected the text of one protocol without an end"),
        ("sync_switch(fraction=0.25, then=3)", "cannot read '3'"),
        ("sync_switch(fraction=0.25, then=aps)", "'aps' is not known; did you mean 'asp'?"),
        ("sync_switch(fraction=0.25)@50% >> bsp", "runs to the end of the run; leave @50% out"),
        ("sync_switch(fraction=0.25) >> bsp", "so bsp is never reached; type it last, or alone"),
        ("sync_switch(fraction=0.25) + staleness_weight", "two parts, and staleness_weight may be for either"),
        ("sync_switch(timing=timing.toml, then='ssp(lead=2)')", "'ssp(lead=2)' is another protocol; search again"),
        ("k_async(k=2)@3% >> sync_switch(timing=timing.toml)", "was found for a run that is bsp until 0.25"),
    ],
)
def test_invalid_arguments_are_refused(timing, text, words):
    timing()
    with pytest.raises(pl.UsageError) as refusal:
        parse_plan(text)
    assert words in str(refusal.value)


def test_a_phase_that_ends_after_the_switch_is_refused():
    with pytest.raises(pl.UsageError, match="the parts overlap"):
        train("dbw@50% >> sync_switch(fraction=0.25)")


@pytest.mark.parametrize(
    ("plan", "stop", "words"),
    [
        ("bsp@updates=100 >> asp", "updates=50", "bsp until 100 updates, but the run stops at 50 updates"),
        ("bsp@updates=50 >> asp", "updates=50", "so asp is never reached"),
        ("bsp@gradients=64 >> asp", "gradients=64", "bsp until 64 gradients, but the run stops at 64 gradients"),
        ("bsp@epochs=3 >> asp", "epochs=2", "but the run stops at 24 gradients"),
        ("bsp@gradients=50 >> asp", "loss=0.1,epochs=2", "but the run stops at 24 gradients"),
        ("bsp@updates=24 >> asp", "epochs=2", "bsp until 24 updates, but the run stops at 24 gradients"),
        ("bsp@seconds=9 >> asp", "seconds=9", "bsp until 9 seconds, but the run stops at 9 seconds"),
        ("bsp@updates=3 >> ssp(lead=1)@seconds=12 >> asp", "seconds=9", "so asp is never reached; end the part"),
    ],
)
def test_a_plan_with_an_unreachable_phase_is_refused(plan, stop, words):
    with pytest.raises(pl.UsageError) as refusal:
        train(plan, stop=stop)
    assert words in str(refusal.value)


def test_a_simulation_with_an_unreachable_phase_is_refused():
    with pytest.raises(pl.UsageError, match="the run stops at 5 updates, so asp is never reached"):
        pl.simulate("bsp@updates=5 >> asp", CLUSTER, updates=5)


@pytest.mark.parametrize(
    ("plan", "stop"),
    [
        ("bsp@updates=2 >> asp", "updates=3"),
        ("bsp@updates=23 >> asp", "epochs=2"),  # if workers are lost, its updates are of one gradient
        ("bsp@updates=50 >> asp", "seconds=3"),  # in other units: not comparable before the run
        ("bsp@seconds=100 >> asp", "updates=3"),
        ("bsp@99% >> asp", "epochs=1"),
    ],
)
def test_a_plan_with_a_reachable_last_phase_runs(plan, stop):
    assert not train(plan, stop=stop).stopped_by.is_failure
