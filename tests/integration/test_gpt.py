"""BSP is the loop that it replaces, for a job as users have them: a small GPT with everything that goes with it."""

from dataclasses import replace
from statistics import stdev

import pytest
import torch

import paceline as pl
from paceline.utils.confidence_intervals import paired_difference
from paceline.worker.evaluation import evaluate
from selections import parametrize_few
from tiny_gpt import GPT, WORKERS, double_gpt, gpt_job, plain_gpt
from tiny_jobs import parameters_of

CLUSTER = pl.Cluster(WORKERS, timing=pl.timing.LogNormal(1.0, 1.0))
UPDATES = 50
FEWER_UPDATES = 16
BF16 = 2.0**-8  # its relative rounding


def bsp(job, seed, updates=UPDATES):
    return pl.train(job, protocol="bsp", cluster=CLUSTER, stop=pl.Stop(updates=updates), seed=seed).model


def relative(ours, theirs):
    return float(torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs))


def final_losses(job, seed):
    """Return the evaluated loss after BSP and after the plain loop, on the same crops."""
    return [evaluate(job, model, seed)["loss"] for model in (bsp(job, seed), plain_gpt(job, seed, UPDATES))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "updates", "bar"),
    [(GPT, UPDATES, 1e-5), (double_gpt, FEWER_UPDATES, 1e-12)],
    ids=["float32", "float64"],
)
def test_the_parameters_are_those_of_the_loop(model, updates, bar):
    job = gpt_job(updates, model=model)
    ours, theirs, begun = (
        parameters_of(each) for each in (bsp(job, 3, updates), plain_gpt(job, 3, updates), plain_gpt(job, 3, 0))
    )
    assert relative(begun, theirs) > 0.01  # it has learnt
    print(f"relative difference of the parameters after {updates} updates: {relative(ours, theirs):.2g}")
    assert relative(ours, theirs) < bar


@pytest.mark.slow
@parametrize_few(
    "change",
    [{"clip_norm": None}, {"microbatches": 1}, {"scheduler": None}],
    keep=1,
    ids=lambda change: next(iter(change)),
)
def test_an_omitted_part_changes_the_parameters(change):
    """The proof is none if it would not fail without one of the parts."""
    job = gpt_job(UPDATES, model=double_gpt)
    ours, theirs = (parameters_of(each) for each in (bsp(replace(job, **change), 3, 5), plain_gpt(job, 3, 5)))
    assert relative(ours, theirs) > 1e-6


@pytest.mark.slow
def test_with_bf16_the_losses_of_five_seeds_differ_by_its_rounding():
    job = gpt_job(UPDATES, autocast=True)
    losses = {seed: final_losses(job, seed) for seed in range(5)}
    ours, theirs = ({seed: pair[i] for seed, pair in losses.items()} for i in (0, 1))
    interval = paired_difference(theirs, ours)
    print(f"BSP minus the loop over 5 paired seeds, in nats: {interval.estimate:+.2g}, ", end="")
    print(f"95 % interval {interval.low:+.2g} to {interval.high:+.2g}; spread of seeds {stdev(ours.values()):.2g}")
    assert interval.contains(0) or abs(interval.estimate) < BF16
    assert max(abs(interval.low), abs(interval.high)) < BF16
    assert torch.isfinite(torch.tensor(list(ours.values()))).all()
