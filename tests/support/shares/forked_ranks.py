"""Ranks of an unchanged script that share its batches, forked from a process that has imported torch.

Its import is most of the time of a short script.
"""

import os
import runpy
import sys
from dataclasses import replace

from paceline.shares import install
from paceline.shares.protocol import settings_of
from ranks import LIMIT_S, context, free_port


def run_on_forked_ranks(ranks, script, *arguments, folder, **variables):
    """Run a script on ranks, which succeed, as under a launcher that sets torchrun's variables."""
    settings = replace(settings_of("balanced(m=8, leases=1)"), out=str(folder / "run"), launch="forked")
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"TORCHELASTIC_RESTART_COUNT": "0", **settings.environment(), **variables}
    words = [str(script), *map(str, arguments)]
    processes = [
        context().Process(target=_run, args=(shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, words, folder))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
        if process.is_alive():
            process.kill()
            process.join()
    said = "\n".join(file.read_text() for file in sorted(folder.glob("said by *")))
    assert [process.exitcode for process in processes] == [0] * ranks, said
    for process in processes:
        process.close()


def _run(environment, words, folder):
    said = os.open(folder / f"said by {environment['RANK']}", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, sys.stdout.fileno())
    os.dup2(said, sys.stderr.fileno())
    os.environ.update(environment)
    sys.argv[:] = words
    install.install()
    runpy.run_path(words[0], run_name="__main__")
