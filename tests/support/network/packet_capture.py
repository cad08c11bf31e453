"""Capture of all packets of a network interface: run as a script in the namespace, it writes them to a file."""

import socket
import sys

ALL = 0x0003  # ETH_P_ALL


def main(device, path):
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL)) as sock, open(path, "wb") as file:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUFFORCE if hasattr(socket, "SO_RCVBUFFORCE") else 33, 1 << 26)
        sock.bind((device, 0))
        print("capturing", flush=True)
        while True:
            file.write(sock.recv(1 << 17))
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
