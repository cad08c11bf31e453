"""Rules of a resume: permitted changes, damaged folders, and runs stopped at a critical moment."""

import shutil
from functools import partial

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.checkpoint.store import TENSORS
from paceline.core.records import RunResumed
from paceline.errors import PacelineWarning
from paceline.recording.run_folder import CHECKPOINTS, EVENTS, MODEL, RUN, versions
from paceline.tensors.compiled_arithmetic import CompiledArithmetic
from paceline.utils.files import replace_file
from selections import parametrize_few
from tiny_jobs import dataset, parameters_of, tiny_job

CLUSTER = pl.Cluster(3, timing=pl.timing.Exponential(1.0))


def train(path, protocol="bsp", cluster=CLUSTER, seed=0, resume=False, stop="updates=6", job=None, **options):
    where = {"resume": path} if resume else {"out": path}
    return pl.train(
        tiny_job(**(job or {})), protocol=protocol, cluster=cluster, stop=stop, seed=seed, **where, **options
    )


@parametrize_few(
    ("changes", "difference"),
    [
        ({"seed": 1}, "seed 0, now 1"),
        (
            {"job": {"model": partial(nn.Sequential, nn.Linear(5, 3).double())}},
            r"model 0.weight float64\[8, 5\], now float64\[3, 5\]",
        ),
        ({"job": {"data": dataset(80)}}, "data samples 96, now 80"),
        ({"job": {"batch_size": 4}}, "batch_size 8, now 4"),
        ({"job": {"optimizer": torch.optim.Adam}}, "optimizer SGD"),
        ({"job": {"sampling": "epoch"}}, "sampling replacement, now epoch"),
        ({"job": {"name": "other"}}, "name tiny, now other"),
    ],
    keep=1,
)
def test_the_run_of_another_job_is_refused(changes, difference, tmp_path):
    train(tmp_path / "run", stop="updates=3")
    log = (tmp_path / "run" / EVENTS).read_bytes()
    with pytest.raises(pl.UsageError, match=f"has the run of another job: .*{difference}"):
        train(tmp_path / "run", resume=True, allow_change=True, **changes)
    assert (tmp_path / "run" / EVENTS).read_bytes() == log


def test_changed_samples_are_detected(tmp_path):
    other = dataset()
    other.tensors[0][-1] += 1.0
    train(tmp_path / "run", stop="updates=3")
    with pytest.raises(pl.UsageError, match="data digest"):
        train(tmp_path / "run", resume=True, job={"data": other})


@parametrize_few(
    ("changes", "difference"),
    [
        ({"protocol": "asp"}, "protocol bsp, now asp"),
        ({"cluster": "4*exp(mean=1)"}, "cluster Cluster"),
        ({"worker_timeout_s": 5.0}, "worker_timeout_s not set, now 5.0"),
    ],
    keep=1,
)
def test_a_changed_setting_requires_allow_change(changes, difference, tmp_path):
    train(tmp_path / "run", stop="updates=3")
    with pytest.raises(pl.UsageError, match=rf"has a run with other settings: {difference}.*give allow_change=True"):
        train(tmp_path / "run", resume=True, **changes)
    result = train(tmp_path / "run", resume=True, allow_change=True, **changes)
    assert result.history.totals.updates == 6
    [resumed] = result.history.of(RunResumed)
    assert (resumed.version, resumed.stop_before) == (3, "Stop(updates=3)")


def test_partitioned_data_require_the_same_worker_count(tmp_path):
    job = {"sharding": "partitioned", "sampling": "epoch"}
    train(tmp_path / "run", job=job)
    with pytest.raises(pl.UsageError, match="partitioned among 3 workers"):
        train(tmp_path / "run", job=job, cluster="4*exp(mean=1)", resume=True, allow_change=True)


@parametrize_few("file", [RUN, EVENTS], keep=1)
def test_a_run_folder_with_missing_files_is_refused(file, tmp_path):
    train(tmp_path / "run")
    (tmp_path / "run" / file).unlink()
    with pytest.raises(pl.PacelineError, match=file):
        train(tmp_path / "run", resume=True)


def test_a_log_that_is_too_short_is_refused(tmp_path):
    train(tmp_path / "run")
    (tmp_path / "run" / EVENTS).write_text("")
    with pytest.raises(pl.RunError, match=r"has 0 bytes, the checkpoint was made at \d+"):
        train(tmp_path / "run", resume=True)


def test_a_truncated_log_is_repaired_with_a_warning(tmp_path):
    whole = train(tmp_path / "run")
    log = tmp_path / "run" / EVENTS
    text = log.read_bytes()
    log.write_bytes(text[:-5])
    with pytest.warns(PacelineWarning, match="ended in the middle of a line: repaired"):
        again = train(tmp_path / "run", resume=True)
    assert log.read_bytes() == text
    assert torch.equal(parameters_of(again.model), parameters_of(whole.model))


def test_a_damaged_checkpoint_falls_back_to_the_previous_one(tmp_path):
    whole = train(tmp_path / "run", checkpoint_every="updates=2")
    newest = max((tmp_path / "run" / CHECKPOINTS).glob("*-update-6"))
    (newest / TENSORS).write_bytes(b"\0" + (newest / TENSORS).read_bytes()[1:])
    text = (tmp_path / "run" / EVENTS).read_bytes()
    with pytest.warns(PacelineWarning, match=f"{newest} is damaged"):
        again = train(tmp_path / "run", resume=True)
    assert (tmp_path / "run" / EVENTS).read_bytes() == text
    assert torch.equal(parameters_of(again.model), parameters_of(whole.model))


def test_a_run_killed_before_its_first_checkpoint_restarts(tmp_path):
    whole = train(tmp_path / "whole")
    train(tmp_path / "run", stop="updates=3")
    for path in (tmp_path / "run" / CHECKPOINTS).glob("*-update-*"):
        path.rename(path.with_name(".unfinished")) if path.name.endswith("-0") else [f.unlink() for f in path.iterdir()]
        if path.exists():
            path.rmdir()
    train(tmp_path / "run", resume=True)
    assert (tmp_path / "run" / EVENTS).read_bytes() == (tmp_path / "whole" / EVENTS).read_bytes()
    assert whole.history.totals.updates == 6


@parametrize_few("options", [{"resume": True}, {"overwrite": True}], keep=1)
def test_a_running_run_is_not_overwritten_or_resumed(options, tmp_path):
    class Meddle(pl.callbacks.Callback):
        def on_update(self, update):
            if update.version == 3:
                with pytest.raises(pl.UsageError, match=r"another run is writing to .*run; wait for its end"):
                    train(tmp_path / "run", **options)

    result = train(tmp_path / "run", callbacks=[Meddle()])
    assert len(result.history.of(pl.callbacks.UpdateMade)) == 6


def test_the_last_checkpoint_is_not_saved_twice(tmp_path):
    train(tmp_path / "run", checkpoint_every="updates=3")
    names = sorted(path.name for path in (tmp_path / "run" / CHECKPOINTS).glob("*-update-*"))
    assert names == ["000002-update-1", "000003-update-3", "000004-update-6"]


def test_out_and_resume_are_mutually_exclusive(tmp_path):
    with pytest.raises(pl.UsageError, match="a resumed run stays in its folder"):
        train(tmp_path / "run", resume=True, out=tmp_path / "other")


def test_state_that_cannot_be_saved_is_refused_at_the_start(tmp_path):
    class Odd(pl.controllers.Controller):
        def begin(self, n):
            return object()

        def decide(self, state, observation):
            return state, []

    with pytest.raises(pl.UsageError, match=r"controllers\.0 is a object, which a checkpoint cannot hold"):
        train(tmp_path / "run", pl.bsp().controlled_by(Odd()))


def test_other_library_versions_cause_a_warning(tmp_path, monkeypatch):
    train(tmp_path / "run", stop="updates=3")
    monkeypatch.setattr("paceline.run.resume.versions", lambda: {**versions(), "torch": "1.0"})
    with pytest.warns(PacelineWarning, match=r"torch .*, now 1.0: the resumed run is not bit-identical"):
        train(tmp_path / "run", resume=True)


def test_sums_of_another_library_cause_a_warning(tmp_path, monkeypatch):
    protocol = pl.asp() + pl.staleness_lr(C=0.1)
    train(tmp_path / "run", protocol, stop="updates=3")
    monkeypatch.setattr("paceline.run.session.stale_arithmetic", lambda vectors: CompiledArithmetic(None))
    with pytest.warns(PacelineWarning, match=r"compensation torch, now numba: the resumed run is not bit-identical"):
        train(tmp_path / "run", protocol, resume=True)


class Crashed(BaseException):
    pass


class Crash(pl.callbacks.Callback):
    def __init__(self, at_update):
        self.at_update = at_update

    def on_update(self, update):
        if update.version == self.at_update:
            raise Crashed


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"protocol": "asp"}, {"cluster": "2*exp(mean=1)"}])
def test_a_change_killed_before_its_first_checkpoint_is_applied_again(change, tmp_path):
    train(tmp_path / "run", stop="updates=4")
    options = {"resume": True, "allow_change": True, "stop": "updates=12", **change}
    with pytest.raises(Crashed):
        train(tmp_path / "run", callbacks=[Crash(8)], **options)
    result = train(tmp_path / "run", **options)
    [resumed] = result.history.of(RunResumed)
    assert (resumed.version, resumed.changes != "") == (4, True)
    assert {update.k for update in result.history.of(pl.callbacks.UpdateMade)[4:]} == {1 if "protocol" in change else 2}


@parametrize_few("target", [0.35, 0.9], keep=1)
def test_a_run_at_its_target_accuracy_ends_again_or_continues_to_a_higher_one(target, tmp_path):
    options = {"protocol": "asp", "job": {"eval_data": dataset()}, "evaluate_every": "updates=3"}
    first = train(tmp_path / "run", stop="accuracy=0.35,updates=60", **options)
    log = (tmp_path / "run" / EVENTS).read_bytes()
    assert first.stopped_by == "accuracy"
    again = train(tmp_path / "run", stop=f"accuracy={target},updates=60", resume=True, **options)
    assert ((tmp_path / "run" / EVENTS).read_bytes() == log) == (target == 0.35)
    assert (again.time_s == first.time_s) == (target == 0.35)


def test_a_failed_run_fails_again_after_a_resume(tmp_path):
    poisoned = pl.Cluster(1, faults=[pl.Fault(worker=0, draw=draw, kind="not_finite") for draw in range(5, 16)])
    results = [train(tmp_path / "run", cluster=poisoned, stop="updates=30", resume=again) for again in (False, True)]
    assert [result.stopped_by for result in results] == ["not_finite", "not_finite"]
    assert results[0].reason == results[1].reason


def test_protocols_with_equal_names_are_distinguished(tmp_path):
    train(tmp_path / "run", pl.plans.Protocol(quorum=2, max_staleness=0, refill="update"))
    with pytest.raises(pl.UsageError, match=r"has a run with other settings: plan .*'quorum': 2.*'quorum': 3"):
        train(tmp_path / "run", pl.plans.Protocol(quorum=3, max_staleness=0, refill="update"), resume=True)


def growing(observation):
    return 1 + observation.version % 3


def test_the_repr_of_a_controller_has_no_memory_address(tmp_path):
    class Own(pl.controllers.Controller):
        def __init__(self):
            self.choose = growing

        def begin(self, n):
            return None

        def decide(self, state, observation):
            return None, []

    assert repr(Own()).endswith("Own(choose=growing)")
    assert repr(pl.controllers.QuorumFunction(growing)) == "QuorumFunction(choose=growing)"


def test_excluded_workers_are_readmitted_and_new_controllers_called_under_another_plan(tmp_path):
    class Aside(pl.controllers.Controller):
        def begin(self, n):
            return False

        def decide(self, state, observation):
            return True, [] if state else [pl.controllers.Exclude(0, "slow")]

    train(tmp_path / "run", pl.asp().controlled_by(Aside()), stop="updates=4")
    changed = pl.k_sync(k=3).controlled_by(pl.controllers.FixedQuorum(2))
    result = train(tmp_path / "run", changed, resume=True, allow_change=True, stop="updates=9")
    assert [update.k for update in result.history.of(pl.callbacks.UpdateMade)[4:]] == [2] * 5
    assert 0 in {record.worker for record in result.history.of(pl.callbacks.GradientArrived)[5:]}


@parametrize_few(
    ("changes", "difference"),
    [
        ({"loss": nn.functional.nll_loss}, "loss torch.nn.functional.cross_entropy, now torch.nn.functional.nll_loss"),
        ({"scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=5)}, "scheduler not set, now"),
        ({"eval_data": dataset()}, "eval_data not set"),
    ],
    keep=1,
)
def test_every_part_of_a_job_is_compared(changes, difference, tmp_path):
    train(tmp_path / "run", stop="updates=3")
    with pytest.raises(pl.UsageError, match=f"has the run of another job: .*{difference}"):
        train(tmp_path / "run", resume=True, job=changes)


def test_partitioned_data_cannot_move_to_one_worker(tmp_path):
    job = {"sharding": "partitioned", "sampling": "epoch"}
    train(tmp_path / "run", job=job)
    with pytest.raises(pl.UsageError, match="partitioned among 3 workers"):
        train(tmp_path / "run", job=job, cluster="1*exp(mean=1)", resume=True, allow_change=True)


@pytest.mark.slow
def test_a_folder_without_log_and_checkpoint_restarts(tmp_path):
    train(tmp_path / "run", stop="updates=3")
    (tmp_path / "run" / EVENTS).unlink()
    shutil.rmtree(tmp_path / "run" / CHECKPOINTS)
    result = train(
        tmp_path / "run", resume=True, callbacks=[pl.callbacks.TensorBoard(tmp_path / "run" / "tensorboard")]
    )
    assert result.history.totals.updates == 6


def test_overwrite_keeps_files_that_are_not_of_a_run(tmp_path):
    (tmp_path / "mine" / CHECKPOINTS).mkdir(parents=True)
    with pytest.raises(pl.UsageError, match="contains other files than a run"):
        train(tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / CHECKPOINTS).exists()


def named_by_numbers(model, batch):
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    return loss, {0: loss}


def test_metrics_whose_names_are_not_text_are_refused(tmp_path):
    job = {"step": named_by_numbers, "loss": None, "eval_data": dataset()}
    with pytest.raises(pl.UsageError, match="a metric is named 0"):
        train(tmp_path / "run", job=job)


def test_a_record_that_cannot_be_written_ends_the_run_with_an_error(tmp_path):
    class Odd(pl.controllers.Controller):
        def begin(self, n):
            return None

        def decide(self, state, observation):
            return None, [
                pl.controllers.SetQuorum._make((torch.tensor(2), "odd"))
            ] if observation.trigger == "open" else []

    with pytest.raises(pl.RunError, match="cannot be written as JSON"):
        train(tmp_path / "run", pl.k_async(k=1).controlled_by(Odd()))


def test_a_model_that_cannot_be_written_leaves_the_folder_unlocked(tmp_path, monkeypatch):
    def full(path, content):
        if path.name == MODEL:
            raise OSError(28, "No space left on device")
        replace_file(path, content)

    monkeypatch.setattr("paceline.utils.files.replace_file", full)
    with pytest.raises(pl.RunError, match=r"model.safetensors: No space left"):
        train(tmp_path / "run", stop="updates=3")
    monkeypatch.undo()
    assert train(tmp_path / "run", resume=True).history.totals.updates == 6
