import pickle
import subprocess
import sys
from collections import deque

import pytest
import torch

from paceline.errors import UsageError
from paceline.jobs import digits

pytest.importorskip("sklearn")


def test_the_split_is_fixed_and_scaled_to_one():
    job = digits()
    images, labels = job.data.tensors
    assert images.shape == (1437, 64)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert (images.min().item(), images.max().item()) == (0, 1)
    assert len(job.eval_data) == 360
    torch.manual_seed(5)
    assert torch.equal(digits().data.tensors[0], images)


def test_the_split_loses_no_image_and_holds_every_digit_on_both_sides():
    job = digits()
    counts = [part.tensors[1].bincount() for part in (job.data, job.eval_data)]
    assert sum(counts).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert min(counts[1]) > 20


@pytest.mark.slow
@pytest.mark.parametrize("model", ["softmax", "net"])
def test_plain_sgd_with_the_default_rate_is_quick_and_stable_with_stale_gradients(model):
    torch.manual_seed(0)
    job = pickle.loads(pickle.dumps(digits(model)))
    network = job.model()
    optimizer = job.optimizer(network.parameters())
    images, labels = job.data.tensors
    late, staleness = deque(), 3
    for _ in range(600 + staleness):
        drawn = torch.randint(len(images), (job.batch_size,))
        loss = job.loss(network(images[drawn]), labels[drawn])
        late.append(torch.autograd.grad(loss, list(network.parameters())))
        if len(late) > staleness:
            for parameter, gradient in zip(network.parameters(), late.popleft(), strict=True):
                parameter.grad = gradient
            optimizer.step()
    assert job.loss(network(images), labels).item() < 0.22


def test_without_scikit_learn_the_error_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UsageError, match=r"run: pip install 'paceline\[digits\]'"):
        digits()


@pytest.mark.slow
def test_the_package_is_imported_without_scikit_learn():
    code = "import paceline.jobs, sys; assert not any(name.startswith('sklearn') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
