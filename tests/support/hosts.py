"""Hosts on this machine: network namespaces, each with a link to a switch that can be slow, delayed or cut."""

import itertools
import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import cache

import pytest

import delayed_link
import paceline as pl
from ranks import TOKEN, Job, free_port

_numbers = itertools.count()


def ip(*words):
    """Run `ip`; its errors fail the test."""
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True, text=True)


@cache
def why_there_are_none():
    """Return the reason why hosts cannot be made here; empty if they can."""
    if not shutil.which("ip") or not shutil.which("tc"):
        return "no ip and tc (iproute2) here"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with hosts(1) as made:
            made.shape(0, rate="10mbit")
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    return ""


def need_hosts():
    if reason := why_there_are_none():
        pytest.skip(reason)


class Hosts:
    """Namespaces with an `eth0` each, and one more with the switch of their links.

    Nothing is made in the namespace of this process. The names contain its id, so that names do not collide.
    """

    def __init__(self, count):
        prefix = f"paceline-{os.getpid()}-{next(_numbers)}"
        self.switch = f"{prefix}-switch"
        self.names = [f"{prefix}-{host}" for host in range(count)]
        self._forwarders = []

    def __getstate__(self):
        return {**vars(self), "_forwarders": []}

    def address(self, host):
        return f"10.0.0.{host + 1}"

    def make(self):
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
        ip("-n", self.switch, "link", "set", "switch", "up")
        for host, name in enumerate(self.names):
            ip("netns", "add", name)
            ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"h{host}", "netns", self.switch)
            ip("-n", self.switch, "link", "set", f"h{host}", "master", "switch", "up")
            ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")

    def remove(self):
        for forwarder in self._forwarders:
            forwarder.kill()
            forwarder.communicate()
        for name in [*self.names, self.switch]:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def cut(self, host):
        ip("-n", self.switch, "link", "set", f"h{host}", "down")

    def part(self, one, other):
        """Block the traffic between two hosts: each maps the other's address to that of no host."""
        for here, there in ((one, other), (other, one)):
            words = ["replace", self.address(there), "lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent"]
            ip("-n", self.names[here], "neigh", *words)

    def are_parted(self, one, other):
        told = subprocess.run(["ip", "-n", self.names[one], "neigh"], capture_output=True, text=True)
        return f"{self.address(other)} dev eth0 lladdr 02:00:00:00:00:99" in told.stdout

    def mend(self, host):
        ip("-n", self.switch, "link", "set", f"h{host}", "up")

    def is_cut(self, host):
        told = subprocess.run(
            ["ip", "-n", self.switch, "-o", "link", "show", f"h{host}"], capture_output=True, text=True
        )
        return ",UP" not in told.stdout

    def shape(self, host, rate):
        """Limit the rate of a link in each direction, for example to "20mbit"."""
        for namespace, device in ((self.names[host], "eth0"), (self.switch, f"h{host}")):
            words = ["qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", "64kb", "latency", "500ms"]
            subprocess.run(["tc", "-n", namespace, *words], check=True, capture_output=True, text=True)

    def delay(self, host, seconds):
        """Delay all frames of a link in each direction.

        The link is removed from the switch, and a process copies the frames of each end to the other.
        """
        far, near = f"h{host}", f"d{host}"
        ip("-n", self.switch, "link", "set", far, "nomaster", "promisc", "on")
        ip("-n", self.switch, "link", "add", near, "type", "veth", "peer", "name", f"s{host}")
        ip("-n", self.switch, "link", "set", f"s{host}", "master", "switch", "up")
        ip("-n", self.switch, "link", "set", near, "promisc", "on", "up")
        forwarder = self.run(self.switch, [sys.executable, delayed_link.__file__, far, near, str(seconds)])
        self._forwarders.append(forwarder)
        assert forwarder.stdout.readline() == "forwarding\n"

    def run(self, name, command, **options):
        """Start a command in a namespace."""
        return subprocess.Popen(["ip", "netns", "exec", name, *command], stdout=subprocess.PIPE, text=True, **options)


@contextmanager
def hosts(count):
    """Yield a number of hosts, and remove them afterwards."""
    made = Hosts(count)
    try:
        made.make()
        yield made
    finally:
        made.remove()


class Cut(pl.Callback):
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


class Parting(pl.Callback):
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
