"""An update whose step is measured: nothing is decided between the two, and the next opening knows the step."""

from dataclasses import dataclass, field

import pytest
import torch

import paceline as pl
from arrivals import arrival
from coordinator_harness import coordinator
from paceline.core.events import (
    Accept,
    Apply,
    Compute,
    Decision,
    EndRun,
    Evaluate,
    Outcome,
    Step,
    UpdateApplied,
)
from paceline.core.records import StepMeasured, UpdateMade
from paceline.policies.controllers.base import Controller, Note, SetQuorum
from selections import parametrize_few
from tiny_jobs import dataset, parameters_of, sgd, tiny_job

STEP = Step(squared_norm=4.0, progress=0.4, squared_step=0.04, learning_rate=0.1, next_learning_rate=0.05)


@dataclass(frozen=True)
class Reader(Controller):
    """Keeps every observation."""

    seen: list = field(default_factory=list, compare=False, repr=False)

    reads = "steps"

    def begin(self, n):
        return None

    def decide(self, state, observation):
        self.seen.append(observation)
        return state, [SetQuorum(2, "two")] if observation.trigger == "open" else []


def kinds(commands):
    return [type(command) for command in commands]


def measured(reader, **knobs):
    """Return a coordinator that has just made its first update of two, and the commands of that."""
    driven = coordinator(pl.k_async(k=1).controlled_by(reader), 3, **knobs)
    driven.begin()
    driven.handle(arrival(1.0, 0, 1, loss=1.0))
    return driven, driven.handle(arrival(2.0, 1, 1, loss=1.0))


def test_the_next_update_waits_for_the_measured_step():
    driven, commands = measured(Reader())
    assert kinds(commands) == [Accept, Apply]
    assert commands[-1].measure
    assert driven.awaits_step
    commands = driven.handle(UpdateApplied(2.5, 1, STEP))
    assert kinds(commands) == [Decision, Compute, Compute]
    assert not driven.awaits_step


def test_only_the_next_open_observation_has_the_step():
    reader = Reader()
    driven, _ = measured(reader)
    driven.handle(UpdateApplied(2.5, 1, STEP))
    driven.handle(arrival(3.0, 2, 1, loss=1.0))
    opening, *_ = [observation for observation in reader.seen if observation.version == 1]
    assert (opening.trigger, opening.step, opening.update_size, opening.opened_s) == ("open", STEP, 2, 2.5)
    assert [observation.step for observation in reader.seen if observation is not opening] == [None] * 4


def test_a_step_is_measured_only_if_a_controller_reads_it():
    driven = coordinator(pl.asp(), 2)
    driven.begin()
    [apply] = [command for command in driven.handle(arrival(1.0, 0, 1)) if isinstance(command, Apply)]
    assert not apply.measure


def test_a_stop_and_an_evaluation_come_after_the_step():
    driven, commands = measured(Reader(), stop={"updates": 1})
    assert kinds(commands) == [Accept, Apply]
    [stop] = driven.handle(UpdateApplied(2.5, 1, STEP))
    assert isinstance(stop, EndRun)
    assert stop.outcome is Outcome.UPDATES
    driven, _ = measured(Reader(), evaluate_every=pl.plans.Duration("updates", 1))
    assert kinds(driven.handle(UpdateApplied(2.5, 1, STEP))) == [Evaluate, Decision, Compute, Compute]


def test_a_phase_that_reads_steps_begins_and_ends_between_two_updates():
    reader = Reader()
    plan = pl.asp().until(updates=1) >> pl.k_async(k=1).controlled_by(reader).until(updates=2) >> pl.asp()
    driven = coordinator(plan, 2)
    driven.begin()
    measures = []
    for number in range(1, 5):
        commands = driven.handle(arrival(float(number), number % 2, (number + 1) // 2, loss=1.0))
        for command in [command for command in commands if isinstance(command, Apply)]:
            measures.append(command.measure)
            if command.measure:
                driven.handle(UpdateApplied(float(number), command.version, STEP))
    assert measures == [False, True, False]


def test_a_step_survives_the_end_of_a_run_and_its_checkpoint():
    reader, again = Reader(), Reader()
    driven, _ = measured(reader, stop={"updates": 1})
    driven.handle(UpdateApplied(2.5, 1, STEP))
    longer = coordinator(pl.k_async(k=1).controlled_by(again), 3, stop={"updates": 5})
    longer.load_state_dict(driven.state_dict())
    assert kinds(longer.begin()) == [Decision, Compute, Compute]
    assert again.seen[-1].step == STEP


def test_the_last_update_of_the_last_epoch_also_waits_for_its_step(tmp_path):
    def train(stop, **folder):
        job = tiny_job(sampling="epoch", batch_size=8)
        return pl.train(job, protocol="dbw", cluster=pl.Cluster(5, pl.timing.Exponential(1.0)), stop=stop, **folder)

    short = train("epochs=2", out=tmp_path / "run", checkpoint_every="updates=99")
    assert short.reason == "2 epochs, 24 gradients, applied"
    assert len(short.history.of(pl.callbacks.StepMeasured)) == short.history.totals.updates
    assert torch.equal(parameters_of(train("epochs=2", resume=tmp_path / "run").model), parameters_of(short.model))


def test_a_note_is_recorded_and_changes_nothing():
    class Remarking(Reader):
        def decide(self, state, observation):
            return state, [Note("idle", "worker 1: sleeps", 1)]

    driven = coordinator(pl.asp().controlled_by(Remarking()), 2)
    commands = driven.begin()
    assert Decision("idle", "worker 1: sleeps", 1) in commands
    assert sum(isinstance(command, Compute) for command in commands) == 2


@parametrize_few(
    "cluster", [pl.Cluster(3, pl.timing.Exponential(1.0)), pl.LocalCluster(2)], ids=["virtual", "local"], keep=1
)
def test_engines_report_the_step_of_the_server(cluster, tmp_path):
    job = tiny_job(optimizer=sgd(0.1), eval_data=dataset())
    phase = pl.k_async(k=1).controlled_by(pl.controllers.DBW())
    result = pl.train(job, protocol=phase, cluster=cluster, stop="updates=8", out=tmp_path / "run")
    updates = result.history.of(pl.callbacks.UpdateMade)
    steps = result.history.of(pl.callbacks.StepMeasured)
    assert [step.version for step in steps] == [update.version for update in updates]
    for step, update in zip(steps, updates, strict=True):
        assert step.learning_rate == update.learning_rate
        assert step.squared_step == pytest.approx(step.learning_rate**2 * step.squared_norm)
        assert update.now_s <= step.event_s <= step.now_s


def test_measuring_steps_on_request_does_not_change_the_run():
    def trained(**options):
        stop = pl.Stop(updates=12)
        return pl.train(tiny_job(), protocol="bsp@updates=4 >> asp", cluster=pl.Cluster(3), stop=stop, **options)

    plain, measured = trained(), trained(measure_steps=True)
    assert plain.history.of(StepMeasured) == []
    assert [record.version for record in measured.history.of(StepMeasured)] == list(range(1, 13))
    assert measured.history.of(UpdateMade) == plain.history.of(UpdateMade)
    assert torch.equal(parameters_of(measured.model), parameters_of(plain.model))
