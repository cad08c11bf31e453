import gzip
import pickle
import struct

import pytest
import torch

from paceline.errors import UsageError
from paceline.jobs import mnist
from paths import ROOT

SHARED = ROOT.parent / "shared/data/mnist"


def idx(items, *shape):
    return struct.pack(f">4B{len(shape)}I", 0, 0, 8, len(shape), *shape) + bytes(items)


@pytest.fixture
def folder(tmp_path):
    for split, count in (("train", 4), ("t10k", 2)):
        images = idx([7] * count * 28 * 28, count, 28, 28)
        (tmp_path / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (tmp_path / f"{split}-labels-idx1-ubyte").write_bytes(idx(range(count), count))
    return tmp_path


@pytest.mark.parametrize("model", ["dbw", "softmax"])
def test_the_job_reads_plain_and_compressed_files_and_can_be_sent_to_a_process(folder, model):
    job = pickle.loads(pickle.dumps(mnist(model=model, batch_size=3, folder=folder)))
    images, labels = job.data.minibatch(torch.tensor([3, 1]))
    assert images.shape == (2, 1, 28, 28)
    assert images.unique().item() == pytest.approx((7 / 255 - 0.1307) / 0.3081)
    assert labels.tolist() == [3, 1]
    assert (job.name, job.batch_size, len(job.eval_data)) == (f"mnist-{model}", 3, 2)
    network = job.model()
    job.loss(network(images), labels).backward()
    assert job.optimizer(network.parameters()).defaults["lr"] == 0.08


def test_a_missing_file_is_an_error_with_a_remedy(folder):
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(UsageError) as caught:
        mnist(folder=folder)
    assert "t10k-labels-idx1-ubyte.gz': No such file or directory" in str(caught.value)
    assert f"run 'paceline data fetch mnist --to {folder}' or give folder=PATH" in str(caught.value)


def test_a_label_that_is_not_a_digit_is_refused(folder):
    (folder / "train-labels-idx1-ubyte").write_bytes(idx([0, 1, 10, 2], 4))
    with pytest.raises(UsageError, match=r"train-labels-idx1-ubyte' holds label 10; expected 0 to 9; run"):
        mnist(folder=folder)


def test_one_label_too_few_is_refused(folder):
    (folder / "train-labels-idx1-ubyte").write_bytes(idx([0, 1, 2], 3))
    with pytest.raises(UsageError, match=r"labels are int64 \[3\]; give int64 \[4\]"):
        mnist(folder=folder)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": "sofmax"}, "no model 'sofmax'; did you mean 'softmax'"),
        ({"lr": 0}, r"lr=0 is not a number in \(0, inf\)"),
    ],
)
def test_a_wrong_setting_is_refused(folder, settings, said):
    with pytest.raises(UsageError, match=said):
        mnist(folder=folder, **settings)


@pytest.mark.skipif(not SHARED.exists(), reason="the real files are not here")
def test_the_real_files():
    job = mnist(folder=SHARED)
    assert job.data.images.shape == (60_000, 1, 28, 28)
    assert job.eval_data.images.shape == (10_000, 1, 28, 28)
    assert job.data.images.dtype == torch.uint8
    assert job.data.labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    everything, _ = job.data.minibatch(torch.arange(0, 60_000, 10))
    assert everything.mean().item() == pytest.approx(0, abs=0.02)
    assert everything.std().item() == pytest.approx(1, abs=0.02)
