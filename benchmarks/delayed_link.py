"""Delayed link: copies Ethernet frames between two devices, each after a number of seconds.

Called with the names of the devices and the seconds.
"""

from __future__ import annotations

import selectors
import socket
import sys
import time
from collections import deque

EVERY_PROTOCOL = 3  # ETH_P_ALL
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
LONGEST_BYTES = 1 << 17


def listen(device: str) -> socket.socket:
    """Return a socket for whole frames, before the kernel segments them and computes their checksums."""
    raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_PROTOCOL))
    raw.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    raw.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    raw.bind((device, 0))
    return raw


def forward(one: socket.socket, other: socket.socket, delay_s: float) -> None:
    """Copy the frames of each socket to the other one, for ever."""
    selector = selectors.DefaultSelector()
    for source, target in ((one, other), (other, one)):
        selector.register(source, selectors.EVENT_READ, (source, target))
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    while True:
        timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for key, _ in selector.select(timeout_s):
            source, target = key.data
            waiting.append((time.monotonic() + delay_s, target, source.recv(LONGEST_BYTES)))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, frame = waiting.popleft()
            target.send(frame)


if __name__ == "__main__":
    first, second, delay_s = sys.argv[1:]
    ends = listen(first), listen(second)
    print("forwarding", flush=True)
    forward(*ends, float(delay_s))
