"""Resumes of folders that lack a knob of the protocol, or a field of the job, which a later version has added."""

import pytest

import paceline as pl
from paceline.checkpoint.fingerprint import identity
from paceline.run import session
from paceline.run.plan_json import plan_as_json
from selections import parametrize_few
from tiny_jobs import tiny_job

CLUSTER = pl.Cluster(3, timing=pl.timing.Exponential(1.0))


def train(path, protocol="bsp", resume=False, stop="updates=6", job=None):
    where = {"resume": path} if resume else {"out": path}
    return pl.train(tiny_job(**(job or {})), protocol=protocol, cluster=CLUSTER, stop=stop, seed=0, **where)


def lacking(data, knobs):
    """Return data without some knobs, as an earlier version writes them."""
    if isinstance(data, list):
        return [lacking(each, knobs) for each in data]
    if not isinstance(data, dict):
        return data
    return {name: lacking(each, knobs) for name, each in data.items() if name not in knobs}


def train_earlier(path, monkeypatch, knobs, fields=(), **settings):
    """Train with a version whose folders lack some knobs of the plan and fields of the job."""
    with monkeypatch.context() as earlier:
        earlier.setattr(session, "plan_as_json", lambda plan: lacking(plan_as_json(plan), knobs))
        earlier.setattr(session, "identity", lambda *parts: lacking(identity(*parts), fields))
        train(path, stop="updates=3", **settings)


@parametrize_few(
    ("protocol", "knobs", "other"),
    [
        ("b_dbw", ("late", "pooled", "release"), "b_dbw(pooled=false)"),
        (
            pl.plans.Protocol(quorum=2, max_staleness=0, refill="update"),
            ("max_lead", "on_update"),
            pl.plans.Protocol(quorum=2, max_staleness=0, refill="update", on_update="interrupt"),
        ),
        ("asp + staleness_weight", ("weighting",), "asp + staleness_weight(weighting='1/sqrt(1+tau)')"),
        ("bsp + local_steps(H=2, outer=nesterov)", ("seconds",), None),
        ("local_sgd(H=2)", ("fragments", "lag"), "local_sgd(H=2, lag=1)"),
    ],
    ids=str,
    keep=1,
)
def test_a_knob_that_an_earlier_version_lacks_compares_as_its_default(protocol, knobs, other, tmp_path, monkeypatch):
    train_earlier(tmp_path / "run", monkeypatch, knobs, protocol=protocol)
    if other is not None:
        with pytest.raises(pl.UsageError, match="has a run with other settings"):
            train(tmp_path / "run", other, resume=True)
    train(tmp_path / "run", protocol, resume=True)
    assert pl.replay(tmp_path / "run").is_same


class Own(pl.controllers.Controller):
    def __init__(self, knob):
        self.knob = knob

    def begin(self, n):
        return None

    def decide(self, state, observation):
        return state, []


def test_a_plan_with_a_part_of_the_user_is_compared_as_it_is(tmp_path):
    train(tmp_path / "run", pl.bsp() + Own(1), stop="updates=3")
    train(tmp_path / "run", pl.bsp() + Own(1), resume=True)
    with pytest.raises(pl.UsageError, match="has a run with other settings"):
        train(tmp_path / "run", pl.bsp() + Own(2), resume=True)


@parametrize_few(
    ("name", "other"), [("clip_norm", 1.0), ("no_decay_on", pl.jobs.BATCH_NORMS), ("microbatches", 2)], keep=1
)
def test_a_field_of_the_job_that_an_earlier_version_lacks_compares_as_its_default(name, other, tmp_path, monkeypatch):
    train_earlier(tmp_path / "run", monkeypatch, (), {name})
    with pytest.raises(pl.UsageError, match=f"has the run of another job: {name}"):
        train(tmp_path / "run", resume=True, job={name: other})
    train(tmp_path / "run", resume=True)
