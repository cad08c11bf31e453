"""Address of the live page: HOST:PORT in text."""

from __future__ import annotations

from ipaddress import ip_address
from typing import NamedTuple, Self

from paceline.errors import UsageError

PORT = 8765
LOOPBACK = "127.0.0.1"


class Address(NamedTuple):
    """Host and port of the page.

    Attributes:
        host: name or number of the host.
        port: number of the port; 0 for a free one.
    """

    host: str = LOOPBACK
    port: int = PORT

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the address in a text.

        Raises:
            UsageError: the text is no address.

        >>> Address.parse("0.0.0.0:8080"), Address.parse(":0"), Address.parse("[::1]:80")
        (Address(host='0.0.0.0', port=8080), Address(host='127.0.0.1', port=0), Address(host='::1', port=80))
        """
        host, colon, port = text.rpartition(":")
        if not colon or not port.isdecimal() or int(port) > 65535:
            raise UsageError(f"address={text!r}, expected HOST:PORT, for example {LOOPBACK}:{PORT}")
        return cls(host.strip("[]") or LOOPBACK, int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach it."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def is_wildcard(self) -> bool:
        """Whether it stands for all interfaces of this host, as 0.0.0.0 does."""
        try:
            return ip_address(self.host).is_unspecified
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
