"""Resumption of a run from its folder."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.checkpoint.fingerprint import described_defaults
from paceline.checkpoint.store import Checkpoints
from paceline.clusters.simulated import Cluster
from paceline.clusters.torchrun import NO_SERVER, Torchrun
from paceline.coordinator.rules import CHANGEABLE
from paceline.core.events import Restarted
from paceline.engines.loop import RunLoop
from paceline.engines.run import Run
from paceline.errors import PacelineError, PacelineWarning, RunError, UsageError
from paceline.recording.event_log import Prefix, is_cut_short, read_records
from paceline.recording.history import History
from paceline.recording.recorder import Recorder
from paceline.recording.run_folder import CHECKPOINTS, EVENTS, SavedRun, versions
from paceline.recording.script_runs import refuse_to_resume
from paceline.recording.validation import believed, configuration, in_short
from paceline.run.plan_json import with_defaults
from paceline.run.session import Session
from paceline.utils.dict_diff import changes as changes_between
from paceline.utils.files import ContentError
from paceline.utils.user_code import is_raised_here, place_of
from paceline.utils.wording import counted


class Resumption:
    """State of a stopped run, to be loaded into a new session.

    A simulated run continues as if it had not stopped. On real processes, and after a change of protocol or cluster,
    the tasks in flight are lost; all other state is kept.

    Args:
        path: folder of the run.
        session: session that will continue the run.
        allow_change: whether protocol, cluster and intervals may differ from those of the stopped run.

    Raises:
        UsageError: the folder has no run, or the run of another job.
        RunError: all checkpoints are damaged, or none of them matches the log.
    """

    def __init__(self, path: Path, session: Session, allow_change: bool) -> None:
        self._path = path
        self._log = path / EVENTS
        self._session = session
        saved = SavedRun(path)
        refuse_to_resume(saved.configuration, path)
        self.kept: Prefix | None = None  # part of the log to keep; None without a checkpoint: the run starts anew
        self._state = self._newest()
        # A resume that was killed may have changed run.json after the checkpoint was written.
        self._before: Mapping[str, Any] = saved.configuration
        with believed(path):
            if self._state:
                self._before = configuration(self._state["configuration"], f"the checkpoint in {path}")
            self.changes = self._compare(allow_change)
            if self.kept is not None:
                self._note_stop(self.kept.size_bytes)

    @contextmanager
    def doubted(self) -> Iterator[None]:
        """Convert an unknown error in the resumed run: a state that was changed may cause one long after it was loaded.

        Raises:
            RunError: there was such an error, and not in the user's code.
        """
        try:
            yield
        except Exception as error:
            is_known = isinstance(error, PacelineError | OSError) or (place_of(error) and not is_raised_here(error))
            if is_known or self._state is None:
                raise
            raise RunError(
                f"the run resumed from {self._path} failed ({in_short(error)}): its checkpoint was damaged or changed, "
                "or this is an error of paceline; resume from an older checkpoint"
            ) from error

    def history(self) -> History:
        """Return the records up to the checkpoint."""
        return History(lambda: read_records(self._log, self.kept.size_bytes if self.kept else 0))

    def load(self, engine: Run, recorder: Recorder) -> Restarted | None:
        """Load the state into all parts; return the first event of the resumed run, None if no task was lost."""
        if self._state is None:
            return None
        with believed(f"the checkpoint in {self._path}", RunError):
            return self._load(self._state, engine, recorder)

    def _load(self, state: Mapping[str, Any], engine: Run, recorder: Recorder) -> Restarted | None:
        self._session.coordinator.load_state_dict(state["coordinator"])
        self._session.server.load_state_dict(state["server"])
        recorder.load_state_dict(state["recorder"])
        if self._is_seamless:
            assert isinstance(engine, RunLoop)
            engine.load_state_dict(state["engine"])
            return None
        engine.resume_at(self._session.coordinator.version, state["now"])
        return Restarted(
            now=state["now"],
            workers=self._session.config.cluster.n,
            stop_before=self._before["stop"],
            changes="; ".join(self.changes),
        )

    def _compare(self, allow_change: bool) -> list[str]:
        before = self._before
        now = {**self._session.configuration, "versions": versions()}
        added = {name: value for name, value in described_defaults().items() if name in now["identity"]}
        other_job = changes_between(
            {"seed": before["seed"], **added, **before["identity"]}, {"seed": now["seed"], **now["identity"]}
        )
        if other_job:
            raise UsageError(f"{self._path} has the run of another job: {'; '.join(other_job)}")
        changes = changes_between(_changeable(before), _changeable(now))
        if before["protocol"] == now["protocol"]:  # equal names may have different arguments
            changes += changes_between(*({"plan": with_defaults(each["plan"])} for each in (before, now)))
        if changes and not allow_change:
            raise UsageError(
                f"{self._path} has a run with other settings: {'; '.join(changes)}; to resume with the new ones, "
                f"give allow_change=True{self._elastic_advice(before['workers'])}"
            )
        if self._session.config.job.sharding == "partitioned" and before["workers"] != now["workers"]:
            raise UsageError(
                f"{self._path}: the data are partitioned among {counted(before['workers'], 'worker')}; "
                f"{counted(now['workers'], 'worker')} would get other parts"
            )
        noted = ["threads", *(["compensation"] if "compensation" in before else [])]  # older runs have not noted it
        other = changes_between(*({name: each[name] for name in noted} | each["versions"] for each in (before, now)))
        if other:
            _warn(f"{'; '.join(other)}: the resumed run is not bit-identical to an uninterrupted one")
        return changes

    def _elastic_advice(self, workers: int) -> str:
        """Return the advice to make the cluster elastic, if only the number of ranks has changed."""
        config = self._session.config
        if not isinstance(config.cluster, Torchrun) or config.cluster.n == workers:
            return ""
        return ", or use torchrun(max_workers=N) from the start"

    def _note_stop(self, log_bytes: int) -> None:
        """Add the old stop and the byte of the log up to which it applied to `run.json`, if no `RunResumed` has it."""
        here = [[self._before["stop"], log_bytes]] if self._is_seamless else []
        self._session.configuration["stops_before"] = [*self._before["stops_before"], *here]

    @property
    def _is_seamless(self) -> bool:
        """Whether the run continues as if it had not stopped, because the state of its engine was saved."""
        is_simulated = isinstance(self._session.config.cluster, Cluster)
        is_whole = self._state is not None and "engine" in self._state
        return is_simulated and is_whole and not self.changes and not self._has_other_epochs

    @property
    def _has_other_epochs(self) -> bool:
        """Whether the stop changes the number of epochs that the coordinator assigns."""
        is_limited = self._session.coordinator.is_limited or (self._state and self._state["coordinator"]["is_limited"])
        return bool(is_limited) and self._before["stop"] != str(self._session.config.stop)

    def _newest(self) -> dict[str, Any] | None:
        """Return the newest checkpoint that matches the log, None if there is no checkpoint."""
        reasons = []
        for path, state in Checkpoints(self._path / CHECKPOINTS).whole():
            try:
                self.kept = self._covered(path, state)
            except OSError as error:
                raise RunError(
                    f"cannot read {self._log}: {error.strerror}; a run cannot be resumed without its log"
                ) from error
            except ContentError as error:
                reasons.append(f"{self._log}: {error}; the file was cut or changed after it was written")
                continue
            if reasons:
                _warn(f"{reasons[0]}; resuming from {path.name}, before the damage")
            if is_cut_short(self._log):
                _warn(f"{self._log} ended in the middle of a line: repaired")
            return state
        if reasons:
            raise RunError(f"{reasons[0]}; restore the file from a copy, or start a new run")
        return None

    def _covered(self, path: Path, state: Mapping[str, Any]) -> Prefix:
        """Read the part of the log that a checkpoint covers.

        Raises:
            OSError: the log cannot be read.
            ContentError: the log is shorter than the checkpoint says, or has another digest.
        """
        size_bytes, written = state.get("log_bytes"), state.get("log_digest")
        if not isinstance(size_bytes, int) or size_bytes < 0:
            raise ContentError(f"{path} has no length of the log")
        kept = Prefix.of(self._log, size_bytes)
        if written is None:
            _warn(
                f"{path} was written by an earlier paceline, without a digest of {EVENTS}: damage to it is not detected"
            )
        elif kept.digest.hexdigest() != written:
            raise ContentError(f"the digest of its first {kept.size_bytes} bytes differs from that in the checkpoint")
        return kept


def _warn(text: str) -> None:
    warnings.warn(text, PacelineWarning, stacklevel=4)


def _changeable(configuration: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "protocol": configuration["protocol"],
        "cluster": configuration["cluster"].removesuffix(NO_SERVER),  # the state and the decisions are the same
        **{name: configuration["rules"][name] for name in CHANGEABLE},
    }
