"""The ranks of a job as threads of this process, which reach each other by TCP, as processes do.

The functions have the names of those in `ranks`, which starts processes.
"""

import rank_threads
from attackers import KeepingTransport, security
from ranks import free_port, launchers


class TcpTransport(KeepingTransport):
    """Transport of one rank.

    Args:
        on_use: is called when a process is reached, and before this one listens.
        security: handshake.
    """

    poll_s = 0.05

    def __init__(self, on_use, security):
        super().__init__(lambda: security, "tests", 5.0)
        self._on_use = on_use
        self._listeners = []

    def listen(self, *arguments):
        self._on_use()
        listener = super().listen(*arguments)
        self._listeners.append(listener)
        return listener

    def connect(self, address):
        self._on_use()
        return super().connect(address)

    def kill(self):
        """End all that this rank has opened, as the end of its process does."""
        for each in [*self._listeners, *self.connections]:
            each.close()


class Job(rank_threads.Job):
    """Starts ranks as threads.

    Attributes:
        address: address of rank 0.
        relays: ports at which ranks look for rank 0 instead, by rank.
        variables: further variables of the environment of all ranks.
    """

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.address = "127.0.0.1", free_port()
        self.relays = {}
        self.variables = {}

    def make_transport(self, on_use):
        return TcpTransport(on_use, security(encrypt=self._torchrun.get("encrypt", True)))

    def _environment(self, rank, token=rank_threads.TOKEN):
        port = self.relays.get(rank, self.address[1])
        return {**super()._environment(rank, token), "MASTER_PORT": str(port), **self.variables}


ranks, run = launchers(Job)
