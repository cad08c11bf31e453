import pickle

import pytest
import torch

from paceline.errors import UsageError
from paceline.jobs.datasets.images import ImageDataset, crop_and_flip


def make_dataset(**settings):
    images = torch.arange(6 * 2 * 3 * 3, dtype=torch.uint8).reshape(6, 2, 3, 3)
    return ImageDataset(images, torch.arange(6), mean=[0.5, 0.25], std=[0.5, 0.25], **settings)


def test_a_sample_is_normalised_channel_by_channel():
    dataset = make_dataset()
    image, label = dataset[1]
    pixels = dataset.images[1] / 255
    assert torch.allclose(image[0], (pixels[0] - 0.5) / 0.5)
    assert torch.allclose(image[1], (pixels[1] - 0.25) / 0.25)
    assert (image.dtype, label.item(), len(dataset)) == (torch.float32, 1, 6)


def test_a_batch_is_its_samples_stacked():
    dataset = make_dataset()
    images, labels = dataset.minibatch(torch.tensor([4, 0, 4]))
    assert torch.equal(images, torch.stack([dataset[4][0], dataset[0][0], dataset[4][0]]))
    assert labels.tolist() == [4, 0, 4]


def test_reading_does_not_modify_the_stored_bytes():
    dataset = make_dataset()
    before = dataset.images.clone()
    dataset.minibatch(torch.arange(6))
    assert torch.equal(dataset.images, before)


def test_iterating_ends_after_the_last_sample():
    assert [label.item() for _, label in make_dataset()] == [0, 1, 2, 3, 4, 5]


def test_augmented_batches_follow_the_global_seed():
    dataset = pickle.loads(pickle.dumps(make_dataset(augment=crop_and_flip)))
    torch.manual_seed(1)
    first = dataset.minibatch(torch.arange(6))[0]
    second = dataset.minibatch(torch.arange(6))[0]
    torch.manual_seed(1)
    assert torch.equal(dataset.minibatch(torch.arange(6))[0], first)
    assert not torch.equal(first, second)


def test_every_augmented_image_is_a_window_of_the_padded_original_or_its_mirror_image():
    torch.manual_seed(0)
    images = torch.randint(1, 256, (200, 3, 5, 7), dtype=torch.uint8)
    padded = torch.nn.functional.pad(images, (4, 4, 4, 4))
    windows = padded.unfold(2, 5, 1).unfold(3, 7, 1).permute(0, 2, 3, 1, 4, 5)
    seen = set()
    for changed, candidates in zip(crop_and_flip(images), windows, strict=True):
        plain = (candidates == changed).flatten(2).all(2)
        mirrored = (candidates.flip(-1) == changed).flatten(2).all(2)
        assert plain.any() or mirrored.any()
        seen |= {("plain", *at) for at in plain.nonzero().tolist()}
        seen |= {("mirrored", *at) for at in mirrored.nonzero().tolist()}
    assert {row for _, row, _ in seen} == {column for _, _, column in seen} == set(range(9))
    assert {kind for kind, _, _ in seen} == {"plain", "mirrored"}


@pytest.mark.parametrize(
    ("images", "labels", "said"),
    [
        (torch.zeros(2, 1, 3, 3), torch.arange(2), r"images are float32 \[2, 1, 3, 3\]; give uint8"),
        (torch.zeros(2, 3, 3, dtype=torch.uint8), torch.arange(2), r"images are uint8 \[2, 3, 3\]"),
        (torch.zeros(2, 1, 3, 3, dtype=torch.uint8), torch.arange(3), r"labels are int64 \[3\]; .*\[2\]"),
        (torch.zeros(2, 1, 3, 3, dtype=torch.uint8), torch.zeros(2), r"labels are float32 \[2\]; give int64"),
    ],
)
def test_refuses_other_types_and_shapes(images, labels, said):
    with pytest.raises(UsageError, match=said):
        ImageDataset(images, labels, mean=[0.0], std=[1.0])
