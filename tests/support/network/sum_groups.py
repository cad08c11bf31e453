"""Stores of the members of a group for sums, which are threads of one process."""

from functools import partial

from memory_transport import HEARTBEAT_TIMEOUT_S, MemoryNetwork, MemoryTransport
from paceline.engines.distributed.transport.group_store import GroupStore

HOST = "127.0.0.1"


def stores(size, generation=1, is_relayed=lambda key: True):
    """Return the stores of all members; a key that one of them sets is put into all others, if it is relayed."""

    def relay(sender, key):
        for rank, store in enumerate(made):
            if rank != sender and is_relayed(key.key):
                store.put(key)

    made = [GroupStore(generation, partial(relay, rank)) for rank in range(size)]
    return made


def transport(heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S):
    return MemoryTransport(MemoryNetwork(), heartbeat_timeout_s=heartbeat_timeout_s)
