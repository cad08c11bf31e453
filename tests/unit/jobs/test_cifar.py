import pickle

import pytest
import torch

from paceline.errors import UsageError
from paceline.jobs import cifar10, cifar100, resnet50
from paceline.jobs.datasets.images import crop_and_flip
from paceline.jobs.registry import load_job

TRAINING_FILES = [f"data_batch_{k}.bin" for k in range(1, 6)]


def record(label):
    """One image of red 10, green 20 and blue 30, whose first pixel of each row is the row's number."""
    planes = [[[row] + [colour] * 31 for row in range(32)] for colour in (10, 20, 30)]
    return bytes([label]) + bytes(torch.tensor(planes).flatten().tolist())


@pytest.fixture
def folder(tmp_path):
    for number, name in enumerate([*TRAINING_FILES, "test_batch.bin"]):
        (tmp_path / name).write_bytes(record(number) + record(9))
    return tmp_path


def test_reads_labels_colours_and_rows_from_the_standard_layout(folder):
    job = cifar10(folder=folder)
    assert job.data.labels.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert job.eval_data.labels.tolist() == [5, 9]
    assert job.data.images.shape == (10, 3, 32, 32)
    assert job.data.images[3, :, :, 1:].unique(dim=-1)[:, 0].flatten().tolist() == [10, 20, 30]
    assert torch.equal(job.data.images[3, 2, :, 0], torch.arange(32, dtype=torch.uint8))


def test_a_sample_is_normalised_by_channel(folder):
    image, label = cifar10(folder=folder, model="softmax").data[1]
    assert image[0, 0, 5].item() == pytest.approx((10 / 255 - 0.4914) / 0.2470, rel=1e-4)
    assert image[2, 0, 5].item() == pytest.approx((30 / 255 - 0.4465) / 0.2616, rel=1e-4)
    assert label.item() == 9


@pytest.mark.parametrize("model", ["resnet20", "softmax"])
def test_the_job_trains_and_can_be_pickled(folder, model):
    job = pickle.loads(pickle.dumps(cifar10(model=model, folder=folder)))
    network = job.model()
    images, labels = job.data.minibatch(torch.arange(4))
    job.loss(network(images), labels).backward()
    optimizer = job.optimizer(network.parameters())
    assert optimizer.defaults["lr"] == 0.1
    assert (optimizer.defaults["momentum"], optimizer.defaults["weight_decay"]) == (0.9, 1e-4)
    assert (job.name, job.batch_size) == (f"cifar10-{model}", 128)


@pytest.mark.parametrize(
    ("settings", "augmented"),
    [
        ({"model": "resnet20"}, True),
        ({"model": "softmax"}, False),
        ({"model": "resnet20", "augment": False}, False),
        ({"model": "softmax", "augment": True}, True),
    ],
)
def test_only_training_images_are_augmented_and_by_default_only_for_a_resnet(folder, settings, augmented):
    job = cifar10(folder=folder, **settings)
    assert job.data.augment is (crop_and_flip if augmented else None)
    assert job.eval_data.augment is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds 0 bytes; expected a multiple of 3073"),
        (record(1)[:-1], "holds 3072 bytes; expected a multiple of 3073"),
        (record(1) + record(10), "holds label 10; expected 0 to 9"),
    ],
)
def test_a_damaged_file_is_named_with_what_was_found_and_expected(folder, content, said):
    (folder / "data_batch_4.bin").write_bytes(content)
    with pytest.raises(UsageError, match=rf"data_batch_4.bin' {said}.*; run 'paceline data fetch cifar10 --to "):
        cifar10(folder=folder)


def test_a_missing_file_is_an_error_with_a_remedy(folder):
    (folder / "test_batch.bin").unlink()
    with pytest.raises(UsageError, match=r"cannot read '.*test_batch.bin': No such file or directory; run "):
        cifar10(folder=folder)


@pytest.fixture
def hundred(tmp_path):
    """Write CIFAR-100 in its standard layout: the coarse label, then the fine one, then the pixels."""
    (tmp_path / "train.bin").write_bytes(b"".join(bytes([19]) + record(label) for label in (0, 57, 99)))
    (tmp_path / "test.bin").write_bytes(bytes([3]) + record(42))
    return tmp_path


def test_cifar100_has_the_fine_labels_and_the_same_pixels(hundred, folder):
    job = cifar100(folder=hundred)
    assert (job.data.labels.tolist(), job.eval_data.labels.tolist()) == ([0, 57, 99], [42])
    assert torch.equal(job.data.images[1], cifar10(folder=folder).data.images[1])
    image, _ = cifar100(folder=hundred, model="softmax").data[1]
    assert image[1, 0, 5].item() == pytest.approx((20 / 255 - 0.4865) / 0.2564, rel=1e-4)


def test_cifar100_trains_its_models_with_100_classes_and_is_called_by_name(hundred):
    job = pickle.loads(pickle.dumps(load_job(f"cifar100(folder={hundred}, model=resnet20)")))
    images, labels = job.data.minibatch(torch.arange(3))
    assert job.model()(images).shape == (3, 100)
    assert (job.name, job.batch_size, labels.tolist()) == ("cifar100-resnet20", 128, [0, 57, 99])
    assert (cifar100(folder=hundred).name, cifar100(folder=hundred).model.func) == ("cifar100-resnet50", resnet50)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (record(1), "holds 3073 bytes; expected a multiple of 3074, one record"),
        (bytes([0]) + record(100), "label 100; expected 0 to 99"),
    ],
)
def test_a_damaged_file_of_cifar100_says_what_to_fetch(hundred, content, said):
    (hundred / "train.bin").write_bytes(content)
    with pytest.raises(UsageError, match=rf"train.bin' .*{said}; run 'paceline data fetch cifar100 --to "):
        cifar100(folder=hundred)
