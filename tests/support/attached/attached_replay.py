"""Attached loops against a job that is trained in simulation with the arrivals of their run."""

import paceline as pl
from arrival_replay import arrival_replay
from loop_parts import BATCH, loss_of, sgd
from paceline.catalogue.parser import parse_plan
from paceline.run.config import RunConfig
from paceline.run.session import Session
from paceline.worker.local_steps import make_replica

SEED = 1  # of attached threads


def job_of(network, data, make_optimizer=sgd, **changes):
    """Return the job that trains as the loops of `loop_parts`."""
    return pl.Job(
        model=network,
        optimizer=lambda model: make_optimizer(model),
        data=data,
        batch_size=BATCH,
        step=lambda model, batch: loss_of(model, *batch),
        sampling="epoch",
        **changes,
    )


def trained_with(events, job, n, protocol, stop):
    """Return the parameters and buffers that `pl.train` reaches in simulation with these events."""
    plan = parse_plan(protocol)
    session = Session(RunConfig(job=job, plan=plan, cluster=pl.Cluster(n), stop=pl.Stop.parse(stop), seed=SEED))
    replica = make_replica(job, SEED, n, local_steps=plan.local_steps)
    arrival_replay(pl.Cluster(n), replica, session.server, events).run(session.coordinator)
    return list(session.model.state_dict().values())
