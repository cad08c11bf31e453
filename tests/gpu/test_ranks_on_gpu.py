"""Ranks that share one GPU, with a loop of the user that is attached."""

from pathlib import Path

import numpy as np
import pytest

import gpu_script
from gpu import DEVICE, on_gpu
from launched_commands import run_on_ranks

pytestmark = on_gpu
ROUNDING = 1e-12  # float64
SERVED, SUMMED = "torchrun(server=true)", "torchrun(server=false)"


def parameters_of(folder, ranks, *arguments, device=DEVICE):
    """Return the parameters with which all ranks end."""
    script = Path(gpu_script.__file__)
    folder.mkdir(exist_ok=True)
    printed = run_on_ranks(ranks, script, *arguments, cwd=folder, DEVICE=device)
    found = dict(line.partition("ANSWER ")[2].split() for line in printed.splitlines() if "ANSWER" in line)
    assert len(found) == ranks, printed
    assert len(set(found.values())) == 1, "all ranks have the same parameters"
    return np.frombuffer(bytes.fromhex(found["0"]))


@pytest.mark.parametrize("cluster", [SERVED, SUMMED])
@pytest.mark.parametrize("kind", ["plain", "clipped", "scaler", "streams"])
def test_the_parameters_are_those_of_the_cpu(kind, cluster, tmp_path):
    ours = parameters_of(tmp_path / "gpu", 2, "bsp", cluster, kind)
    theirs = parameters_of(tmp_path / "cpu", 2, "bsp", cluster, kind, device="cpu")
    assert abs(ours - theirs).max() < ROUNDING


@pytest.mark.parametrize("cluster", [SERVED, SUMMED])
@pytest.mark.parametrize("ranks", [4, 8])
def test_ranks_share_one_gpu(ranks, cluster, tmp_path):
    assert np.isfinite(parameters_of(tmp_path, ranks, "bsp", cluster, "plain")).all()


@pytest.mark.parametrize("protocol", ["k_sync(k=1)", "asp", "balanced(m=2)"])
def test_protocols_train(protocol, tmp_path):
    assert np.isfinite(parameters_of(tmp_path, 2, protocol, SERVED, "plain")).all()


@pytest.mark.parametrize("protocol", ["k_sync(k=1)", "k_async(k=2)", "balanced(m=2)"])
def test_protocols_train_without_a_server(protocol, tmp_path):
    assert np.isfinite(parameters_of(tmp_path, 2, protocol, SUMMED, "plain")).all()


@pytest.mark.parametrize("kind", ["bf16", "compiled"])
def test_loops_with_less_precision_or_a_compiler_train(kind, tmp_path):
    assert np.isfinite(parameters_of(tmp_path, 2, "bsp", SERVED, kind)).all()


def test_several_servers_share_the_gpu(tmp_path):
    assert np.isfinite(parameters_of(tmp_path, 2, "bsp", "torchrun(server=true,shards=2)", "plain")).all()
