"""Going on with a run that had ended, however it ended."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint.store import Checkpoints
from paceline.clusters.simulated import Cluster
from paceline.clusters.torchrun import Torchrun
from paceline.core.events import Restarted
from paceline.engines.base import Engine
from paceline.engines.virtual.timing import TimingEngine
from paceline.errors import PacelineWarning, RunError, UsageError
from paceline.recording.event_log import Prefix, is_cut_short, read_records
from paceline.recording.history import History
from paceline.recording.recorder import Recorder
from paceline.recording.run_folder import CHECKPOINTS, EVENTS, SavedRun, versions
from paceline.recording.validation import believed, configuration
from paceline.run.session import Session
from paceline.utils.dict_diff import changes as changes_between
from paceline.utils.files import ContentError
from paceline.utils.wording import counted


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
        RunError: all its checkpoints are damaged, or its log was changed before where each of them was made.
    """

    def __init__(self, path: Path, session: Session, allow_change: bool) -> None:
        self._path = path
        self._log = path / EVENTS
        self._session = session
        saved = SavedRun(path)
        self.kept: Prefix | None = None  # of the log; None if the run had no checkpoint yet and begins again
        self._state = self._newest()
        # The checkpoint may be older than run.json, which a resume that was killed may have changed.
        self._before: Mapping[str, Any] = saved.configuration
        with believed(path):
            if self._state:
                self._before = configuration(self._state["configuration"], f"the checkpoint in {path}")
            self.changes = self._compare(allow_change)
        if self.kept is not None:
            self._note_stop(self.kept.size_bytes)

    def history(self) -> History:
        """Return what had happened until the checkpoint."""
        return History(lambda: read_records(self._log, self.kept.size_bytes if self.kept else 0))

    def load(self, engine: Engine, recorder: Recorder) -> Restarted | None:
        """Load every part, and return the event that the run goes on with, None if nothing was lost."""
        if self._state is None:
            return None
        with believed(f"the checkpoint in {self._path}", RunError):
            return self._load(self._state, engine, recorder)

    def _load(self, state: Mapping[str, Any], engine: Engine, recorder: Recorder) -> Restarted | None:
        self._session.coordinator.load_state_dict(state["coordinator"])
        self._session.server.load_state_dict(state["server"])
        recorder.load_state_dict(state["recorder"])
        if self._goes_on_seamlessly:
            assert isinstance(engine, TimingEngine)
            engine.load_state_dict(state["engine"])
            return None
        engine.resume_at(self._session.coordinator.version, state["now"])
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
                f"give allow_change=True{self._or_elastic(before['workers'])}"
            )
        if self._session.setting.job.sharding == "partitioned" and before["workers"] != now["workers"]:
            raise UsageError(
                f"{self._path}: the data are partitioned among {counted(before['workers'], 'worker')}; "
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

    def _note_stop(self, log_bytes: int) -> None:
        """Note in `run.json` which stop was in force until which byte of the log, where no `RunResumed` has it."""
        configuration = self._session.configuration
        if "stops_before" not in self._before:
            del configuration["stops_before"]  # the run is older than this account, so it cannot be whole
            return
        here = [[self._before["stop"], log_bytes]] if self._goes_on_seamlessly else []
        configuration["stops_before"] = [*self._before["stops_before"], *here]

    @property
    def _goes_on_seamlessly(self) -> bool:
        """Whether the run goes on as if it had never stopped, since the state of its engine was saved."""
        is_simulated = isinstance(self._session.setting.cluster, Cluster)
        is_whole = self._state is not None and "engine" in self._state
        return is_simulated and is_whole and not self.changes and not self._has_other_epochs

    @property
    def _has_other_epochs(self) -> bool:
        """Whether a run that deals out whole epochs is to deal out more or fewer of them."""
        is_limited = self._session.coordinator.is_limited or (self._state and self._state["coordinator"]["is_limited"])
        return bool(is_limited) and self._before["stop"] != str(self._session.setting.stop)

    def _newest(self) -> dict[str, Any] | None:
        """Return the newest checkpoint that goes with the log, None if there is no checkpoint at all."""
        reasons = []
        for path, state in Checkpoints(self._path / CHECKPOINTS).whole():
            try:
                self.kept = self._covered(path, state)
            except OSError as error:
                raise RunError(
                    f"cannot read {self._log}: {error.strerror}; a run cannot go on without its log"
                ) from error
            except ContentError as error:
                reasons.append(f"{self._log}: {error}; it was cut or changed after it was written")
                continue
            if reasons:
                _warn(f"{reasons[0]}; the run goes on from {path.name}, before the damage")
            if is_cut_short(self._log):
                _warn(f"{self._log} ended in the middle of a line: repaired")
            return state
        if reasons:
            raise RunError(f"{reasons[0]}; put back a copy of it, or start the run again from its beginning")
        return None

    def _covered(self, path: Path, state: Mapping[str, Any]) -> Prefix:
        """Read the part of the log that a checkpoint goes with.

        Raises:
            OSError: it cannot be read.
            ContentError: it is shorter, or is not what was written.
        """
        size_bytes, written = state.get("log_bytes"), state.get("log_digest")
        if not isinstance(size_bytes, int) or size_bytes < 0:
            raise ContentError(f"it has no length in {path}")
        kept = Prefix.of(self._log, size_bytes)
        if written is None:
            _warn(f"{path} is of an earlier paceline and has no digest of {EVENTS}: damage to that is not noticed")
        elif kept.digest.hexdigest() != written:
            raise ContentError(f"it does not have the digest in the checkpoint of its first {kept.size_bytes} bytes")
        return kept


def _warn(text: str) -> None:
    warnings.warn(text, PacelineWarning, stacklevel=4)


def _changeable(configuration: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "protocol": configuration["protocol"],
        "cluster": configuration["cluster"],
        "evaluate_every": configuration["rules"]["evaluate_every"],
        "worker_timeout_s": configuration["rules"]["worker_timeout_s"],
        "measure_steps": configuration["rules"].get("measure_steps", False),
        "schedule": configuration["rules"].get("schedule"),
    }
