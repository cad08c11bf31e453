"""Delayed link: copies Ethernet frames between two devices, each after a number of seconds."""

import selectors
import socket
import sys
import time
from collections import deque

EVERY_PROTOCOL = 3  # ETH_P_ALL
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
LONGEST_BYTES = 1 << 17


def listen(device):
    """Return a socket for whole frames, before the kernel segments them and computes their checksums."""
    raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_PROTOCOL))
    raw.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    raw.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    raw.bind((device, 0))
    return raw


def forward(one, other, delay_s):
    selector = selectors.DefaultSelector()
    for source, target in ((one, other), (other, one)):
        selector.register(source, selectors.EVENT_READ, target)
    waiting = deque()
    while True:
        timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for key, _ in selector.select(timeout_s):
            waiting.append((time.monotonic() + delay_s, key.data, key.fileobj.recv(LONGEST_BYTES)))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, frame = waiting.popleft()
            target.send(frame)


if __name__ == "__main__":
    ends = [listen(device) for device in sys.argv[1:3]]
    print("forwarding", flush=True)
    forward(*ends, float(sys.argv[3]))
