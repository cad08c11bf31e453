"""Ranks on the hosts of `benchmarks/namespaces.py`, and callbacks that cut their links."""

import threading
from contextlib import contextmanager

import pytest

import paceline as pl
from benchmarks.namespaces import why_there_are_none
from ranks import TOKEN, Job, free_port


def need_hosts():
    if reason := why_there_are_none():
        pytest.skip(reason)


class Cut(pl.callbacks.Callback):
    """Callback that cuts the link of a host when a worker delivers a draw, and restores it later.

    Args:
        made: hosts.
        place: number of the host that is cut off.
        after: worker and draw.
        back_after_s: seconds until the link is restored; None for never.
    """

    def __init__(self, made, place, after, back_after_s=None):
        self._hosts = made
        self._place = place
        self._after = after
        self._back_after_s = back_after_s

    def on_arrival(self, arrival):
        if (arrival.worker, arrival.draw) == self._after:
            self._hosts.cut(self._place)
            if self._back_after_s is not None:
                mending = threading.Timer(self._back_after_s, self._hosts.mend, [self._place])
                mending.daemon = True
                mending.start()


class Parting(pl.callbacks.Callback):
    """Callback that blocks the traffic between two hosts alone when a worker delivers a draw.

    Args:
        made: hosts.
        one: number of a host.
        other: number of another host.
        after: worker and draw.
    """

    def __init__(self, made, one, other, after):
        self._hosts = made
        self._between = one, other
        self._after = after

    def on_arrival(self, arrival):
        if (arrival.worker, arrival.draw) == self._after:
            self._hosts.part(*self._between)


class JobOnHosts(Job):
    """Ranks on hosts, rank 0 on the first one.

    Args:
        made: hosts.
        places: host of each rank.
        callbacks: callbacks of rank 0.
    """

    def __init__(self, made, places, job, torchrun=None, callbacks=(), **settings):
        torchrun = {"address": f"{made.address(places[0])}:{free_port()}", **(torchrun or {})}
        super().__init__(len(places), job, torchrun, callbacks=callbacks, **settings)
        self._hosts = made
        self._places = places

    def _environment(self, rank, token=TOKEN, number=None):
        place = self._places[rank]
        here = [each for each in range(len(self._places)) if self._places[each] == place]
        return {
            **super()._environment(rank, token, number),
            "MASTER_ADDR": self._hosts.address(self._places[0]),
            "LOCAL_WORLD_SIZE": str(len(here)),
            "LOCAL_RANK": str(here.index(rank)),
            "GROUP_RANK": str(place),
            "GROUP_WORLD_SIZE": str(len(set(self._places))),
            "NETWORK_NAMESPACE": self._hosts.names[place],
        }

    def has_ended(self, rank, within_s):
        return self._ends[rank].poll(within_s)


@contextmanager
def ranks_on_hosts(made, places, job, torchrun=None, callbacks=(), **settings):
    """Yield ranks on hosts, not yet started, and kill them afterwards."""
    started = JobOnHosts(made, places, job, torchrun, callbacks, **settings)
    try:
        yield started
    finally:
        started.kill_all()
