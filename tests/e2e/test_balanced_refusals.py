"""Ways to train on several devices that are refused by name."""

import subprocess
import sys

import pytest

from paths import environment

pytestmark = [pytest.mark.slow]
PROGRAM = """
import contextlib, io
from paceline.shares.refusals import refuse_others
refuse_others()
import deepspeed, horovod.torch, torch
import torch.distributed.pipelining, torch.distributed.tensor.experimental, torch.distributed.tensor.parallel
from torch import nn
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import post_localSGD_hook
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.multiprocessing import spawn

model = nn.Linear(2, 2)
wrapped = object.__new__(nn.parallel.DistributedDataParallel)
for attempt in (
    lambda: nn.DataParallel(model),
    lambda: deepspeed.initialize(model=model),
    lambda: horovod.torch.init(),
    lambda: torch.distributed.pipelining.PipelineStage(model, 0, 2, "cpu"),
    lambda: torch.distributed.tensor.parallel.parallelize_module(model, None, {}),
    lambda: torch.distributed.tensor.experimental.context_parallel(None),
    lambda: Join([wrapped]),
    lambda: wrapped.join(),
    lambda: wrapped.register_comm_hook(None, post_localSGD_hook),
    lambda: wrapped._register_builtin_comm_hook(None),
    lambda: FullyShardedDataParallel(model),
    lambda: spawn(print, nprocs=2),
):
    try:
        attempt()
    except SystemExit as end:
        print(end.code)
"""
NAMES = [
    *("DataParallel", "initialize", "init", "PipelineStage", "parallelize_module", "context_parallel", "Join"),
    *("DistributedDataParallel.join", "DistributedDataParallel.register_comm_hook"),
    *("DistributedDataParallel._register_builtin_comm_hook", "FullyShardedDataParallel", "spawn"),
]


def test_what_trains_on_several_devices_otherwise_is_refused_by_name(tmp_path):
    (tmp_path / "deepspeed.py").write_text("def initialize(**_): ...")
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod/__init__.py").touch()
    (tmp_path / "horovod/torch.py").write_text("def init(): ...")
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["2"] * len(NAMES)
    told = [line for line in done.stderr.splitlines() if line.startswith("paceline:")]
    assert [line.split(" is not balanced: ")[0] for line in told] == [f"paceline: {name}" for name in NAMES]
    assert all("torchrun" in line or "call the function itself" in line for line in told)
