"""Driver of Ray Train: three workers are the ranks of one run. `python train.py FOLDER` writes the run to FOLDER."""

import os
import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from paceline.integrations.ray import PacelineConfig


def train(config: dict[str, str]) -> dict[str, object]:
    import paceline as pl

    result = pl.train(
        pl.jobs.digits(),
        protocol="k_sync(k=1)",
        cluster=pl.Torchrun(address=os.environ["MASTER_ADDR"]),
        stop="epochs=4",
        out=config["out"],
    )
    return {"reason": result.reason, **result.metrics}


if __name__ == "__main__":
    folder = os.path.abspath(sys.argv[1])
    ray.init()
    trainer = TorchTrainer(
        train,
        train_loop_config={"out": f"{folder}/digits"},
        torch_config=PacelineConfig(),
        scaling_config=ScalingConfig(num_workers=3),
        run_config=RunConfig(storage_path=f"{folder}/ray", failure_config=FailureConfig(max_failures=10)),
    )
    print(trainer.fit().return_value)
