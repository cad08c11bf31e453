"""States that someone has changed, with right sums: a resume refuses them in a sentence, or goes on."""

import json
import random
import shutil
import warnings
from copy import deepcopy
from functools import partial
from hashlib import sha256

import pytest
import torch

import paceline as pl
from paceline.checkpoint.store import STATE, SUMS, TENSORS
from paceline.recording.run_folder import CHECKPOINTS
from selections import parametrize_few
from tiny_jobs import dataset, tiny_job

ADAM = {"optimizer": partial(torch.optim.AdamW, lr=0.01), "eval_data": dataset(16)}
EPOCHS = {"sampling": "epoch"}
RUNS = {
    "k_sync(k=2)": {},
    "asp": {},
    "ssp(lead=2)": {},
    "dbw": {},
    "auto": {},
    "bsp@updates=5 >> asp": {},
    "k_batch_sync(k=3)": EPOCHS,
    "bsp + local_steps(H=2)": EPOCHS,
    "k_async(k=2)": ADAM,
    "all_reduce": {},
    "dc_s3gd": {},
}
OFTEN = ("k_sync(k=2)", "k_async(k=2)", "bsp + local_steps(H=2)")
VALUES = [None, True, -1, 0, 3, 2**62, -(2**70), 1e308, -0.5, "x", "\x1b[2J", [], {}, [1], {"a": 1}]
VALUES += [{"$float": "nan"}, {"$float": "inf"}, {"$tuple": []}, {"$set": []}, {"$dict": []}, {"$counter": []}]
VALUES += [{"$Timer": {"now": 1.0}}, {"$array": ["float64", [1], [0.0]]}, {"$array": ["object", [1], [0.0]]}]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Return a function that returns job, options and folder of a run that can be resumed."""
    made = {}

    def make(protocol):
        if protocol not in made:
            job, folder = tiny_job(**RUNS[protocol]), tmp_path_factory.mktemp("stopped") / "run"
            options = {"protocol": protocol, "cluster": pl.Cluster(3, timing=pl.timing.Exponential(1.0)), "seed": 1}
            pl.train(job, stop="updates=20", out=folder, keep_checkpoints=1, **options)
            made[protocol] = job, options, folder
        return made[protocol]

    return make


def forged(folder, change, to):
    """Copy the folder of a run, change its state, and write sums that are right."""
    shutil.copytree(folder, to)
    [checkpoint] = (to / CHECKPOINTS).glob("*-update-*")
    content = json.loads((checkpoint / STATE).read_bytes())
    change(content["state"])
    data = {STATE: json.dumps(content).encode(), TENSORS: (checkpoint / TENSORS).read_bytes()}
    (checkpoint / STATE).write_bytes(data[STATE])
    (checkpoint / SUMS).write_text("".join(f"{sha256(each).hexdigest()}  {name}\n" for name, each in data.items()))
    return to


def resumed(job, options, folder, **more):
    """Resume a run; return the sentence of a refusal, empty if it goes on. Another error fails the test."""
    sentence = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pl.train(job, resume=folder, stop="updates=25", **{**options, **more})
    except pl.PacelineError as error:
        sentence = str(error)
    assert len(sentence) < 1500
    assert "\x1b" not in sentence
    return sentence


def places(value, path=()):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield (*path, key)
        yield from places(each, (*path, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


def changed_at_random(draw, state):
    """Remove an entry, replace it by another value, or by one of another entry."""
    every = list(places(state))
    *above, last = draw.choice(every)
    match draw.randrange(4):
        case 0:
            del at(state, above)[last]
        case 1:
            at(state, above)[last] = deepcopy(at(state, draw.choice(every)))
        case _:
            at(state, above)[last] = draw.choice(VALUES)


PROTOCOLS = [each if each in OFTEN else pytest.param(each, marks=pytest.mark.slow) for each in RUNS]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("rounds", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_a_forged_state_is_refused_in_a_sentence_or_goes_on(protocol, rounds, stopped, tmp_path):
    draw = random.Random(f"{protocol}{rounds}")
    job, options, folder = stopped(protocol)
    for number in range(rounds):
        changes = {"protocol": "asp", "allow_change": True} if RUNS[protocol] == {} and draw.random() < 0.3 else {}
        work = forged(folder, partial(changed_at_random, draw), tmp_path / f"{number}")
        resumed(job, options, work, **changes)
        shutil.rmtree(work)


FORGED = {  # of each a traceback was seen
    "no update": ("asp", ("coordinator", "update"), ...),
    "a quorum that no update reaches": (
        "k_batch_sync(k=3)",
        ("coordinator", "update", "_of_protocol", "$tuple", 0),
        {"$float": "nan"},
    ),
    "a part is missing": ("asp", ("coordinator", "is_limited"), ...),
    "counts that are a number": ("asp", ("engine", "totals", "staleness"), 0.5),
    "a worker that is a set": ("asp", ("engine", "_heap", 0, "$tuple", 2), {"$set": []}),
    "a reason that is no text": ("asp", ("coordinator", "update", "_closed_because"), 17),
    "a learning rate that is an event": ("asp", ("server", "optimizer", "param_groups", 0, "lr"), VALUES[-3]),
    "a momentum that is a number": ("asp", ("server", "optimizer", "state", "$dict", 0, 1, "momentum_buffer"), 3),
    "a moment that is missing": ("k_async(k=2)", ("server", "optimizer", "state", "$dict", 0, 1, "exp_avg_sq"), ...),
    "betas beyond 1": ("k_async(k=2)", ("server", "optimizer", "param_groups", 0, "betas"), [0.9, 2.0]),
    "betas that are a text": ("k_async(k=2)", ("server", "optimizer", "param_groups", 0, "betas"), "x"),
    "times that are missing": (
        "dbw",
        ("coordinator", "phases", "controllers", 0, "times", "durations", "newest"),
        None,
    ),
    "a long identity": ("asp", ("configuration", "identity", "lr_is"), "\x1b" * 100_000),
    "no group": (
        "bsp + local_steps(H=2)",
        ("engine", "optimizers", "$dict", 0, 1, "after", "optimizer", "param_groups"),
        [],
    ),
}


@parametrize_few("name", FORGED, keep=6)
def test_a_state_that_no_run_has_written_is_refused(name, stopped, tmp_path):
    protocol, (*above, last), value = FORGED[name]
    job, options, folder = stopped(protocol)

    def change(state):
        if value is ...:
            del at(state, above)[last]
        else:
            at(state, above)[last] = value

    sentence = resumed(job, options, forged(folder, change, tmp_path / "run"))
    assert (
        "it was damaged or changed" in sentence or "was damaged or changed, or" in sentence or "another job" in sentence
    )
