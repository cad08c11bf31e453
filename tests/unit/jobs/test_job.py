"""A job made of what users have: a DataLoader, a factory over the model, a schedule by updates or samples."""

import pickle
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    default_collate,
)

import paceline as pl
from paceline.errors import PacelineWarning
from paceline.jobs.job import trainable
from paceline.server.optimizer import make_optimizer
from paceline.worker.data_loader import eval_batches
from selections import each_value_once, parametrize_few
from tiny_jobs import batch_norm_net, dataset, parameters_of, sgd, small_net, tiny_job

DATA = dataset()


def job_of(**changes):
    """Return the job of these parts and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job = tiny_job(**{"batch_size": 0, **changes})
    assert all(warning.category is PacelineWarning for warning in caught)
    return job, [str(warning.message) for warning in caught]


def trained(job, protocol="bsp", n=3, updates=6):
    return parameters_of(pl.train(job, protocol=protocol, cluster=pl.Cluster(n), stop=pl.Stop(updates=updates)).model)


def joined(samples):
    return default_collate(samples)


def test_the_parts_of_a_loader_are_used():
    loader = DataLoader(DATA, 16, shuffle=True, drop_last=True, collate_fn=joined, num_workers=2, prefetch_factor=3)
    job, said = job_of(data=loader, sampling="epoch", eval_data=DataLoader(DATA, 32, collate_fn=joined))
    assert said == []
    assert (job.data, job.batch_size, job.collate, job.loader_workers, job.prefetch) == (DATA, 16, joined, 2, 3)
    assert (job.eval_data, job.eval_batch_size) == (DATA, 32)
    assert pickle.loads(pickle.dumps(job)).batch_size == 16


def test_a_loader_trains_like_its_parts():
    job, _ = job_of(data=DataLoader(DATA, 16, shuffle=True, drop_last=True), sampling="epoch")
    assert torch.equal(trained(job), trained(tiny_job(batch_size=16, sampling="epoch")))


LEFT_OUT = {
    "sequential": ({"data": DataLoader(DATA, 8)}, "shuffle=False (minibatches are drawn at random)"),
    "shuffled": ({"data": DataLoader(DATA, 8, shuffle=True)}, "for shuffled epochs give sampling='epoch'"),
    "last": ({"data": DataLoader(DATA, 10, shuffle=True), "sampling": "epoch"}, "drop_last=False (an epoch leaves out"),
    "pinned": ({"data": DataLoader(DATA, 8, pin_memory=True)}, "pin_memory=True"),
    "initialised": ({"data": DataLoader(DATA, 8, worker_init_fn=print)}, "worker_init_fn"),
    "generator": (
        {"data": DataLoader(DATA, 8, generator=torch.Generator())},
        "generator (the seed of the run is used)",
    ),
    "distributed": ({"data": DataLoader(DATA, 8, sampler=DistributedSampler(DATA, 2, 0))}, "its DistributedSampler"),
    "own size": (
        {"data": DataLoader(DATA, 8), "batch_size": 16},
        "its batch_size 8 (the job's own batch_size=16 is used)",
    ),
    "evaluation": ({"data": DATA, "batch_size": 8, "eval_data": DataLoader(DATA, 8, drop_last=True)}, "drop_last=True"),
    "shuffled evaluation": (
        {"data": DATA, "batch_size": 8, "eval_data": DataLoader(DATA, 8, shuffle=True)},
        "in order",
    ),
}


@pytest.mark.parametrize(("changes", "words"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_what_a_job_ignores_of_a_loader_is_a_warning(changes, words):
    job, [said] = job_of(**changes)
    assert said.startswith(
        f"job tiny: {'eval_data' if 'eval_data' in changes else 'data'} is a DataLoader; the job ignores"
    )
    assert words in said
    assert job.batch_size == changes.get("batch_size", changes["data"].batch_size if "batch_size" not in changes else 0)


class OwnOrder(SequentialSampler):
    """Sampler whose base class does not say its order."""

    def __iter__(self):
        return iter(range(len(self.data_source))[::-1])


class OwnPart(DistributedSampler):
    """Sampler for the part of one rank, in another order."""


OWN_BATCHES = DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 8, drop_last=True))
OWN_BATCHES_OF_ANOTHER_KIND = DataLoader(DATA, batch_sampler=[[0, 1], [2]])
PART = SubsetRandomSampler(range(40))
REFUSED = {
    "batch_size=None": (
        {"data": DataLoader(DATA, batch_size=None)},
        "with batch_size=None, but a job makes minibatches",
    ),
    "batch_sampler": ({"data": OWN_BATCHES_OF_ANOTHER_KIND}, "with batch_sampler=list, but a job makes minibatches"),
    "sampler": (
        {"data": DataLoader(DATA, 8, sampler=PART)},
        "SubsetRandomSampler, which orders epochs; give sampling='epoch'",
    ),
    "draws": (
        {"data": DataLoader(DATA, 8, sampler=RandomSampler(DATA, replacement=True, num_samples=24))},
        "RandomSampler, which orders epochs; give sampling='epoch'",
    ),
    "own order": (
        {"data": DataLoader(DATA, 8, sampler=OwnOrder(DATA))},
        "OwnOrder, which orders epochs; give sampling='epoch'",
    ),
    "own part": (
        {"data": DataLoader(DATA, 8, sampler=OwnPart(DATA, 2, 0)), "sampling": "epoch"},
        "OwnPart, which selects the samples of one rank",
    ),
    "evaluation of some": (
        {"data": DATA, "batch_size": 8, "eval_data": DataLoader(DATA, 8, sampler=RandomSampler(DATA, num_samples=9))},
        "a RandomSampler, but evaluation reads every sample",
    ),
    "evaluation sampler": (
        {"data": DATA, "batch_size": 8, "eval_data": DataLoader(DATA, 8, sampler=PART)},
        "evaluation reads every sample; give eval_data=torch.utils.data.Subset",
    ),
    "collate": (
        {"data": DATA, "batch_size": 8, "eval_data": DataLoader(DATA, 8, collate_fn=joined)},
        "another collate_fn than the training data; give both the same collate_fn",
    ),
    "no batch size": (
        {"data": DATA},
        "batch_size = 0, expected a whole number >= 1; it is optional only if data is",
    ),
    "loader_workers": ({"data": DATA, "batch_size": 8, "loader_workers": -1}, "loader_workers = -1, expected a whole"),
    "prefetch": ({"data": DATA, "batch_size": 8, "prefetch": 0}, "prefetch = 0, expected a whole number >= 1"),
    "eval_batch_size": (
        {"data": DATA, "batch_size": 8, "eval_batch_size": -1},
        "eval_batch_size = -1, expected",
    ),
}


@pytest.mark.parametrize(("changes", "words"), REFUSED.values(), ids=REFUSED)
def test_unsupported_loaders_are_refused(changes, words):
    with pytest.raises(pl.UsageError) as refusal:
        job_of(**changes)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("sampler", "minibatches"),
    [
        (PART, 5),
        (RandomSampler(DATA, replacement=True, num_samples=24), 3),
        (RandomSampler(DATA, num_samples=16), 2),
        (RandomSampler(DATA, replacement=True), 12),
        (OwnOrder(DATA), 12),
        (SequentialSampler(range(16)), 2),
    ],
)
def test_the_sampler_of_a_loader_orders_epochs(sampler, minibatches):
    job, _ = job_of(data=DataLoader(DATA, 8, sampler=sampler, drop_last=True), sampling="epoch")
    assert job.sampler is sampler
    assert job.minibatches_per_epoch() == minibatches


def test_draws_with_replacement_are_those_of_the_job():
    job, said = job_of(data=DataLoader(DATA, 8, sampler=RandomSampler(DATA, replacement=True)))
    assert (job.sampler, said) == (None, [])


@pytest.mark.parametrize(("eval_batch_size", "expected"), [(0, [8, 8, 8, 1]), (20, [20, 5])])
def test_evaluation_has_a_batch_size_of_its_own(eval_batch_size, expected):
    job = tiny_job(eval_data=Subset(DATA, range(25)), eval_batch_size=eval_batch_size)
    assert [len(target) for _, target in eval_batches(job)] == expected


# --- the optimizer's factory ------------------------------------------------------------------------------


def of_model(model):
    return torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[1:].parameters()}], lr=0.1
    )


def of_named_parameters(named_parameters):
    return torch.optim.AdamW(named_parameters, lr=0.1)


NEEDS_NAMES = pytest.mark.skipif(torch.__version__ < (2, 6), reason="optimizers of this version of torch have no names")


def of_parameters(parameters):
    groups = list(parameters)
    return torch.optim.AdamW(groups, lr=0.1)


def in_two_groups(parameters):
    first, *others = parameters
    return torch.optim.AdamW([{"params": [first], "lr": 0.01}, {"params": others}], lr=0.1)


def one_of(factory):
    model = batch_norm_net()
    model[0].bias.requires_grad_(requires_grad=False)
    job = tiny_job(model=batch_norm_net, optimizer=factory, no_decay_on=pl.jobs.BATCH_NORMS)
    return model, make_optimizer(job, trainable(model), model)


@pytest.mark.parametrize(
    "factory", [of_model, pytest.param(of_named_parameters, marks=NEEDS_NAMES), of_parameters, sgd()]
)
def test_normalization_layers_have_no_weight_decay(factory):
    model, optimizer = one_of(factory)
    decayed = {id(each) for group in optimizer.param_groups if group["weight_decay"] for each in group["params"]}
    held = [id(each) for group in optimizer.param_groups for each in group["params"]]
    assert len(held) == len(set(held))
    assert {id(each) for each in trainable(model)} <= set(held)
    assert not decayed & {id(model[1].weight), id(model[1].bias)}
    assert {group["lr"] for group in optimizer.param_groups if group["lr"] == 0.01} == (
        {0.01} if factory is of_model else set()
    )
    for group in optimizer.param_groups:
        assert len(group.get("param_names", group["params"])) == len(group["params"])


@NEEDS_NAMES
@parametrize_few("protocol", ["bsp", "all_reduce", "dc_s3gd"], keep=1)
def test_a_factory_over_the_model_trains_like_one_over_its_parameters(protocol):
    expected = trained(tiny_job(optimizer=of_parameters), protocol)
    assert torch.equal(trained(tiny_job(optimizer=of_named_parameters), protocol), expected)
    assert not torch.equal(trained(tiny_job(optimizer=of_model), protocol), expected)


@pytest.mark.parametrize(
    "factory", [of_model, pytest.param(of_named_parameters, marks=[NEEDS_NAMES, pytest.mark.slow])]
)
def test_a_run_of_such_a_factory_is_resumed(factory, tmp_path):
    job = tiny_job(model=batch_norm_net, optimizer=factory, no_decay_on=pl.jobs.BATCH_NORMS)
    settings = {"protocol": "bsp", "cluster": pl.Cluster(2)}
    pl.train(job, stop="updates=4", out=tmp_path / "run", **settings)
    resumed = pl.train(job, stop="updates=8", resume=tmp_path / "run", **settings)
    assert torch.equal(parameters_of(resumed.model), parameters_of(pl.train(job, stop="updates=8", **settings).model))


@NEEDS_NAMES
def test_only_trainable_parameters_have_names():
    _, optimizer = one_of(of_named_parameters)
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(names) == ["0.weight", "1.bias", "1.weight", "3.bias", "3.weight"]


# --- the schedule's unit ----------------------------------------------------------------------------------


def halved(optimizer, every):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=every, gamma=0.5)


UNITS = {"update": (4, 12), "gradient": (12, 12), "sample": (96, 12), "epoch": (1, 12)}


@parametrize_few(
    ("protocol", "unit"), each_value_once(["bsp", "asp", "k_async(k=2)", "all_reduce", "dc_s3gd"], list(UNITS)), keep=1
)
def test_equivalent_units_give_the_same_schedule(protocol, unit):
    steps, _ = UNITS[unit]
    job = tiny_job(scheduler=partial(halved, every=steps), schedule_unit=unit, sampling="epoch")  # epochs of 12
    expected = tiny_job(scheduler=partial(halved, every=12), sampling="epoch")
    assert torch.equal(trained(job, protocol, n=3, updates=20), trained(expected, protocol, n=3, updates=20))


def test_an_update_of_the_schedule_is_one_of_bsp():
    rates = []

    class Rates(pl.callbacks.Callback):
        def on_update(self, update):
            rates.append(update.learning_rate)

    job = tiny_job(optimizer=sgd(lr=1.0), scheduler=partial(halved, every=2), schedule_unit="update")
    pl.train(job, protocol="bsp", cluster=pl.Cluster(3), stop="updates=5", callbacks=[Rates()])
    assert sorted(set(rates), reverse=True) == [1.0, 0.5, 0.25]


def test_models_without_normalization_layers_are_unchanged():
    job = tiny_job(no_decay_on=pl.jobs.BATCH_NORMS, optimizer=in_two_groups)
    model = small_net()
    assert len(make_optimizer(job, trainable(model), model).param_groups) == 2
    assert isinstance(model, nn.Sequential)
