"""Training on four nodes of Slurm, submitted from Python: `python submitit_train.py FOLDER`."""

import os
import secrets
import sys

import submitit

import paceline as pl

OTHERS_CONTINUE = ["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]  # when a task or its node fails


class Train:
    """Function of each task, which trains as one rank."""

    def __call__(self, folder: str) -> str:
        """Train, or resume the run that an earlier start has left, and return why it has ended."""
        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        os.environ["PACELINE_SPAWN_SIDECARS"] = "1"  # the command of a task cannot be run again
        is_there = os.path.exists(f"{folder}/run.json")
        result = pl.train(
            pl.jobs.digits(),
            protocol="dbw()",
            cluster=pl.Torchrun(address=os.environ["MASTER_ADDR"]),
            stop="epochs=30",
            out=None if is_there else folder,
            resume=folder if is_there else None,
        )
        return result.reason

    def checkpoint(self, folder: str) -> object:
        """Return what submitit submits again before the time limit."""
        return submitit.helpers.DelayedSubmission(self, folder)


if __name__ == "__main__":
    folder = os.path.abspath(sys.argv[1])
    os.environ["PACELINE_TOKEN"] = secrets.token_hex(32)  # Slurm copies the environment to the tasks
    executor = submitit.AutoExecutor(folder=f"{folder}-tasks", cluster="slurm")
    executor.update_parameters(
        name="digits", nodes=4, tasks_per_node=1, timeout_min=600, slurm_srun_args=OTHERS_CONTINUE
    )
    print(executor.submit(Train(), folder).job_id)
