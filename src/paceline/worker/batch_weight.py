"""Weight of a batch: what its gradient counts in a mean."""

from math import inf

from paceline.errors import UsageError
from paceline.jobs.job import Batch, Job


def weight_of(job: Job, batch: Batch, samples: int) -> float:
    """Return the weight of a batch of so many samples, as the job says; its samples if the job says nothing.

    Raises:
        UsageError: the job says a number that is negative or not finite.
    """
    if job.weight is None:
        return samples
    weight = float(job.weight(batch))
    if not 0 <= weight < inf:
        raise UsageError(f"job {job.name}: weight of a batch = {weight}, expected a number >= 0, as that of its tokens")
    return weight
