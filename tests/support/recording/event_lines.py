"""Lines of an event log as plain JSON values."""

import orjson


def read_events(log):
    """Return the lines of a log as dicts."""
    return [orjson.loads(line) for line in log.read_bytes().splitlines()]
