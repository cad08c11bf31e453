"""Numbers that no worker measures, from a process with the token: its connection ends, and the log stays readable."""

import re
from math import inf, nan

import msgspec
import pytest

import paceline as pl
from altered_messages import altered
from paceline.engines.distributed.transport.sum_messages import StepReport
from paceline.engines.distributed.transport.task_messages import EvaluationResult, RemoteTaskDone
from paceline.errors import RunError
from paceline.report.write import write_report
from rank_threads import ranks
from ranks import lost
from selections import parametrize_few
from tiny_jobs import dataset, tiny_job

BUSY_S, OPTIONS, IS_NOTICE = 2, 4, 6  # positions in a `RemoteTaskDone`
LOSS, SAMPLES, SQUARED_NORM, VARIANCE, COMPUTE_S, MINIBATCHES = 0, 1, 2, 3, 5, 7  # in a `Measured`


def measured(position, value, record=3):
    """Return a change of what was measured; the record is a field of a `RemoteTaskDone` by default."""

    def change(fields):
        fields[record][position] = value

    return change


def field(position, value):
    def change(fields):
        fields += [[]] * (position + 1 - len(fields))
        fields[position] = value

    return change


def groups(place, *sent):
    """Return a change of the options of parameter groups: (learning rate, other options) of each."""
    return field(place, msgspec.msgpack.encode(sent))


def option(name, value):
    return groups(OPTIONS, (0.1, {name: value}))


OF_GRADIENTS = {
    "no samples": (measured(SAMPLES, 0), "a gradient of no samples"),
    "negative samples": (measured(SAMPLES, -1), "measured.samples: expected `int` >= 0"),
    "2^62 samples": (measured(SAMPLES, 1 << 62), "measured.samples: expected `int` <= 4294967296"),
    "minibatches": (measured(MINIBATCHES, -7), "measured.minibatches: expected `int` >= 0"),
    "norm": (measured(SQUARED_NORM, -1.0), "squared norm -1.0"),
    "variance": (measured(VARIANCE, -inf), "variance -inf"),
    "seconds": (measured(COMPUTE_S, -1.0), "measured.compute_s: expected `float` >= 0.0"),
    "seconds that are no number": (measured(COMPUTE_S, nan), "measured.compute_s: expected `float` >= 0.0"),
    "endless seconds": (measured(COMPUTE_S, inf), "measured.compute_s: expected `float` <= 1000000000.0"),
    "busy": (field(BUSY_S, -1.0), "busy_s: expected `float` >= 0.0"),
    "groups": (groups(OPTIONS, *[(0.1, {})] * 3), "options of 1 parameter groups: Expected `array` of length <= 1"),
    "no list of groups": (field(OPTIONS, b"\xc1"), "it sent wrong options of 1 parameter groups"),
    "an infinite rate": (groups(OPTIONS, (inf, {})), "Expected `float` <= 3.4e+38 - at `$[0][0]`"),
    "a huge rate": (groups(OPTIONS, (1e308, {})), "Expected `float` <= 3.4e+38 - at `$[0][0]`"),
    "an infinite option": (option("momentum", inf), "Expected `float` <= 3.4e+38"),
    "an option": (
        option("momentum", -1.0),
        "SGD does not take {'momentum': -1.0}: ValueError: Invalid momentum value: -1.0",
    ),
    "an option of another type": (
        option("dampening", "x"),
        "SGD does not take {'dampening': 'x'}: expected a value like 0",
    ),
    "a notice": (field(IS_NOTICE, True), "it did not send the gradient of task 3, which is needed"),
    "an unknown option": (option("params", ""), "SGD has no option params"),
}


def assert_is_left_out(kind, change, reason, folder, **settings):
    with (
        ranks(3, tiny_job(), stop="updates=12", out=folder, **settings) as job,
        altered(1, kind, change, after=2) as done,
    ):
        job.start_workers()
        end = job.serve()
        with pytest.raises(RunError, match=r"rank 0 is gone"):
            job.end(1)
    assert len(done) == 1
    assert end.reason == "12 updates made"
    assert [reason in text for _, text in lost(end)] == [True]
    assert pl.replay(folder).difference == ""
    assert write_report([folder], folder.parent / "report.html").exists()


@parametrize_few("name", OF_GRADIENTS, keep=1)
def test_a_worker_with_a_value_out_of_range_is_lost(name, tmp_path):
    change, reason = OF_GRADIENTS[name]
    # The bound keeps the other worker from making all updates before this one sends its third gradient.
    assert_is_left_out(RemoteTaskDone, change, reason, tmp_path / "run", protocol="ssp(lead=3)")


AT = {name: place for place, name in enumerate(StepReport.__struct_fields__, start=1)}
OF_REPORTS = {
    "another draw": (field(AT["draw"], 77), "it reported draw 77, which it did not have"),
    "no samples": (measured(SAMPLES, 0, AT["measured"]), "draw 3 of no samples"),
    "2^62 samples": (
        measured(SAMPLES, 1 << 62, AT["measured"]),
        "StepReport.measured.samples: expected `int` <= 4294967296",
    ),
    "seconds": (measured(COMPUTE_S, -1.0, AT["measured"]), "StepReport.measured.compute_s: expected `float` >= 0.0"),
    "rates": (
        groups(AT["options"], *[(0.1, {})] * 2),
        "options of 1 parameter groups: Expected `array` of length <= 1",
    ),
    "outcome": (field(AT["outcome"], "won"), "StepReport: 'won' is not a valid Outcome"),
}


@parametrize_few("name", OF_REPORTS, keep=1)
def test_a_rank_without_a_server_and_with_a_value_out_of_range_is_lost(name, tmp_path):
    change, reason = OF_REPORTS[name]
    settings = {"protocol": "all_reduce", "torchrun": {"min_workers": 1}}
    assert_is_left_out(StepReport, change, reason, tmp_path / "run", **settings)


OF_EVALUATIONS = {
    "another version": (1, 99, "it sent the result of version 99, which it does not evaluate"),
    "version 0": (1, 0, "it sent the result of version 0, which it does not evaluate"),
    "no metrics": (2, b"\xc1", "it sent wrong metrics of version"),
    "metrics that are no numbers": (2, msgspec.msgpack.encode({"loss": "low"}), "Expected `float`, got `str`"),
    "many metrics": (2, msgspec.msgpack.encode({f"{i}": 0.0 for i in range(10_001)}), "length <= 10000"),
}


@parametrize_few("name", OF_EVALUATIONS, keep=1)
def test_a_wrong_evaluation_ends_the_run_with_the_reason(name, tmp_path):
    place, value, reason = OF_EVALUATIONS[name]
    job = tiny_job(eval_data=dataset(16))
    settings = {"protocol": "asp", "stop": "updates=40", "eval_every": "updates=2", "out": tmp_path / "run"}
    with ranks(3, job, **settings) as threads, altered("beside", EvaluationResult, field(place, value)) as done:
        threads.start_workers()
        with pytest.raises(RunError, match=rf"the process that evaluates ended: .*{re.escape(reason)}"):
            threads.serve()
    assert len(done) == 1
