"""Distributed engines: the processes of a job that torchrun has started, on any number of hosts."""

from paceline.engines.distributed.allreduce.elastic_group import check_summable
from paceline.engines.distributed.allreduce.rank_run import RankRun
from paceline.engines.distributed.host import THIS_PROCESS, Host, Lifecycle, WholeProcess
from paceline.engines.distributed.parameter_server.shard_clients import ShardClients
from paceline.engines.distributed.rank import Rank
from paceline.engines.distributed.rendezvous.handshake import FROZEN, SAMPLES, WORLD_SIZE, RunFinished
from paceline.engines.distributed.rendezvous.rendezvous import is_restart, reach_store, serve_store, tell_launcher
from paceline.engines.distributed.rendezvous.session import failed_end
from paceline.engines.distributed.rendezvous.sidecar import Sidecar, SubprocessSidecar
from paceline.engines.distributed.roles import make_engine, take_part
from paceline.engines.distributed.standby.standby import FollowedRunEnded, Standby
from paceline.engines.distributed.transport.messages import End

__all__ = [
    "FROZEN",
    "SAMPLES",
    "THIS_PROCESS",
    "WORLD_SIZE",
    "End",
    "FollowedRunEnded",
    "Host",
    "Lifecycle",
    "Rank",
    "RankRun",
    "RunFinished",
    "ShardClients",
    "Sidecar",
    "Standby",
    "SubprocessSidecar",
    "WholeProcess",
    "check_summable",
    "failed_end",
    "is_restart",
    "make_engine",
    "reach_store",
    "serve_store",
    "take_part",
    "tell_launcher",
]
