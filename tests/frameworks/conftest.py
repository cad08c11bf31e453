"""Scripts of these tests, which need their frameworks to be imported."""

import json
import os
import subprocess
import sys

import pytest

from paths import ROOT, SUPPORTS

collect_ignore = ["ray_script.py", "ray_cluster_script.py"]


@pytest.fixture
def answer(request, tmp_path):
    """Return what a case of the module's script answers; `printed` in the folder has what it printed."""

    def run(name):
        command = [sys.executable, str(request.module.SCRIPT), name, str(tmp_path)]
        limit_s = request.module.LIMIT_S
        path = os.pathsep.join([*map(str, SUPPORTS), os.environ.get("PYTHONPATH", "")])
        settings = {"capture_output": True, "text": True, "timeout": limit_s, "cwd": ROOT, "check": False}
        ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, **settings)
        printed = ended.stdout + ended.stderr
        assert ended.returncode == 0, printed[-6000:]
        (tmp_path / "printed").write_text(printed)
        return json.loads((tmp_path / "answer.json").read_text())

    return run
