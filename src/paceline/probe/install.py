"""Installation of the probe in a rank: after torch has been imported, and never with an error for the script."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from paceline.ddp_recording.layout import FOLDER_VARIABLE, SAMPLE_EVERY, SAMPLE_VARIABLE, attempt_folder


def install() -> None:
    """Arrange that the import of torch installs the probe; without a folder to record to, do nothing."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        sys.meta_path.insert(0, _TorchFinder(Path(folder)))


class _TorchFinder:
    """Finder that adds the probe to the import of torch and then removes itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of torch, with a loader that also installs the probe; None for other modules."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_probe(module: ModuleType) -> None:
            load(module)
            self._start_probe()

        spec.loader.exec_module = load_and_probe  # type: ignore[method-assign]
        return spec

    def _start_probe(self) -> None:
        from paceline.probe.patches import start_probe

        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        sample_every = int(os.environ.get(SAMPLE_VARIABLE, SAMPLE_EVERY))
        try:
            start_probe(attempt_folder(self._folder, attempt), int(os.environ["RANK"]), sample_every)
        except Exception as error:  # the script runs as without the probe
            print(f"paceline: this rank is not recorded: {type(error).__name__}: {error}", file=sys.stderr)
