import pytest

from paceline.recording.schema import SCHEMA, reworded, upgrade
from paceline.utils.files import ContentError


def test_the_current_schema_is_unchanged():
    content = {"schema": SCHEMA, "plan": [{"name": "Extent("}], "identity": {}}
    assert upgrade(content) == content


def test_overlaps_of_schema_2_is_a_lag_of_one():
    knobs = {"sums": "updates", "correction": None, "period": 1}
    plans = [{"allreduce": {**knobs, "overlaps": overlaps}} for overlaps in (False, True)]
    upgraded = upgrade({"schema": 2, "plan": [*plans, {"allreduce": None}]})
    assert upgraded["plan"] == [*({"allreduce": {**knobs, "lag": lag}} for lag in (0, 1)), {"allreduce": None}]
    assert upgraded["schema"] == SCHEMA


def test_a_newer_schema_is_refused():
    with pytest.raises(ContentError, match=f"has schema {SCHEMA + 1}, expected at most {SCHEMA}"):
        upgrade({"schema": SCHEMA + 1})


def test_a_controller_text_that_is_not_a_call_is_its_name():
    phase = {"protocol": {"$Protocol": {"name": "asp"}}, "end": ["updates", 4], "controllers": ["<mine>", "DBW(D=3)"]}
    [upgraded] = upgrade({"plan": [phase]})["plan"]
    assert upgraded["controllers"] == [{"name": "<mine>"}, {"name": "DBW", "D": 3}]
    assert upgraded["end"] == {"unit": "updates", "amount": 4}
    assert upgraded["momentum"] == {"rule": "keep"}


def test_reasons_of_version_0_1_are_translated():
    assert reworded("workers 1, 2, 3 fell behind") == "workers 1, 2 and 3 fell behind"
    assert reworded("worker 2: as fast as it should be") == "worker 2: no longer a straggler"
    assert reworded("quorum of 2 reached") == "quorum of 2 reached"
