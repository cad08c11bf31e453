"""Every public call refuses a wrong type with a UsageError: each argument in turn, with values of every kind."""

import inspect
import re
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import paceline as pl
from paceline.clusters.parser import parse_cluster
from paceline.clusters.timing.trace import TraceRow
from paceline.utils.argument_types import NAMESPACES
from tiny_jobs import dataset, small_net, tiny_job

# Made by paceline for the user to read, or base classes: not called by users.
READ_ONLY = {
    "Arrival",
    "Action",
    "Advice",
    "Comparison",
    "StaleGradient",
    "GradientArrived",
    "History",
    "Observation",
    "Prediction",
    "Replay",
    "Result",
    "RunInfo",
    "Simulated",
    "StepMeasured",
    "SwitchSearch",
    "UpdateMade",
    "theory.Expected",
    "theory.Staleness",
    "theory.Tradeoff",
    "theory.NoTheoryError",
    "jobs.JobLoadError",
    "Callback",
    "Compensator",
    "Controller",
    "Distribution",
    "PacelineError",
    "RunError",
    "UsageError",
    "Outcome",
}
WRONG = {
    "text": "x",
    "nothing": None,
    "true": True,
    "count": 2,
    "number": 2.5,
    "bytes": b"x",
    "list": [object()],
    "dict": {object(): object()},
    "object": object(),
    "class": object,
    "function": lambda: None,
}
CALLABLE = ("class", "function")
NEVER_RIGHT = ("bytes", "list", "dict", "object")
RIGHT = {("data", "list"), ("eval_data", "list")}  # a list is map-style data


LAW = pl.timing.Exponential(mean_s=1.0)
# Valid arguments by name, for whatever has no default.
VALID = {
    "amount": 2.0,
    "at_s": 1.0,
    "batch_size": 8,
    "blocks": [1, 1, 1],
    "C": 0.1,
    "choose": lambda observation: 1,
    "classes": 10,
    "cluster": pl.Cluster(4),
    "constants": pl.theory.Constants(L=1, c=0.5, sigma2=1),
    "data": dataset(),
    "draw": 1,
    "eta": 0.01,
    "etas": [0.01, 0.02],
    "every_s": 30.0,
    "experiment": "paceline",
    "factor": 2.0,
    "features": 4,
    "floor": 0.5,
    "H": 2,
    "hidden": 3,
    "image_size": 32,
    "job": tiny_job(),
    "k": 2,
    "kind": "word",
    "lambda0": 0.1,
    "distribution": LAW,
    "lead": 2,
    "L": 1.0,
    "c": 0.5,
    "loss": F.cross_entropy,
    "low_s": 1.0,
    "lr": 0.1,
    "high_s": 2.0,
    "max_staleness": 0,
    "mean_s": 1.0,
    "mean_off_s": 1.0,
    "mean_on_s": 1.0,
    "means_s": [1.0, 2.0],
    "median_s": 1.0,
    "model": small_net,
    "most": 4,
    "n": 4,
    "on_s": 1.0,
    "optimizer": torch.optim.SGD,
    "p_0": 1.0,
    "phases": (pl.plans.Phase(pl.bsp()),),
    "port": 0,
    "probabilities": [0.5, 0.5],
    "project": "paceline",
    "minibatches": 1,
    "piece": 2,
    "protocol": pl.bsp(),
    "protocols": [pl.bsp()],
    "quorum": 2,
    "r": 2,
    "reason": "why",
    "refill": "update",
    "repeats": True,
    "rule": "zero",
    "scale_s": 1.0,
    "schedule": {0: 1},
    "seconds": 1.0,
    "shape": 2.0,
    "shares": {0: 8},
    "shift_s": 1.0,
    "shortcut": lambda before, after, stride: torch.nn.Identity(),
    "sigma": 1.0,
    "sigma2": 1.0,
    "slowdown": 2.0,
    "stop": "updates=1",
    "sums": "updates",
    "text": "digits",
    "times_s": [1.0, 2.0],
    "total": 1.0,
    "unit": "updates",
    "updates": 1,
    "value_s": 1.0,
    "values_s": [1.0, 2.0],
    "width": 4,
    "worker": 0,
    "workers": [0],
}
OF_CALL = {
    "DelayedNesterov": {"momentum": 0.9, "every": 4},
    "Job": {"loss": F.cross_entropy},
    "Ray": {"workers": 2},
    "compare": {"protocols": ["bsp"], "processes": 1, "seeds": 1},
    "lr_range_test": {"protocol": "k_sync", "k": 1, "updates": 20, "runs": 1},
    "search_switch": {"settings": 1, "runs": 1, "processes": 1},
    "Trace": {
        "rows": [
            TraceRow(worker=0, draw=1, start_s=0.0, pull_s=0.0, compute_s=1.0, push_s=0.0, end_s=1.0, censored=False)
        ]
    },
    "Stop": {"updates": 1},
    "sync_switch": {"fraction": 0.25},
    "theory.variable_rate_error": {"etas": [0.01, 0.01]},
    "LinearSchedule": {},
}


def public():
    spaces = [("", getattr(pl, name)) for name in NAMESPACES]
    for prefix, module in [("", pl), ("theory.", pl.theory), ("jobs.", pl.jobs), *spaces]:
        for name in module.__all__:
            called = getattr(module, name)
            if callable(called) and f"{prefix}{name}" not in READ_ONLY:
                yield f"{prefix}{name}", called


CALLS = dict(public())


def parameters(called):
    return {
        name: parameter
        for name, parameter in inspect.signature(called).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }


def arguments(name, called, tmp_path):
    given = {each: VALID[each] for each, p in parameters(called).items() if p.default is p.empty and each in VALID}
    if "out" in parameters(called):
        given["out"] = tmp_path / "out"
    if name in {"Timeline", "TensorBoard"}:
        given = {next(iter(parameters(called))): tmp_path / "file"}
    if name in {"advise", "estimate_constants", "replay"}:
        given["run"] = tmp_path / "nowhere"
    if name == "advise_recording":
        given["recording"] = tmp_path / "nowhere"
    if name == "balance":
        given["model"] = torch.nn.Linear(1, 1)
    if name == "attach":
        model = torch.nn.Linear(1, 1)
        loader = torch.utils.data.DataLoader([torch.ones(1)], batch_size=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given |= {"model": model, "optimizer": optimizer, "loader": loader, "protocol": "bsp"}
    return given | OF_CALL.get(name, {})


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_type_is_a_usage_error(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    is_large = name.startswith(("jobs.vgg", "jobs.resnet"))
    with torch.device("meta") if is_large else nullcontext():  # a model without its values
        assert [wrong for argument in parameters(CALLS[name]) for wrong in accepted(name, argument, tmp_path)] == []


def accepted(name, argument, tmp_path):
    """Yield each value of a wrong type that is not refused by a message with the argument's name."""
    called = CALLS[name]
    given = arguments(name, called, tmp_path)
    hint = str(parameters(called)[argument].annotation)
    for kind, wrong in WRONG.items():
        if (argument, kind) in RIGHT or (kind in CALLABLE and ("Callable" in hint or "Watch" in hint)):
            continue  # right, and what fails then is the user's function
        try:
            if parameters(called)[argument].kind is inspect.Parameter.VAR_POSITIONAL:
                called(wrong)
            else:
                called(**{**given, argument: wrong})
        except pl.UsageError as refusal:
            is_named = argument in str(refusal)
        except pl.RunError:
            is_named = False
        else:
            is_named = "Any" in hint
        if not is_named and kind in NEVER_RIGHT:
            yield f"{argument}={wrong!r}"


def test_a_tuple_of_fixed_length_has_a_type_per_position():
    assert "nll" in str(pl.Stop(metric=("nll", "<=", 1.4)))
    with pytest.raises(pl.UsageError, match=r"Stop: metric\[2\]='low', expected a number"):
        pl.Stop(metric=("nll", "<=", "low"))
    with pytest.raises(pl.UsageError, match=r"Stop: metric.*expected \(text, '<=' or '>=', a number\)"):
        pl.Stop(metric=("nll", 1.4))


def test_numpy_scalars_are_numbers_and_a_bool_is_not():
    assert pl.Cluster(np.int64(4), speed=np.float64(2.0)).n == 4
    with pytest.raises(pl.UsageError, match=r"Cluster: n=True, expected a whole number"):
        pl.Cluster(True)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: pl.Cluster(4, faults=[pl.Fault(worker=0, draw=1), 1]), "Cluster: faults[1]=1, expected a pl.Fault"),
        (lambda: pl.simulate(pl.bsp, pl.Cluster(2), updates=1), "call it: bsp(...)"),
        (
            lambda: pl.Fault(worker=0, draw=1, kind="dye"),
            "Fault: kind='dye', expected 'die', 'raise', 'hang' or 'not_finite'",
        ),
        (lambda: pl.controllers.ScheduledQuorum({0: "x"}), "ScheduledQuorum: schedule[0]='x', expected a whole number"),
        (lambda: pl.timing.Exponential("x" * 999), f"mean_s='{'x' * 27}...{'x' * 28}', expected a number"),
        (lambda: parse_cluster("4*exp(mean=fast)"), "exp: mean='fast', expected a number"),
    ],
)
def test_the_message_names_the_given_and_the_expected_value(wrong, words):
    with pytest.raises(pl.UsageError, match=re.escape(words)):
        wrong()


def test_a_folder_named_by_a_number_must_be_text():
    with pytest.raises(pl.UsageError, match=r"cannot read .*2024"):
        pl.jobs.load_job("mnist(folder=2024)")


def test_true_is_not_a_folder_name():
    with pytest.raises(pl.UsageError, match="folder=True, expected "):
        pl.jobs.load_job("mnist(folder=true)")
