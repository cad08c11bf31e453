"""Algorithms without a server against the paper's own lines, plain loops and closed forms, in simulated time."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from paceline.catalogue.parser import parse_plan
from paceline.core.records import VersionEvaluated
from paceline.policies.compensation.delay import DCS3GD
from paceline.server.flat_buffers import FlatLayout
from paceline.server.parameter_server import ParameterServer
from paceline.worker.allreduce import make_algorithm
from paceline.worker.data_loader import MinibatchLoader
from paceline.worker.torch_utils import build_model
from tiny_jobs import (
    batch_norm_net,
    dataset,
    largest_relative_difference,
    parameters_of,
    plain_loop,
    sgd,
    tiny_job,
    update_of,
)

N = 4
ITERATIONS = 50
RATE, MOMENTUM, DECAY = 0.05, 0.9, 0.01
QUICKLY = {"cluster": "4*exp(mean=1)", "stop": "updates=1"}
ALGORITHMS = ("all_reduce", "local_sgd(H=3)", "s3gd", "dc_s3gd")


def trained(protocol, job, n=N, updates=ITERATIONS, seed=3, **cluster):
    simulated = pl.Cluster(n, timing=pl.Exponential(1.0), **cluster)
    return pl.train(job, protocol=protocol, cluster=simulated, stop=pl.Stop(updates=updates), seed=seed)


# --- Algorithm 1, line by line, in numpy -------------------------------------------------------------------------


def softmax_error(scores, target):
    """Return the derivative of the mean cross entropy by the scores."""
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    shares[np.arange(len(target)), target] -= 1
    return shares / len(target)


def gradient_of_squares(weights, x, y):
    matrix, bias = weights[:5].reshape(1, 5), weights[5:]
    error = 2 * ((x @ matrix.T + bias)[:, 0] - y) / len(y)
    return np.concatenate([error @ x, [error.sum()]])


def gradient_of_softmax(weights, x, y):
    matrix, bias = weights[:15].reshape(3, 5), weights[15:]
    error = softmax_error(x @ matrix.T + bias, y)
    return np.concatenate([(error.T @ x).ravel(), error.sum(axis=0)])


def gradient_of_net(weights, x, y):
    first, first_bias, second, second_bias = np.split(weights, np.cumsum([40, 8, 24]))
    hidden = np.tanh(x @ first.reshape(8, 5).T + first_bias)
    error = softmax_error(hidden @ second.reshape(3, 8).T + second_bias, y)
    below = error @ second.reshape(3, 8) * (1 - hidden**2)
    return np.concatenate([(below.T @ x).ravel(), below.sum(axis=0), (error.T @ hidden).ravel(), error.sum(axis=0)])


def algorithm_1(gradient, lambda0, weights, minibatch, n, iterations):
    """Return the average weights after so many all-reduces, as Algorithm 1 has them with eq. (17).

    The update U is that of SGD with momentum, with the weight decay of the average weights.
    """
    own = [weights.copy() for _ in range(n)]
    average = weights.copy()
    velocity = [np.zeros_like(weights) for _ in range(n)]

    def update(i, g):
        velocity[i] = MOMENTUM * velocity[i] + g + DECAY * average
        return -RATE * velocity[i]

    delta = [update(i, gradient(own[i], *minibatch(i, 1))) for i in range(n)]
    own = [own[i] + delta[i] for i in range(n)]
    for t in range(1, iterations + 1):
        g = [gradient(own[i], *minibatch(i, t + 1)) for i in range(n)]
        total = sum(delta)
        average = average + total / n
        for i in range(n):
            distance = total / n - delta[i]
            product = g[i] * g[i] * distance
            length = np.linalg.norm(product)
            lambda_i = lambda0 * np.linalg.norm(g[i]) / length if length else 0.0
            delta[i] = update(i, g[i] + lambda_i * product)
            own[i] = own[i] + distance + delta[i]
    return average


def squares_net():
    return nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)).double()


def softmax_net():
    return nn.Linear(5, 3).double()


def squares(scores, target):
    return F.mse_loss(scores, target.double())


def decaying(parameters):
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)


MODELS = {
    "least squares": ({"model": squares_net, "loss": squares}, gradient_of_squares),
    "softmax": ({"model": softmax_net}, gradient_of_softmax),
    "a net": ({}, gradient_of_net),
}


@pytest.mark.parametrize("lambda0", [0.2, 0.0, 1.0])
@pytest.mark.parametrize("model", MODELS)
def test_dc_s3gd_is_algorithm_1(model, lambda0):
    changes, gradient = MODELS[model]
    job = tiny_job(optimizer=decaying, **changes)
    ours = trained(pl.dc_s3gd(lambda0=lambda0), job)
    loader = MinibatchLoader(job, 3, N)

    def minibatch(worker, draw):
        inputs, target = loader.batch(worker, draw, None)
        return inputs.numpy(), target.numpy()

    begin = parameters_of(build_model(job, 3)).numpy()
    theirs = torch.from_numpy(algorithm_1(gradient, lambda0, begin, minibatch, N, ITERATIONS))
    assert largest_relative_difference(parameters_of(ours.model), theirs) < 1e-12


def test_every_correction_but_the_first_is_in_the_log_and_lambda0_times_as_long_as_its_gradient(tmp_path):
    run = pl.train(
        tiny_job(), protocol="dc_s3gd", cluster="4*exp(mean=1)", stop="updates=5", out=tmp_path / "run"
    ).history
    done = [[factor for _, factor in record.compensations] for record in run.of(pl.GradientArrived)]
    assert done[:N] == [[]] * N
    assert all(len(factors) == 1 and factors[0] > 0 for factors in done[N:])


# --- against plain loops -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 4, 5])
def test_all_reduce_is_plain_synchronous_sgd(n):
    job = tiny_job(optimizer=decaying)
    plain = plain_loop(job, 3, n, ITERATIONS)
    ours = trained("all_reduce", job, n)
    assert largest_relative_difference(parameters_of(ours.model), parameters_of(plain)) < 1e-12


@pytest.mark.parametrize("protocol", ["dc_s3gd", "s3gd", "local_sgd(H=1)", "local_sgd(H=7)"])
def test_a_worker_alone_is_plain_sgd(protocol):
    job = tiny_job(optimizer=decaying)
    plain = plain_loop(job, 3, 1, ITERATIONS)
    ours = trained(protocol, job, n=1)
    assert largest_relative_difference(parameters_of(ours.model), parameters_of(plain)) < 1e-13


def test_updates_without_overlap_and_correction_are_plain_sgd():
    job = tiny_job(optimizer=decaying)
    plain = plain_loop(job, 3, N, ITERATIONS)
    blocking = replace(pl.bsp().until(0.5), end=None, allreduce=pl.AllReduceConfig("updates"))
    ours = trained(blocking, job)
    assert largest_relative_difference(parameters_of(ours.model), parameters_of(plain)) < 1e-12


def test_local_sgd_takes_the_average_every_h_gradients_and_its_end_is_one():
    job, period, updates = tiny_job(optimizer=decaying), 4, 22
    models = [build_model(job, 3) for _ in range(N)]
    optimizers = [decaying(model.parameters()) for model in models]
    loader = MinibatchLoader(job, 3, N)
    for draw in range(1, updates + 1):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            inputs, target = loader.batch(worker, draw, None)
            optimizer.zero_grad()
            job.loss(model(inputs), target).backward()
            optimizer.step()
        if draw % period == 0 or draw == updates:
            average = torch.stack([nn.utils.parameters_to_vector(model.parameters()) for model in models]).mean(0)
            for model in models:
                nn.utils.vector_to_parameters(average.detach().clone(), model.parameters())
    ours = trained(f"local_sgd(H={period})", job, updates=updates)
    assert largest_relative_difference(parameters_of(ours.model), average.detach()) < 1e-12


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_the_update_of_any_optimizer_is_the_difference_that_it_makes_to_the_average(optimizer):
    job = tiny_job(optimizer=partial(optimizer, lr=1e-2, weight_decay=DECAY))
    loader, at, stepped = MinibatchLoader(job, 3, N), build_model(job, 3), [build_model(job, 3) for _ in range(N)]
    optimizers = [job.optimizer(model.parameters()) for model in stepped]
    average = parameters_of(at)
    own, deltas = [average] * N, []
    for draw in range(1, ITERATIONS + 2):
        before = average
        average = average + sum(deltas) / N if deltas else average
        deltas = []
        for worker, (model, step) in enumerate(zip(stepped, optimizers, strict=True)):
            nn.utils.vector_to_parameters(own[worker].clone(), at.parameters())
            inputs, target = loader.batch(worker, draw, None)
            gradient = torch.autograd.grad(job.loss(at(inputs), target), at.parameters())
            with torch.no_grad():
                nn.utils.vector_to_parameters(average.clone(), model.parameters())
            for parameter, each in zip(model.parameters(), gradient, strict=True):
                parameter.grad = each
            step.step()
            deltas.append(parameters_of(model) - average)
        own = [average + delta for delta in deltas]
    assert largest_relative_difference(before, average) > 1e-4  # it does move
    ours = trained("s3gd", job)
    assert largest_relative_difference(parameters_of(ours.model), average) < 1e-12


def test_the_buffers_of_all_reduce_are_those_of_a_server():
    job = tiny_job(model=batch_norm_net)
    ours, theirs = (dict(trained(each, job).model.named_buffers()) for each in ("all_reduce", "bsp"))
    assert ours.keys() == theirs.keys()
    for name, buffer in ours.items():
        torch.testing.assert_close(buffer, theirs[name], rtol=1e-12, atol=1e-12)


def test_the_floating_buffers_of_stale_workers_are_averaged_and_integers_count_everybody():
    run = trained("dc_s3gd", tiny_job(model=batch_norm_net))
    buffers = dict(run.model.named_buffers())
    assert buffers["1.num_batches_tracked"] == N * ITERATIONS
    assert buffers["1.running_var"].min() > 0


class Counting(nn.Linear):
    """Counts the gradients that it has a part in."""

    def __init__(self):
        super().__init__(5, 3, dtype=torch.float64)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs):
        if self.training:
            self.count += 1
        return super().forward(inputs)


def loss_and_count(model, batch):
    inputs, target = batch
    return F.cross_entropy(model(inputs), target), {"count": model.count.double()}


@pytest.mark.parametrize("protocol", ALGORITHMS)
def test_what_is_counted_is_in_every_evaluation_and_in_the_end_once(protocol, tmp_path):
    job = tiny_job(model=Counting, eval_data=dataset(20), loss=None, step=loss_and_count)
    settings = {"protocol": protocol, "cluster": "4*deterministic(value=1)", "evaluate_every": "updates=1"}
    run = pl.train(job, stop="updates=5", out=tmp_path / "run", checkpoint_every="updates=1", **settings)
    run = pl.train(job, stop="updates=11", resume=tmp_path / "run", **settings)
    counts = [record.metrics["count"] for record in run.history.of(VersionEvaluated)]
    assert counts == [N * version for version in range(1, 12)]
    assert run.model.count == N * 11


def test_who_has_no_work_goes_on_from_the_average():
    """At a worker that hands in nothing, the others' sum is taken over, and what it did by itself is forgotten."""
    model = build_model(tiny_job(model=Counting), 3)
    layout = FlatLayout(model)
    server = ParameterServer(tiny_job(), model, layout, per_epoch=None)
    worker = make_algorithm(parse_plan("s3gd").allreduce, server, layout)
    worker.gradient.memory.zero_()
    worker.gradient.flat_parameters[0].fill_(1.0)
    worker.contribute(1.0, 1.0, update_of(1))
    assert not torch.equal(worker.weights.memory, worker.average.memory)
    worker.skip()
    assert torch.equal(worker.weights.memory, worker.average.memory)
    assert not worker.payload.memory.any()


def test_a_short_minibatch_counts_for_what_it_is():
    """An epoch of 96 samples is 10 minibatches, the last of 6, so that with one worker in ten each update has one."""
    job = tiny_job(batch_size=10, sampling="epoch", optimizer=decaying)
    ours, theirs = (trained(each, job, n=10, updates=12) for each in ("all_reduce", "bsp"))
    assert largest_relative_difference(parameters_of(ours.model), parameters_of(theirs.model)) < 1e-12


@pytest.mark.parametrize("protocol", ALGORITHMS)
def test_an_epoch_is_every_sample_once_though_the_last_iteration_has_few_minibatches(protocol):
    job = tiny_job(sampling="epoch")
    run = pl.train(job, protocol=protocol, cluster="5*exp(mean=1)", stop="epochs=2")
    assert run.history.totals.applied == 24
    assert [record.k for record in run.history.of(pl.UpdateMade)] == [5, 5, 5, 5, 4]


# --- schedules by workload ---------------------------------------------------------------------------------------


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.5)


SAT_OUT = (1, 6)


def literally(job, allreduce, updates):
    """Return the average where worker 1 sits out the iteration 6, each step at the rate of the workload of all."""
    loader, at = MinibatchLoader(job, 3, N), build_model(job, 3)
    average = parameters_of(at)
    own, velocity, workload = [average] * N, [torch.zeros_like(average)] * N, 0
    for draw in range(1, updates + 1):
        rate, present = RATE * 0.5 ** (workload // 7), [i for i in range(N) if (i, draw) != SAT_OUT]
        for i in range(N):
            if i not in present:
                own[i] = average if allreduce.overlaps else own[i]
                continue
            nn.utils.vector_to_parameters(own[i].clone(), at.parameters())
            inputs, target = loader.batch(i, draw, None)
            [*gradient] = torch.autograd.grad(job.loss(at(inputs), target), at.parameters())
            velocity[i] = MOMENTUM * velocity[i] + nn.utils.parameters_to_vector(gradient)
            own[i] = (average if allreduce.overlaps else own[i]) - rate * velocity[i]
        workload += len(present)
        if allreduce.communicates(draw) or draw == updates:
            average = torch.stack([own[i] for i in present]).mean(0)
            own = own if allreduce.overlaps else [average] * N
    return average


@pytest.mark.parametrize("protocol", ["s3gd", "local_sgd(H=1)", "local_sgd(H=4)"])
def test_a_worker_that_sits_out_stays_at_the_workload_of_all(protocol):
    job = tiny_job(optimizer=sgd(RATE, MOMENTUM), scheduler=halving, schedule_unit="gradient")
    ours = trained(protocol, job, updates=11, faults=[pl.Fault(*SAT_OUT, "not_finite")])
    theirs = literally(job, parse_plan(protocol).allreduce, updates=11)
    assert largest_relative_difference(parameters_of(ours.model), theirs) < 1e-12


# --- time --------------------------------------------------------------------------------------------------------


def iteration_s(protocol, cluster, updates=200, payload_bytes=1000.0):
    return pl.simulate(protocol, cluster, updates=updates, payload_bytes=payload_bytes).seconds_per_update


@pytest.mark.parametrize("sum_s", [0.2, 0.8, 1.5])
def test_seconds_of_an_iteration_are_those_of_the_paper(sum_s):
    network = pl.Network(up_bytes_per_s=2 * 3 / 4 * 1000 / sum_s)
    cluster = pl.Cluster(4, pl.Deterministic(1.0), network=network)
    assert network.all_reduce_s(4, 1000.0) == pytest.approx(sum_s)
    assert iteration_s("all_reduce", cluster) == pytest.approx(1 + sum_s)  # eq. (13)
    assert iteration_s("dc_s3gd", cluster, updates=2000) == pytest.approx(max(1, sum_s), rel=1e-3)  # eq. (14)
    assert iteration_s("local_sgd(H=4)", cluster) == pytest.approx(1 + sum_s / 4)


def ends_literally(compute_s, sum_s, overlaps, period):
    """Return when each iteration ends, given the compute time of each worker in each of them."""
    free = [0.0] * len(compute_s[0])
    ends, before = [], 0.0
    for t, row in enumerate(compute_s, 1):
        finished = [begun + seconds for begun, seconds in zip(free, row, strict=True)]
        if overlaps:
            free = [max(end, before) for end in finished]
            before = max(free) + sum_s
        elif t % period == 0:
            before = max(finished) + sum_s
            free = [before] * len(row)
        else:
            free = [max(end, before) for end in finished]
            before = max(finished)
        ends.append(before)
    return ends


@pytest.mark.parametrize("protocol", ALGORITHMS)
def test_iterations_of_unlike_workers_end_when_they_should(protocol):
    n, updates, sum_s = 5, 40, 0.7
    cluster = pl.Cluster(n, pl.Exponential(1.0), speed=[1, 2, 1, 1, 0.3], network=pl.Network(latency_s=sum_s / 8))
    trips = cluster.round_trips(seed=0)
    compute_s = [[trips.times(worker, t, 0.0).compute_s for worker in range(n)] for t in range(1, updates + 1)]
    allreduce = parse_plan(protocol).allreduce
    ends_s = ends_literally(compute_s, sum_s, allreduce.overlaps, allreduce.period)
    run = pl.train(tiny_job(), protocol=protocol, cluster=cluster, stop=pl.Stop(updates=updates))
    assert [record.now_s for record in run.history.of(pl.UpdateMade)] == pytest.approx(ends_s)
    assert pl.simulate(protocol, cluster, updates=updates).time_s == pytest.approx(ends_s[-1])


def test_a_gradient_tells_what_was_computed_and_how_much_of_the_sum_before_that_did_not_hide(tmp_path):
    cluster = pl.Cluster(4, pl.Deterministic(1.0), speed=[1, 1, 1, 2], network=pl.Network(latency_s=1.5 / 6))
    for protocol, exposed_s in (("all_reduce", 1.5), ("dc_s3gd", 0.5), ("local_sgd(H=3)", None)):
        run = pl.train(tiny_job(), protocol=protocol, cluster=cluster, stop="updates=9")
        gradients = list(run.history.of(pl.GradientArrived))
        assert [record.compute_s for record in gradients[-4:]] == [1.0, 1.0, 1.0, 0.5]
        if exposed_s is not None:
            assert {record.pull_s for record in gradients[:4]} == {0.0}
            assert [record.pull_s for record in gradients[4:]] == pytest.approx([exposed_s] * 32)


@pytest.mark.parametrize("protocol", ALGORITHMS)
@pytest.mark.parametrize("sum_s", [0.05, 0.7, 3.0])
def test_a_trace_replays_a_run_whose_sums_overlap_its_gradients(protocol, sum_s, tmp_path):
    network = pl.Network(latency_s=sum_s / 6)
    run = pl.train(tiny_job(), protocol=protocol, cluster=pl.Cluster(N, network=network), stop="updates=20")
    pl.Trace.of(run).to_csv(tmp_path / "trace.csv")
    trace = pl.Trace.from_csv(tmp_path / "trace.csv")
    assert trace == pl.Trace.of(run)
    again = pl.train(tiny_job(), protocol=protocol, cluster=pl.Cluster(N, trace), stop="updates=20")
    ours, theirs = ([record.now_s for record in each.history.of(pl.UpdateMade)] for each in (again, run))
    assert ours == pytest.approx(theirs, rel=1e-12)
    assert pl.simulate(protocol, pl.Cluster(N, trace), updates=20).time_s == pytest.approx(run.time_s, rel=1e-12)
    for other in ALGORITHMS:  # the sums are those of this network, under every protocol that makes some
        simulated_s = pl.simulate(other, pl.Cluster(N, network=network), updates=20).time_s
        assert pl.simulate(other, pl.Cluster(N, trace), updates=20).time_s == pytest.approx(simulated_s, rel=1e-9)


def test_a_trace_is_refused_where_it_knows_nothing_of_what_is_sent(tmp_path):
    with_server, without = (pl.Trace.of(trained(protocol, tiny_job(), updates=9)) for protocol in ("bsp", "all_reduce"))
    assert (with_server.has_server, without.has_server) == (True, False)
    with pytest.raises(
        pl.UsageError,
        match=r"the times of the sums .*, but asp needs those of the pulls and pushes .*: give such a trace",
    ):
        pl.simulate("asp", pl.Cluster(N, without), updates=9)
    with pytest.raises(
        pl.UsageError, match=r"the times of the pulls and pushes .*, but dc_s3gd needs those of the sums"
    ):
        pl.simulate("dc_s3gd", pl.Cluster(N, with_server), updates=9)
    network = pl.Network(latency_s=0.25)
    for trace in (with_server, without):
        times = [[row.compute_s for row in trace.rows if row.draw == draw] for draw in range(1, 10)]
        for protocol, sent_s in (("bsp", 0.5), ("all_reduce", 1.5)):
            if trace.has_server != (protocol == "bsp"):
                took_s = pl.simulate(protocol, pl.Cluster(N, trace, network=network), updates=9).time_s
                assert took_s == pytest.approx(sum(max(each) + sent_s for each in times))


# --- going on, and faults ----------------------------------------------------------------------------------------


def records(folder):
    return (folder / "events.jsonl").read_bytes()


@pytest.mark.parametrize("sampling", ["replacement", "epoch"])
@pytest.mark.parametrize("protocol", ALGORITHMS)
def test_a_resumed_run_goes_on_bit_for_bit_and_replays(protocol, sampling, tmp_path):
    job = tiny_job(sampling=sampling, model=batch_norm_net)
    common = {"protocol": protocol, "cluster": "4*exp(mean=1)", "seed": 1, "checkpoint_every": "updates=4"}
    whole = pl.train(job, stop="updates=23", out=tmp_path / "whole", **common)
    pl.train(job, stop="updates=11", out=tmp_path / "parts", **common)
    parts = pl.train(job, stop="updates=23", resume=tmp_path / "parts", **common)
    assert torch.equal(parameters_of(parts.model), parameters_of(whole.model))
    assert [record.loss for record in parts.history.of(pl.UpdateMade)] == [
        record.loss for record in whole.history.of(pl.UpdateMade)
    ]
    assert pl.replay(tmp_path / "parts").is_same


@pytest.mark.parametrize("protocol", ALGORITHMS)
@pytest.mark.parametrize("kind", ["die", "hang", "not_finite"])
def test_the_others_go_on_without_a_worker_that_fails(protocol, kind):
    fault = pl.Fault(2, 5, kind)
    run = pl.train(
        tiny_job(),
        protocol=protocol,
        cluster=pl.Cluster(4, pl.Deterministic(1.0), faults=[fault]),
        stop="updates=40",
        worker_timeout_s=10.0,
    )
    made = [record.k for record in run.history.of(pl.UpdateMade)]
    assert made[:6] == ([4, 4, 4, 4, 3, 4] if kind == "not_finite" else [4, 4, 4, 4, 3, 3])
    [dropped] = [record for record in run.history.of(pl.GradientArrived) if not record.used] or [None]
    assert (dropped is not None) == (kind == "not_finite")
    assert dropped is None or dropped.worker == 2
    losses = [record.loss for record in run.history.of(pl.UpdateMade)]
    assert np.mean(losses[-10:]) < np.mean(losses[:5])


@pytest.mark.parametrize("worker", [1, 3])
@pytest.mark.parametrize("protocol", ALGORITHMS)
def test_a_worker_that_comes_back_goes_on_from_the_average(protocol, worker):
    cluster = pl.Cluster(4, pl.Deterministic(1.0), faults=[pl.Fault(worker, 3, "die", back_after_s=7.5)])
    run = pl.train(tiny_job(), protocol=protocol, cluster=cluster, stop="updates=30")
    assert [record.k for record in run.history.of(pl.UpdateMade)][:14] == [4, 4, *[3] * 8, 4, 4, 4, 4]
    assert run.history.totals.dropped == 0
    assert run.stopped_by is pl.Outcome.UPDATES


@pytest.mark.parametrize("protocol", ALGORITHMS)
def test_workers_that_a_resumed_run_has_more_take_part_at_once(protocol, tmp_path):
    common = {"protocol": protocol, "seed": 1}
    pl.train(tiny_job(), cluster="2*deterministic(value=1)", stop="seconds=5.5", out=tmp_path / "run", **common)
    more = {"resume": tmp_path / "run", "allow_change": True}
    run = pl.train(tiny_job(), cluster="4*deterministic(value=1)", stop="updates=10", **more, **common)
    assert [record.k for record in run.history.of(pl.UpdateMade)] == [2] * 5 + [4] * 5
    assert run.history.totals.dropped == 0


def test_a_worker_whose_gradients_are_not_finite_is_named_and_nobody_waits_for_it():
    faults = [pl.Fault(2, draw, "not_finite") for draw in range(3, 20)]
    run = pl.train(tiny_job(), protocol="dc_s3gd", cluster=pl.Cluster(4, faults=faults), stop="updates=100")
    assert run.stopped_by is pl.Outcome.NOT_FINITE
    assert "10 gradients in a row of worker 2" in run.reason
    assert [record.k for record in run.history.of(pl.UpdateMade)] == [4, 4, *[3] * 9]


@pytest.mark.parametrize("protocol", ALGORITHMS)
def test_an_iteration_of_which_nothing_is_finite_is_made_once_more(protocol):
    faults = [pl.Fault(worker, 3, "not_finite") for worker in range(4)]
    run = pl.train(tiny_job(), protocol=protocol, cluster=pl.Cluster(4, faults=faults), stop="updates=6")
    assert [record.k for record in run.history.of(pl.UpdateMade)] == [4] * 6
    assert run.history.totals.dropped == 4


@pytest.mark.parametrize(("protocol", "keeps"), [("all_reduce", False), ("s3gd", True), ("local_sgd(H=3)", True)])
def test_who_goes_on_from_another_average_keeps_a_momentum_that_is_its_own(protocol, keeps):
    job, allreduce = tiny_job(optimizer=sgd(RATE, MOMENTUM)), parse_plan(protocol).allreduce
    workers = []
    for value in (1.0, 2.0, 3.0):
        model = build_model(job, 3)
        layout = FlatLayout(model)
        worker = make_algorithm(allreduce, ParameterServer(job, model, layout, per_epoch=None), layout)
        worker.gradient.memory.zero_()
        worker.gradient.flat_parameters[0].fill_(value)
        worker.contribute(1.0, 1.0, update_of(1))
        worker.apply_sum(worker.payload, 1.0, update_of(1), adopts=True)
        workers.append(worker)
    first, survivor, newcomer = workers
    survivor.restore_from(first.server.state_dict(), keeps_state=True)
    newcomer.restore_from(first.server.state_dict(), keeps_state=False)
    assert (momentum_of(first), momentum_of(survivor)) == (1.0, 2.0 if keeps else 1.0)
    assert momentum_of(newcomer) == 1.0
    for worker in (survivor, newcomer):
        assert torch.equal(worker.average.memory, first.average.memory)
        assert torch.equal(worker.weights.memory, first.average.memory)


def momentum_of(worker):
    [momentum] = {float(state["momentum_buffer"].mean()) for state in worker.server.optimizer.state.values()}
    return momentum


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: pl.train(tiny_job(), protocol="dc_s3gd", cluster="local:4", stop="updates=1"), "has no server"),
        (lambda: parse_plan("all_reduce@25% >> asp").checked(4, 100, 10), "type all_reduce alone"),
        (lambda: parse_plan("asp@25% >> dc_s3gd").checked(4, 100, 10), "the other parts of this plan need one"),
        (lambda: parse_plan("all_reduce + elastic").checked(4, 100, 10), "type all_reduce alone"),
        (lambda: parse_plan("dc_s3gd + staleness_lr(C=1)").checked(4, 100, 10), "or add to bsp or asp"),
        (lambda: parse_plan("s3gd + dc_s3gd").checked(4, 100, 10), "dc_s3gd is s3gd with its correction"),
        (lambda: pl.dc_s3gd(lambda0=-0.1), "lambda0=-0.1"),
        (lambda: pl.dc_s3gd(lambda0=float("nan")), "lambda0=nan"),
        (lambda: parse_plan("dc_s3gd(lambda0=much)"), "lambda0='much'"),
        (lambda: pl.local_sgd(H=0), "H=0 is not a whole number in [1, inf)"),
        (lambda: pl.local_sgd(H=10**400), "is not a whole number in [1, inf)"),
        (lambda: pl.AllReduceConfig([]), "sums=[], expected"),
        (lambda: pl.AllReduceConfig("updates", overlaps="yes"), "overlaps='yes', expected true or false"),
        (lambda: pl.AllReduceConfig("updates", overlaps=True, correction="dc_s3gd"), "correction='dc_s3gd'"),
        (
            lambda: pl.AllReduceConfig("updates", overlaps=True, correction=pl.staleness_lr(C=1)),
            "that corrects, or None",
        ),
        (lambda: pl.asp() + pl.s3gd(), "it is a protocol of its own"),
        (lambda: pl.AllReduceConfig("weights"), "expected 'gradients' or 'updates'"),
        (lambda: pl.AllReduceConfig("gradients", period=2), "give sums='updates'"),
        (lambda: pl.AllReduceConfig("updates", overlaps=True, period=2), "expected one of them"),
        (lambda: pl.AllReduceConfig("updates", correction=DCS3GD()), "give overlaps=True"),
        (
            lambda: pl.train(
                tiny_job(), protocol="s3gd", cluster="4*exp(mean=1)", stop="updates=1", measure_steps=True
            ),
            "an update has no single step",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_type(call, says):
    with pytest.raises(pl.UsageError, match=re.escape(says)):
        call()


def test_dc_s3gd_after_a_plus_is_its_correction_alone():
    phase = pl.asp() + pl.dc_s3gd(lambda0=0.3)
    assert phase.allreduce is None
    assert phase.compensators == (DCS3GD(0.3),)
    assert parse_plan(str(phase)) == pl.Plan((phase,))
