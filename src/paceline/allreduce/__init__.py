"""What a worker without a server does with its gradient, and with the sum of what all have handed in."""

from paceline.allreduce.worker import HandedIn, Worker, accumulate, make_worker

__all__ = ["HandedIn", "Worker", "accumulate", "make_worker"]
