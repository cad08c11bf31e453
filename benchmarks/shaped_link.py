"""Two hosts on this machine: network namespaces with a link of a given rate between them. Needs root."""

from __future__ import annotations

import os
import subprocess
from types import TracebackType
from typing import Self

MTU_BYTES = 9000  # jumbo frames, as in clusters: fewer packets need less processor time
BURST_KB = 64  # size of the token bucket: this much of a transfer is not delayed
CONGESTION_CONTROL = "reno"  # available on every system; unlike bbr it does not pause
DEVICE = "eth0"


class ShapedLink:
    """Network namespaces "a" and "b", removed at the end of the context."""

    addresses = ("10.0.0.1", "10.0.0.2")

    def __init__(self) -> None:
        self._names = [f"paceline-{os.getpid()}-{end}" for end in "ab"]

    def __enter__(self) -> Self:
        """Create the namespaces."""
        try:
            self._make()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Remove the namespaces."""
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def inside(self, place: int) -> list[str]:
        """Return the beginning of a command that runs at one end."""
        return ["ip", "netns", "exec", self._names[place]]

    def _make(self) -> None:
        first, second = self._names
        _run("ip", "netns", "add", first)
        _run("ip", "netns", "add", second)
        _run("ip", "link", "add", DEVICE, "netns", first, "type", "veth", "peer", "name", DEVICE, "netns", second)
        for name, address in zip(self._names, self.addresses, strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", DEVICE, "mtu", str(MTU_BYTES), "up")
            setting = f"net.ipv4.tcp_congestion_control={CONGESTION_CONTROL}"
            _run("ip", "netns", "exec", name, "sysctl", "-q", "-w", setting)


def shape(mbit_per_s: float | None) -> None:
    """Limit the outgoing rate of the namespace of this process, or remove the limit."""
    subprocess.run(["tc", "qdisc", "delete", "dev", DEVICE, "root"], check=False, capture_output=True)
    if mbit_per_s is not None:
        bucket = ["rate", f"{mbit_per_s:g}mbit", "burst", f"{BURST_KB}kb", "latency", "500ms"]
        _run("tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *bucket)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
