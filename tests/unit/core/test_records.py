from dataclasses import fields

import pytest

from paceline.core.events import NOT_FINITE, Accept, Arrival, Compensation, Decision, Drop, Step
from paceline.core.gradient import NOT_MEASURED, OVERFLOW, SKIPPED, Measured, StepPlace
from paceline.core.records import (
    DecisionMade,
    GradientArrived,
    StepMeasured,
    UpdateMade,
    WorkerJoined,
    WorkerLost,
    event_of,
)

ARRIVAL = Arrival(
    1.0, 2, 3, Measured(
        loss=0.5, samples=8, squared_norm=2.0, variance=0.4, finite=True, compute_s=0.2, minibatches=9, weight=5.5,
        step_place=StepPlace(2, 1, 3),
    ),
    pull_s=0.1, push_s=0.3, step_scale=0.6, compensations=(Compensation("1/tau", 0.5),), sum_s=0.7, left_over_s=0.8,
    unsent_s=0.9,
)  # fmt: skip
BY_REASON = {"finite", "skipped", "overflowed"}
FACTS = {"now_s": 1.5, "version": 1, "started_s": 0.2, "staleness": 0}


def test_every_field_of_an_arrival_is_in_its_record():
    names = {field.name for field in fields(GradientArrived)}
    assert set(Arrival._fields) - names == {"now", "measured"}  # event_s, and the fields of the latter
    assert set(Measured._fields) - names == BY_REASON
    assert all(
        value != default
        for given, defaults in ((ARRIVAL, Arrival(0.0, 0, 0)), (ARRIVAL.measured, NOT_MEASURED))
        for name, value, default in zip(given._fields, given, defaults, strict=True)
        if name not in BY_REASON
    )


@pytest.mark.parametrize(
    ("command", "changes"),
    [
        (Accept(worker=2, draw=3, staleness=0, samples=8), {}),
        (Drop(worker=2, draw=3, staleness=0, reason=NOT_FINITE), {"finite": False}),
        (Drop(worker=2, draw=3, staleness=0, reason=SKIPPED), {"finite": False, "skipped": True}),
        (
            Drop(worker=2, draw=3, staleness=0, reason=OVERFLOW),
            {"finite": False, "skipped": True, "overflowed": True},
        ),
        (Drop(worker=2, draw=3, staleness=4, reason="old"), {}),
    ],
)
def test_the_record_of_an_arrival_restores_the_event(command, changes):
    arrival = ARRIVAL._replace(measured=ARRIVAL.measured._replace(**changes))
    record = GradientArrived.of(arrival, command, **FACTS)
    assert event_of(record) == arrival
    assert record.used == isinstance(command, Accept)


def test_a_record_of_a_decision_has_all_its_fields():
    assert DecisionMade.of(1.5, Decision(kind="quorum", reason="k=4: test", worker=None, k=4)) == DecisionMade(
        now_s=1.5, kind="quorum", reason="k=4: test", worker=None, k=4
    )


def test_the_record_of_a_measured_step_restores_the_event():
    step = Step(squared_norm=1.0, progress=2.0, squared_step=3.0, learning_rate=4.0, next_learning_rate=5.0)
    assert event_of(StepMeasured(now_s=1.5, version=7, **step._asdict(), event_s=1.0)) == (1.0, 7, step)


def test_a_record_of_a_command_has_no_event():
    assert event_of(DecisionMade(now_s=1.5, kind="quorum", reason="")) is None
    assert event_of(WorkerLost(now_s=1.5, worker=1, reason="", silent=True)) is None
    assert event_of(WorkerJoined(now_s=1.5, worker=1, late_return=True)) is None
    assert not hasattr(UpdateMade, "event")


def test_an_acceptance_has_the_fields_of_its_arrival():
    measured = ARRIVAL.measured
    assert Accept.of(ARRIVAL, 7) == Accept(
        worker=ARRIVAL.worker,
        draw=ARRIVAL.draw,
        staleness=7,
        samples=measured.samples,
        step_scale=ARRIVAL.step_scale,
        minibatches=measured.minibatches,
        own_weight=measured.weight,
        step_place=measured.step_place,
    )
