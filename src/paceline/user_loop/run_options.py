"""Run options: arguments of `attach` that are those of `pl.train`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.clusters.torchrun import Torchrun
from paceline.core.duration import Duration
from paceline.core.stop import Stop
from paceline.engines.distributed import Host
from paceline.errors import UsageError
from paceline.jobs.job import Job
from paceline.protocols.protocol import Plan
from paceline.recording.callback import Callback
from paceline.recording.callbacks.prometheus import Prometheus
from paceline.recording.run_folder import RunFolder, SavedRun, check_free
from paceline.recording.script_runs import refuse_to_resume
from paceline.run.checkpointer import CheckpointPolicy
from paceline.run.config import RunConfig
from paceline.run.result import Result
from paceline.run.resume import Resumption
from paceline.run.session import Session
from paceline.run.train import is_restarted, open_session, stand_by
from paceline.utils.wording import join_words


class RunOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of a run, as the arguments of `pl.train`; the folders are absolute paths."""

    seed: int = 0
    out: str | None = None
    overwrite: bool = False
    resume: str | None = None
    checkpoint_every: Duration = Duration("seconds", 60)
    keep_checkpoints: int = 3
    worker_timeout_s: float | None = None
    measure_steps: bool = False
    lr_rule: Literal["constant", "proportional", "noise"] = "constant"
    lr_of: Literal["bsp"] | int = "bsp"
    metrics: str | int | None = None
    on_end: Literal["raise", "return"] = "raise"

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> RunOptions:
        """Return the options that a user has given.

        Raises:
            UsageError: an option is unknown, or of a wrong type.
        """
        options = dict(given)
        for name in options:
            if name not in cls.__struct_fields__:
                known = [field for field in cls.__struct_fields__ if field not in ("seed", "out")]
                raise UsageError(
                    f"attach has no argument {name!r}, expected callbacks, {join_words(known)} beside its own: omit it"
                )
        for name in ("out", "resume"):
            if options.get(name) is not None:
                options[name] = str(Path(options[name]).resolve())
        if isinstance(options.get("checkpoint_every"), str):
            options["checkpoint_every"] = Duration.parse(options["checkpoint_every"])
        try:
            made = msgspec.convert(options, cls)
        except msgspec.ValidationError as error:
            raise UsageError(f"an argument of attach has a wrong type: {error}") from None
        made.callbacks()  # which are made in another process, where they could not be refused at once
        return made

    def check_folder(self, cluster: Torchrun) -> None:
        """Check at rank 0 that the run can use its folder, before a process is started.

        Raises:
            UsageError: the folder is used already, or has no run to resume.
        """
        if cluster.ranks.rank:
            return
        if self.resume is not None:
            refuse_to_resume(SavedRun(self.resume).configuration, self.resume)
        elif self.out is not None and os.path.lexists(self.out):
            path = Path(self.out)
            if not is_restarted(cluster, path, begins=False):
                check_free(path, overwrite=self.overwrite)

    def callbacks(self) -> list[Callback]:
        """Return the callbacks of paceline that the options name."""
        return [Prometheus.parse(str(self.metrics))] if self.metrics is not None else []

    def config(self, job: Job, plan: Plan, cluster: Torchrun, stop: Stop) -> RunConfig:
        """Return the configuration of one rank."""
        job = replace(job, lr_rule=self.lr_rule, lr_of=self.lr_of)
        return RunConfig(
            job=job,
            plan=plan,
            cluster=cluster,
            stop=stop,
            seed=self.seed,
            worker_timeout_s=self.worker_timeout_s,
            measure_steps=self.measure_steps,
            folder=self.out if self.resume is None else self.resume,
        )

    def stand_by(self, config: RunConfig, host: Host, callbacks: Sequence[Callback]) -> Result:
        """Follow a run, and go on with it if its coordinator is lost.

        Raises:
            UsageError: there is a folder that another standby has left.
            FollowedRunEnded: the run has ended.
        """
        return stand_by(
            config,
            host,
            out=self.out,
            resume=self.resume,
            callbacks=callbacks,
            policy=self._policy(config),
            overwrite=self.overwrite,
            has_loops=True,
        )

    def open_session(
        self, config: RunConfig, host: Host
    ) -> tuple[Session, RunFolder | None, Resumption | None, CheckpointPolicy]:
        """Return the session of a run, its folder, the run to resume, and when checkpoints are saved.

        Raises:
            UsageError: the options contradict each other, or the run in a folder cannot be resumed.
        """
        opened = open_session(config, host, self.out, overwrite=self.overwrite, resume=self.resume)
        return (*opened, self._policy(config))

    def _policy(self, config: RunConfig) -> CheckpointPolicy:
        return CheckpointPolicy(config.in_gradients(self.checkpoint_every), self.keep_checkpoints)
