"""Sidecar processes that a rank starts with its pickled job, where its command cannot be run again."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial

from paceline.clusters.torchrun import Torchrun
from paceline.engines.distributed import THIS_PROCESS, Host, Sidecar
from paceline.processes.child_process import Launcher, ProcessSettings, init_child
from paceline.processes.rerun import can_run_again
from paceline.processes.shared_pickle import SharedPickle
from paceline.processes.unpicklable import pickled
from paceline.run.config import RunConfig
from paceline.run.session import take_part


def spawning_if_needed(cluster: Torchrun) -> Torchrun:
    """Return the launch settings of this process; its sidecars are spawned if its command cannot be run again."""
    if cluster.ranks.spawns_sidecars or can_run_again():
        return cluster
    return replace(cluster, ranks=replace(cluster.ranks, spawns_sidecars=True))


def host_of(config: RunConfig) -> Host:
    """Return this process, whose sidecars are its child processes where its command cannot be run again."""
    assert isinstance(config.cluster, Torchrun)
    if not config.cluster.ranks.spawns_sidecars:  # as in an actor of Ray or a notebook
        return THIS_PROCESS
    return replace(THIS_PROCESS, start_sidecar=partial(SpawnedSidecar, config))


class SpawnedSidecar(Sidecar):
    """Child process that serves as a worker until the run ends.

    Args:
        config: configuration of the run.
        worker: number of the worker that the process is.
        server: host and port of the server that the process joins; None for that at rank 0.
    """

    def __init__(self, config: RunConfig, worker: int, server: tuple[str, int] | None = None) -> None:
        super().__init__(worker)
        assert isinstance(config.cluster, Torchrun)
        ranks = replace(config.cluster.ranks, sidecar=worker, server=server)
        own = replace(config, cluster=replace(config.cluster, ranks=ranks))
        refused = f"job {config.job.name} cannot be sent to the process beside this rank"
        with closing(pickled((own, ProcessSettings.capture()), vars(config.job), refused)) as arguments:
            self._process = Launcher([__name__]).start(_serve, arguments, has_children=True)

    @property
    def status(self) -> int | None:
        """Exit status, None while the process runs."""
        return self._process.exitcode

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def wait(self, timeout_s: float | None) -> None:
        """Wait for the process to exit, at most for a number of seconds."""
        self._process.join(timeout_s)


def _serve(arguments: SharedPickle) -> None:
    init_child()
    config, settings = arguments.load()
    settings.apply()
    take_part(config)
