"""Command torchrun on this machine."""

import subprocess
import sys

from machine_speed import scaled
from paths import environment


def torchrun(folder, *arguments):
    """Run a command under torchrun in a folder, and return the completed process."""
    here = [] if "--nnodes" in arguments else ["--standalone"]
    command = [sys.executable, "-m", "torch.distributed.run", *here, "--monitor-interval", "0.1", *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, check=False, timeout=scaled(250)
    )
