"""Asynchronous local steps as a plain loop."""

from torch import nn

from paceline.worker.data_loader import MinibatchLoader
from paceline.worker.torch_utils import build_model
from tiny_jobs import parameters_of


def local_steps_loop(job, seed, arrivals, steps, n, outer_lr):
    """Return the parameters after these arrivals (worker, draw, version), one an update, in plain torch."""
    loader, model = MinibatchLoader(job, seed, n), build_model(job, seed)
    versions = [parameters_of(model)]
    states = {}
    for worker, draw, version in arrivals:
        nn.utils.vector_to_parameters(versions[version].clone(), model.parameters())
        optimizer = job.optimizer(model.parameters())
        if worker in states:
            optimizer.load_state_dict(states[worker])
        for number in range((draw - 1) * steps + 1, draw * steps + 1):
            inputs, target = loader.batch(worker, number, None)
            optimizer.zero_grad()
            job.loss(model(inputs), target).backward()
            optimizer.step()
        states[worker] = optimizer.state_dict()
        versions.append(versions[-1] - outer_lr * (versions[version] - parameters_of(model)))
    return versions[-1]
