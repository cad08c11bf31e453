"""A rank of a thread whose messages are altered on their way, as those of a process that has the token and lies."""

import threading
from contextlib import contextmanager
from unittest.mock import patch

import msgspec

from paceline.engines.distributed.transport import messages


@contextmanager
def altered(rank, kind, change, after=0):
    """Yield a list of the messages of this kind that were altered, which is the next one of the rank.

    Args:
        rank: name of the rank in `rank_threads`.
        kind: class of the message.
        change: function that changes the fields of the message, of which the first one is its name, in place.
        after: number of messages of this kind that are sent as they are.
    """
    encode, seen, done = messages.encode, [], []

    def encoded(message):
        content, tensors = encode(message)
        if isinstance(message, kind) and threading.current_thread().name == f"rank {rank}":
            seen.append(message)
            if len(seen) == after + 1:
                fields = msgspec.msgpack.decode(content)
                change(fields)
                done.append(fields)
                content = msgspec.msgpack.encode(fields)
        return content, tensors

    with patch.object(messages, "encode", encoded):
        yield done
