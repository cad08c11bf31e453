import json

import pytest

import paceline as pl
from paceline.protocols.protocol import Plan
from paceline.recording.run_folder import RUN, SavedRun
from paceline.recording.schema import SCHEMA, upgrade
from paceline.run.plan_json import plan_as_json, plan_of
from paceline.utils.files import ContentError


def test_the_current_schema_is_unchanged():
    content = {"schema": SCHEMA, "plan": [{"name": "first"}], "identity": {}}
    assert upgrade(content) == content


def test_overlaps_of_schema_2_is_a_lag_of_one():
    knobs = {"sums": "updates", "correction": None, "period": 1}
    phase = {"protocol": {"on_update": "finish"}, "controllers": []}
    reductions = [{**knobs, "overlaps": overlaps} for overlaps in (False, True)]
    upgraded = upgrade({"schema": 2, "plan": [{**phase, "allreduce": each} for each in (*reductions, None)]})
    assert [each["allreduce"] for each in upgraded["plan"]] == [*({**knobs, "lag": lag} for lag in (0, 1)), None]
    assert upgraded["schema"] == SCHEMA


def test_dbw_of_schema_3_has_not_pooled_times_under_interrupts():
    before = [pl.dbw(base="k_sync"), pl.b_dbw(base="k_sync"), pl.dbw(), pl.adasync()]
    written = plan_as_json(Plan(tuple(phase.until(updates=1) for phase in before)))
    for phase in written:
        for controller in phase["controllers"]:
            controller.pop("pooled", None)
    first, second, *others = plan_of(upgrade({"schema": 3, "plan": written})["plan"]).phases
    assert [phase.controllers[0] for phase in (first, second)] == [
        pl.controllers.DBW(pooled=False),
        pl.controllers.BDBW(pooled=False),
    ]
    assert [phase.controllers for phase in others] == [phase.controllers for phase in before[2:]]


def test_a_newer_schema_is_refused():
    with pytest.raises(ContentError, match=f"has schema {SCHEMA + 1}, expected at most {SCHEMA}"):
        upgrade({"schema": SCHEMA + 1})


@pytest.mark.parametrize(
    ("content", "given"), [({"job": "digits"}, "no entry 'schema'"), ({"schema": 1}, "schema 1")], ids=["none", "one"]
)
def test_an_older_schema_is_refused(content, given, tmp_path):
    (tmp_path / RUN).write_text(json.dumps(content))
    with pytest.raises(pl.UsageError) as refused:
        SavedRun(tmp_path)
    assert str(refused.value) == (
        f"cannot read {tmp_path / RUN}: it has {given}, expected schema 2 to {SCHEMA}; start a new run"
    )
