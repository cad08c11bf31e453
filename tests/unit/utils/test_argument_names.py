"""Errors of calls in Python: misspelled arguments, arguments without a name, and what to type instead."""

import pytest

import paceline as pl
from tiny_jobs import tiny_job

CLUSTER = pl.Cluster(4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pl.train(tiny_job(), updates=3), "train has no argument 'updates'; did you mean 'stop'?"),
        (lambda: pl.train(tiny_job(), worker_timeout=3), "did you mean 'worker_timeout_s'?"),
        (lambda: pl.k_sync(K=4), "k_sync has no argument 'K'; did you mean 'k'?"),
        (lambda: pl.ssp(max_lead=4), "ssp has no argument 'max_lead'; did you mean 'lead'?"),
        (lambda: pl.bsp(k=4), "bsp has no argument 'k'; it takes no arguments"),
        (lambda: pl.bsp().until(update=4), "until has no argument 'update'; did you mean 'updates'?"),
        (lambda: pl.Torchrun(slices=2), "Torchrun has no argument 'slices'; did you mean 'shards'?"),
        (lambda: pl.Torchrun(silence_s=2), "no argument 'silence_s'; did you mean 'heartbeat_timeout_s'?"),
        (
            lambda: pl.train(tiny_job(), "bsp", CLUSTER),
            "but 3 were given; type protocol=..., cluster=... and stop=...",
        ),
        (
            lambda: pl.Fault(1, 2),
            "Fault takes no arguments without a name, but 2 were given; type worker=... and draw=...",
        ),
    ],
)
def test_an_argument_that_does_not_exist_is_a_type_error_with_the_one_that_does(call, message):
    with pytest.raises(TypeError) as error:
        call()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pl.train("digits"), "train: job='digits', expected a pl.Job, for example pl.jobs.digits()"),
        (lambda: pl.Cluster(4, faults=3), "expected a list of pl.Fault, for example [pl.Fault(worker=0, draw=3)]"),
        (lambda: pl.Stop(updates=float("nan")), "Stop: updates=nan, expected a whole number"),
        (lambda: pl.bsp().until("half"), "until: fraction='half', expected a number"),
        (
            lambda: pl.bsp().until(),
            "expected exactly one of fraction, updates, gradients, epochs, seconds, for example",
        ),
        (lambda: pl.ssp(-1), "ssp(lead=-1): lead = -1, expected a whole number >= 0"),
        (lambda: pl.plans.Plan(()), "phases=() has no phase; type for example pl.bsp().until(0.25) >> pl.asp()"),
        (lambda: pl.simulate("bsp", CLUSTER, updates=0), "updates=0 is not a whole number in [1, inf)"),
        (lambda: pl.simulate("bsp", CLUSTER, updates=1, seed=-1), "seed=-1 is not a whole number in [0, inf)"),
        (
            lambda: pl.simulate("bsp", CLUSTER, updates=1, payload_bytes=-1),
            "payload_bytes=-1 is not a number in [0, inf)",
        ),
        (
            lambda: pl.train(tiny_job(), protocol="bsp", cluster=CLUSTER, stop="updates=1", seed=-1),
            "seed=-1 is not a whole number in [0, inf)",
        ),
        (
            lambda: pl.compare(tiny_job(), protocols="bsp", cluster=CLUSTER, stop="updates=1", price=-1),
            "price=-1 is not a number in [0, inf)",
        ),
        (
            lambda: pl.compare(tiny_job(), protocols="bsp", cluster=CLUSTER, stop="updates=1", out=__file__),
            "is a file; give another folder with out=, or remove the file",
        ),
    ],
)
def test_a_wrong_value_is_a_usage_error_with_what_to_type(call, message):
    with pytest.raises(pl.UsageError) as error:
        call()
    assert message in str(error.value)


def test_a_misspelled_name_of_the_package_is_answered_with_the_nearest():
    with pytest.raises(AttributeError, match=r"paceline has no 'Trane'; did you mean 'timing\.Trace'"):
        _ = pl.Trane
