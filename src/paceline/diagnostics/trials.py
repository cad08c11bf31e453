"""Checks that start processes: a process group of gloo, and a short run on two workers."""

from __future__ import annotations

import subprocess
import sys
import time

from paceline.diagnostics.check import Check, Status

DEADLINE_S = 60.0

GLOO = """
import torch
from torch import distributed as dist
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
"""

WORKERS = """
from functools import partial
import torch
from torch import nn
import paceline as pl

data = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
job = pl.Job(
    model=partial(nn.Linear, 2, 1),
    loss=nn.MSELoss(),
    optimizer=partial(torch.optim.SGD, lr=0.1),
    data=data,
    batch_size=4,
)
result = pl.train(job, protocol=pl.bsp(), cluster=pl.LocalCluster(2), stop=pl.Stop(updates=2), progress=False)
assert result.stopped_by == "updates", result.reason
"""


def check_gloo() -> Check:
    """Return whether gloo, which sums gradients between processes, works on this machine's interfaces."""
    return _trial(
        "gloo",
        GLOO,
        works="a process group was made and summed",
        advice="all_reduce and workers=node need gloo: name the interface, for example "
        "export GLOO_SOCKET_IFNAME=eth0, and give this host's name an address in /etc/hosts",
    )


def check_workers() -> Check:
    """Return whether two worker processes of this machine train."""
    return _trial(
        "workers",
        WORKERS,
        works="two worker processes trained",
        advice="--cluster local:N does not work here: mend the problems above first; simulated clusters work",
    )


def _trial(subject: str, program: str, works: str, advice: str) -> Check:
    """Run a program in a process of its own, since a failure may hang or end the process."""
    began_s = time.monotonic()
    try:
        # -P: no module of the working folder hides one of Python.
        done = subprocess.run(
            [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Check(
            subject=subject, status=Status.PROBLEM, finding=f"no result after {DEADLINE_S:.0f} s", advice=advice
        )
    except OSError as error:
        return Check(
            subject=subject,
            status=Status.PROBLEM,
            finding=f"no process could be started: {error.strerror}",
            advice=advice,
        )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
        return Check(subject=subject, status=Status.PROBLEM, finding=lines[-1], advice=advice)
    return Check(
        subject=subject,
        status=Status.OK,
        finding=f"{works}, {time.monotonic() - began_s:.1f} s with the import of torch",
    )
