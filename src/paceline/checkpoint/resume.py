"""Going on with a run that had ended, however it ended."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from os import SEEK_END
from pathlib import Path
from typing import Any

from paceline.checkpoint.store import Checkpoints
from paceline.engines.base import Engine
from paceline.engines.virtual import TimingEngine
from paceline.errors import PacelineWarning, RunError, UsageError
from paceline.events import Restarted
from paceline.history import History
from paceline.recording.difference import changes as changes_between
from paceline.recording.event_log import read_records
from paceline.recording.recorder import Recorder
from paceline.recording.run_folder import CHECKPOINTS, EVENTS, SavedRun, versions
from paceline.session import Session
from paceline.torchrun import Torchrun


class Resumption:
    """What is left of a run, to be loaded into the parts of the session that goes on with it.

    A simulated run goes on as if it had never stopped. On real processes, and where the protocol or the cluster
    was changed, what the workers were computing is lost, and all else is kept.

    Args:
        path: of the run's folder.
        session: that goes on with it.
        allow_change: whether protocol, cluster and the like may differ from those of the run before.

    Raises:
        UsageError: it is no run, or that of another job.
        RunError: all its checkpoints are damaged.
    """

    def __init__(self, path: Path, session: Session, allow_change: bool) -> None:
        self._path = path
        self._log = path / EVENTS
        self._session = session
        saved = SavedRun(path)
        self._state: dict[str, Any] | None = Checkpoints(path / CHECKPOINTS).load()
        # The checkpoint may be older than run.json, which a resume that was killed may have changed.
        self._before: Mapping[str, Any] = self._state["configuration"] if self._state else saved.configuration
        self.changes = self._compare(allow_change)
        if self._state is not None:
            self._check_log()

    @property
    def log_bytes(self) -> int | None:
        """How much of the log is kept; None if the run had no checkpoint yet and begins again."""
        return self._state["log_bytes"] if self._state else None

    def history(self) -> History:
        """Return what had happened until the checkpoint."""
        return History(lambda: read_records(self._log, self.log_bytes or 0))

    def load(self, engine: Engine, recorder: Recorder) -> Restarted | None:
        """Load every part, and return the event that the run goes on with, None if nothing was lost."""
        state = self._state
        if state is None:
            return None
        self._session.coordinator.load_state_dict(state["coordinator"])
        self._session.server.load_state_dict(state["server"])
        recorder.load_state_dict(state["recorder"])
        if isinstance(engine, TimingEngine) and "engine" in state and not self.changes and not self._has_other_epochs:
            engine.load_state_dict(state["engine"])
            return None
        engine.go_on_from(self._session.coordinator.version, state["now"])
        return Restarted(
            now=state["now"],
            workers=self._session.setting.cluster.n,
            stop_before=self._before["stop"],
            changes="; ".join(self.changes),
        )

    def _compare(self, allow_change: bool) -> list[str]:
        before = self._before
        now = {**self._session.configuration, "versions": versions()}
        other_job = changes_between(
            {"seed": before["seed"], **before["identity"]}, {"seed": now["seed"], **now["identity"]}
        )
        if other_job:
            raise UsageError(f"{self._path} is the run of another job: {'; '.join(other_job)}")
        changes = changes_between(_changeable(before), _changeable(now))
        if before["protocol"] == now["protocol"]:  # names may be the same where knobs are not
            changes += changes_between({"plan": before["plan"]}, {"plan": now["plan"]})
        if changes and not allow_change:
            raise UsageError(
                f"{self._path} was another run: {'; '.join(changes)}; if that is what you want, "
                f"give --allow-change (allow_change=True){self._or_elastic(before['workers'])}"
            )
        if self._session.setting.job.sharding == "partitioned" and before["workers"] != now["workers"]:
            raise UsageError(
                f"{self._path}: the data are partitioned among {before['workers']} workers; "
                f"a run of {now['workers']} would have other parts"
            )
        other = changes_between(*({"threads": each["threads"], **each["versions"]} for each in (before, now)))
        if other:
            warnings.warn(
                f"{'; '.join(other)}: the run goes on, but not bit for bit as it would have",
                PacelineWarning,
                stacklevel=2,
            )
        return changes

    def _or_elastic(self, workers: int) -> str:
        """Say how to let the number of ranks change from run to run, if that is what has changed."""
        setting = self._session.setting
        if not isinstance(setting.cluster, Torchrun) or not setting.plan.reduction or setting.cluster.n == workers:
            return ""
        return ", or torchrun(elastic=true) from the beginning"

    @property
    def _has_other_epochs(self) -> bool:
        """Whether a run that deals out whole epochs is to deal out more or fewer of them."""
        is_limited = self._session.coordinator.is_limited or (self._state and self._state["coordinator"]["is_limited"])
        return bool(is_limited) and self._before["stop"] != str(self._session.setting.stop)

    def _check_log(self) -> None:
        try:
            with self._log.open("rb") as file:
                size_bytes = file.seek(0, SEEK_END)
                file.seek(max(0, size_bytes - 1))
                is_cut = file.read(1) not in {b"", b"\n"}
        except OSError as error:
            raise RunError(f"cannot read {self._log}: {error.strerror}; a run cannot go on without its log") from error
        if size_bytes < (self.log_bytes or 0):
            raise RunError(
                f"{self._log} has {size_bytes} bytes, the checkpoint was made at {self.log_bytes}: it is not the log "
                "of this run, or it was cut"
            )
        if is_cut:
            warnings.warn(f"{self._log} ended in the middle of a line: repaired", PacelineWarning, stacklevel=2)


def _changeable(configuration: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "protocol": configuration["protocol"],
        "cluster": configuration["cluster"],
        "evaluate_every": configuration["rules"]["evaluate_every"],
        "worker_timeout_s": configuration["rules"]["worker_timeout_s"],
        "measure_steps": configuration["rules"].get("measure_steps", False),
        "schedule": configuration["rules"].get("schedule"),
    }
