"""Jobs whose gradients wait for an event of the run."""

from dataclasses import replace
from itertools import count

from rank_threads import LIMIT_S


def waiting_for(event, job, gradients):
    """Return a job whose gradients wait for an event after this number of them, over all ranks of this process."""
    counted = count(1)
    name = "step" if job.step is not None else "loss"
    compute = getattr(job, name)

    def waiting(*arguments):
        assert next(counted) <= gradients or event.wait(LIMIT_S)
        return compute(*arguments)

    return replace(job, **{name: waiting})
