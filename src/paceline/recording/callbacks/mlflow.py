"""Scalars of a run for MLflow."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from paceline.core.records import RunEnded
from paceline.recording.callbacks.tracker import Tracker
from paceline.recording.scalars import ScalarPoint
from paceline.utils.argument_types import checked_types

CONFIGURATION = "run.json"
REFUSED = re.compile(r"[^\w\-. :/]")  # characters in the name of a metric


@checked_types
class MLflow(Tracker):
    """Callback that sends scalars to MLflow.

    Texts and numbers of the configuration are parameters of the run, and all of it is its artifact ``run.json``.
    Characters that MLflow refuses in the name of a metric become ``_``.

    Args:
        experiment: name of the experiment, which is created if there is none.
        tracking_uri: address of the server or store; None for that of MLflow's own settings.
        run_name: name of the run; None for one that MLflow chooses.

    Raises:
        UsageError: mlflow is not installed.
    """

    name = "MLflow"
    package = extra = "mlflow"

    def __init__(self, experiment: str, *, tracking_uri: str | None = None, run_name: str | None = None) -> None:
        super().__init__()
        self._experiment = experiment
        self._tracking_uri = tracking_uri
        self._run_name = run_name
        self._run_id = ""
        self._client: Any = None

    def begin(self, configuration: Mapping[str, Any]) -> None:
        """Begin a run of the experiment."""
        self._client = client = import_module("mlflow").MlflowClient(self._tracking_uri)
        experiment = client.get_experiment_by_name(self._experiment)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(self._experiment)
        self._run_id = client.create_run(experiment_id, run_name=self._run_name).info.run_id
        for name, value in configuration.items():
            if isinstance(value, str | int | float):
                client.log_param(self._run_id, name, value)
        client.log_dict(self._run_id, dict(configuration), CONFIGURATION)

    def log(self, point: ScalarPoint) -> None:
        """Log scalars in one request."""
        entities = import_module("mlflow.entities")
        values, now_ms = {**point.values, "time_s": point.time_s}, int(1000 * time.time())
        metrics = [entities.Metric(metric_name(name), value, now_ms, point.version) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics)

    def finish(self, end: RunEnded | None) -> None:
        """Set the outcome."""
        has_failed = end is None or end.outcome.is_failure
        self._client.set_terminated(self._run_id, "FAILED" if has_failed else "FINISHED")


def metric_name(name: str) -> str:
    """Return the name of a metric with ``_`` for what MLflow refuses: other characters, and parts that paths omit.

    >>> metric_name("eval/recall@5"), metric_name("eval/../loss (mean)/")
    ('eval/recall_5', 'eval/_/loss _mean_/_')
    """
    parts = REFUSED.sub("_", name).split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)
