"""Hosts on this machine: network namespaces, each with a link to the switch of its site. Needs root and iproute2.

The links can be slow, delayed or cut. Two sites can be joined by a link that their hosts share.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

DEVICE = "eth0"  # of every host
MTU_BYTES = 1500
JUMBO_MTU_BYTES = 9000  # as in clusters: fewer packets need less processor time
CONGESTION_CONTROL = "reno"  # available on every system; unlike bbr it does not pause
BURST_KB = 64  # size of the token bucket: this much of a transfer is not delayed
QUEUE_MS = 500  # longest wait in the queue of a limited link; later frames are dropped
NO_HOST = "02:00:00:00:00:99"  # hardware address

_numbers = itertools.count()


@cache
def why_there_are_none() -> str:
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


class Hosts:
    """Namespaces with an `eth0` each, and one more with the switches of their links.

    Nothing is made in the namespace of this process. The names contain its id, so that names do not collide.

    Args:
        sites: number of hosts at each site, >= 1. Hosts are numbered site by site. Sites are apart until they are
            joined.
        mtu_bytes: largest packet of the hosts.

    Attributes:
        names: namespace of each host.
        switch: namespace of the switches.
    """

    def __init__(self, sites: Sequence[int], mtu_bytes: int) -> None:
        prefix = f"paceline-{os.getpid()}-{next(_numbers)}"
        self.switch = f"{prefix}-switch"
        self._site_of = [site for site, count in enumerate(sites) for _ in range(count)]
        self.names = [f"{prefix}-{host}" for host in range(len(self._site_of))]
        self._mtu = ["mtu", str(mtu_bytes)]
        self._forwarders: list[subprocess.Popen[str]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_forwarders": []}

    def address(self, host: int) -> str:
        """Return the address of a host."""
        return f"10.0.0.{host + 1}"

    def make(self) -> None:
        """Make the namespaces and their links."""
        ip("netns", "add", self.switch)
        for site in set(self._site_of):
            self._in_switch("link", "add", f"site{site}", "type", "bridge")
            self._in_switch("link", "set", f"site{site}", *self._mtu, "up")
        for host, name in enumerate(self.names):
            ip("netns", "add", name)
            ends = ["netns", name, *self._mtu, "type", "veth", "peer", "name", f"h{host}", "netns", self.switch]
            ip("link", "add", DEVICE, *ends, *self._mtu)
            self._connect(f"h{host}", self._site_of[host])
            ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", DEVICE)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", DEVICE, "up")
            run("ip", "netns", "exec", name, "sysctl", "-qw", f"net.ipv4.tcp_congestion_control={CONGESTION_CONTROL}")

    def remove(self) -> None:
        """Remove the namespaces, with whatever of them was made."""
        for forwarder in self._forwarders:
            forwarder.kill()
            forwarder.communicate()
        for name in [*self.names, self.switch]:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def run(self, name: str, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command in a namespace."""
        return subprocess.Popen(["ip", "netns", "exec", name, *command], stdout=subprocess.PIPE, text=True, **options)

    def cut(self, host: int) -> None:
        """Cut the link of a host."""
        self._in_switch("link", "set", f"h{host}", "down")

    def mend(self, host: int) -> None:
        """Restore the link of a host."""
        self._in_switch("link", "set", f"h{host}", "up")

    def is_cut(self, host: int) -> bool:
        """Return whether the link of a host is cut."""
        return ",UP" not in self._in_switch("-o", "link", "show", f"h{host}")

    def part(self, one: int, other: int) -> None:
        """Block the traffic between two hosts: each maps the other's address to that of no host."""
        for here, there in ((one, other), (other, one)):
            words = ["replace", self.address(there), "lladdr", NO_HOST, "dev", DEVICE, "nud", "permanent"]
            ip("-n", self.names[here], "neigh", *words)

    def are_parted(self, one: int, other: int) -> bool:
        """Return whether the traffic between two hosts is blocked."""
        return f"{self.address(other)} dev {DEVICE} lladdr {NO_HOST}" in ip("-n", self.names[one], "neigh")

    def shape(self, host: int, rate: str) -> None:
        """Limit the rate of a link in each direction, for example to "20mbit"."""
        for namespace, device in ((self.names[host], DEVICE), (self.switch, f"h{host}")):
            _limit(rate, device, namespace)

    def delay(self, host: int, seconds: float) -> None:
        """Delay all frames of a link in each direction.

        The link is removed from the switch, and a process copies the frames of each end to the other.
        """
        self._in_switch("link", "set", f"h{host}", "nomaster")
        self._in_switch("link", "add", f"s{host}", *self._mtu, "type", "veth", "peer", "name", f"d{host}", *self._mtu)
        self._connect(f"s{host}", self._site_of[host])
        self._forward(f"h{host}", f"d{host}", seconds)

    def join_sites(self, rate: str, delay_s: float) -> None:
        """Join the first two sites by a link with a rate and a delay in each direction."""
        for site in (0, 1):
            near, far = f"near{site}", f"far{site}"
            self._in_switch("link", "add", near, *self._mtu, "type", "veth", "peer", "name", far, *self._mtu)
            self._connect(near, site)
            _limit(rate, near, self.switch)  # before the delay, where a full queue stops nothing but this direction
        self._forward("far0", "far1", delay_s)

    def bytes_between_sites(self) -> int:
        """Return the bytes that the link between the sites has carried, both directions together."""
        [link] = json.loads(self._in_switch("-json", "-stats", "link", "show", "near0"))
        return int(link["stats64"]["rx"]["bytes"] + link["stats64"]["tx"]["bytes"])

    def _connect(self, device: str, site: int) -> None:
        self._in_switch("link", "set", device, "master", f"site{site}", "up")

    def _forward(self, one: str, other: str, delay_s: float) -> None:
        for device in (one, other):
            self._in_switch("link", "set", device, "promisc", "on", "up")
        program = str(Path(__file__).with_name("delayed_link.py"))
        forwarder = self.run(self.switch, [sys.executable, program, one, other, str(delay_s)])
        self._forwarders.append(forwarder)
        assert forwarder.stdout is not None
        assert forwarder.stdout.readline() == "forwarding\n"

    def _in_switch(self, *words: str) -> str:
        return ip("-n", self.switch, *words)


@contextmanager
def hosts(*sites: int, mtu_bytes: int = MTU_BYTES) -> Iterator[Hosts]:
    """Yield hosts, and remove them afterwards; the arguments are those of `Hosts`."""
    made = Hosts(sites, mtu_bytes)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def shape_this_host(mbit_per_s: float | None) -> None:
    """Limit the outgoing rate of the namespace of this process, or remove the limit."""
    subprocess.run(["tc", "qdisc", "delete", "dev", DEVICE, "root"], check=False, capture_output=True)
    if mbit_per_s is not None:
        _limit(f"{mbit_per_s:g}mbit", DEVICE)


def _limit(rate: str, device: str, namespace: str | None = None) -> None:
    place = ["-n", namespace] if namespace else []
    bucket = ["tbf", "rate", rate, "burst", f"{BURST_KB}kb", "latency", f"{QUEUE_MS}ms"]
    run("tc", *place, "qdisc", "add", "dev", device, "root", *bucket)


def ip(*words: str) -> str:
    """Run `ip` and return its output."""
    return run("ip", *words)


def run(*command: str) -> str:
    """Run a command and return its output; its failure is an error with its message."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
