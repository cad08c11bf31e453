"""DC-S3GD against Algorithm 1 of its paper, line by line in NumPy."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from allreduce_runs import DECAY, ITERATIONS, MOMENTUM, RATE, N, decaying, trained
from paceline.worker.data_loader import MinibatchLoader
from paceline.worker.torch_utils import build_model
from selections import each_value_once, parametrize_few
from tiny_jobs import (
    largest_relative_difference,
    parameters_of,
    tiny_job,
)


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
    """Return the average weights after `iterations` all-reduces, by Algorithm 1 with eq. (17).

    The update U is a step of SGD with momentum; the weight decay is that of the average weights.
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


MODELS = {
    "least squares": ({"model": squares_net, "loss": squares}, gradient_of_squares),
    "softmax": ({"model": softmax_net}, gradient_of_softmax),
    "a net": ({}, gradient_of_net),
}


@parametrize_few(("model", "lambda0"), each_value_once(list(MODELS), [0.0, 0.2, 1.0]), keep=1)
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


def test_every_correction_except_the_first_is_logged(tmp_path):
    run = pl.train(
        tiny_job(), protocol="dc_s3gd", cluster="4*exp(mean=1)", stop="updates=5", out=tmp_path / "run"
    ).history
    done = [[factor for _, factor in record.compensations] for record in run.of(pl.callbacks.GradientArrived)]
    assert done[:N] == [[]] * N
    assert all(len(factors) == 1 and factors[0] > 0 for factors in done[N:])
