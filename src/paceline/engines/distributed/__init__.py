"""Worker processes on any number of hosts: one of gloo's pairs for each, so that a dead one breaks its own."""

from paceline.engines.distributed.parameter_server.engine import DistributedServerEngine

__all__ = ["DistributedServerEngine"]
