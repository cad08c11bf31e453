"""User's script: training with a standby. Rank 0 is killed, then a worker; the run ends when that worker is back."""

import os
import signal
from pathlib import Path

import paceline as pl
from end_when import FOREVER, EndWhen
from paceline.clusters.launch_env import SIDECAR
from tiny_jobs import tiny_job

RANK_0_AT, WORKER_0_AT = 20, 60  # updates
IS_RESTARTED = Path("is_restarted")


class KillRank0(pl.callbacks.Callback):
    def on_update(self, update):
        if update.version == RANK_0_AT and os.environ["RANK"] == "0" and SIDECAR not in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        IS_RESTARTED.touch()
    is_back = EndWhen(lambda seen: seen.used_since[0] > 3 and IS_RESTARTED.exists())
    pl.train(
        tiny_job(),
        protocol="bsp",
        cluster=pl.Torchrun(standby=1, faults=[pl.Fault(worker=0, draw=WORKER_0_AT)]),
        stop=FOREVER,
        out="run",
        callbacks=[KillRank0(), is_back],
    )


if __name__ == "__main__":
    main()
