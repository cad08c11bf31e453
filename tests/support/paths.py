"""Folders of the repository, and the environment of processes that tests start."""

import os
from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
SOURCE = ROOT / "src"
SUPPORTS = [SUPPORT, *sorted(path for path in SUPPORT.iterdir() if path.is_dir() and path.name != "__pycache__")]


def environment(**variables):
    """Return the variables of this process, with the repository's folders on the path and one thread."""
    path = os.pathsep.join(map(str, (SOURCE, *SUPPORTS, ROOT)))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
