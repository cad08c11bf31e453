"""Start of ranks that run balanced trainings in turn."""

import json
import subprocess
import sys
from pathlib import Path

from launched_commands import outputs
from paths import environment
from ranks import free_port


def printed_by(script, arguments, ranks):
    """Return the lines of JSON that rank 0 prints; without torchrun, which is one more process that imports torch."""
    port, command = str(free_port()), [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    launched = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(command, env=environment(RANK=str(rank), **launched), stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    return [json.loads(line) for line in outputs(processes)[0].splitlines()]
