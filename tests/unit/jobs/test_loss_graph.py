"""What the graph of a loss shows about its divisor."""

import pytest
import torch
from torch.nn import functional

from paceline.jobs.loss_graph import read_loss

SAMPLES, CLASSES = 6, 4


@pytest.fixture
def weight():
    torch.manual_seed(0)
    return torch.randn(5, CLASSES, requires_grad=True)


@pytest.fixture
def output(weight):
    return torch.randn(SAMPLES, 5) @ weight


@pytest.fixture
def target():
    return torch.randint(0, CLASSES, (SAMPLES,))


def kind(loss):
    return read_loss(loss, SAMPLES).weighing


def test_means_count_samples(output, target, weight):
    one_hot = functional.one_hot(target, CLASSES).float()
    for loss in (
        functional.cross_entropy(output, target),
        functional.mse_loss(output, one_hot),
        functional.l1_loss(output, one_hot),
        functional.smooth_l1_loss(output, one_hot),
        functional.huber_loss(output, one_hot),
        functional.binary_cross_entropy_with_logits(output, one_hot),
        functional.kl_div(output.log_softmax(1), one_hot, reduction="batchmean"),
        functional.cross_entropy(output, target, reduction="none").mean(),
        functional.cross_entropy(output, target) / 4,
        functional.cross_entropy(output, target) * 1024.0,
        (output - one_hot).pow(2).mean(),
        (output - one_hot).pow(2).sum() / SAMPLES,
        functional.cross_entropy(output, target) + 0.1 * output.pow(2).mean(),
        functional.cross_entropy(output, target) + 1e-4 * weight.pow(2).sum(),
        functional.cross_entropy(output, target) + 1e-4 * weight.abs().sum(),
        functional.cross_entropy(output, target) + 1e-4 * weight.norm(),
    ):
        assert kind(loss) == "samples", loss.grad_fn


def test_means_over_tokens_count_what_they_divide_by(output, target):
    target[:2] = -100
    reading = read_loss(functional.cross_entropy(output, target), SAMPLES)
    assert (reading.weighing, reading.divisor) == ("tokens", 4.0)
    mask = torch.tensor([1.0, 1, 0, 0, 0, 1])
    reading = read_loss((functional.mse_loss(output, output * 2, reduction="none").sum(1) * mask).sum() / mask.sum(), 6)
    assert (reading.weighing, reading.divisor) == ("divided", 3.0)
    weights = torch.tensor([1.0, 2, 3, 4])
    whole = torch.randint(0, CLASSES, (SAMPLES,))
    reading = read_loss(functional.cross_entropy(output, whole, weight=weights), SAMPLES)
    assert (reading.weighing, reading.divisor) == ("tokens", pytest.approx(float(weights[whole].sum())))


def test_sums_count_nothing(output, target):
    for loss in (
        functional.cross_entropy(output, target, reduction="sum"),
        output.pow(2).sum(),
        -output.pow(2).sum() * 0.5,
        1 - output.pow(2).sum(),
        output.pow(2).mean(1).sum(),  # over samples, of means over classes
        output.pow(2).sum(0).mean(),  # over classes, of sums over samples
        functional.mse_loss(output, output.detach() * 2, reduction="sum") - torch.sum(1 + output - output.exp()),
    ):
        assert kind(loss) == "none", loss.grad_fn


def test_a_sum_over_a_number_shows_the_number(output, target):
    for divisor in (1000, 1000.0, torch.tensor(1000), torch.tensor(1000.0)):
        reading = read_loss(functional.cross_entropy(output, target, reduction="sum") / divisor, SAMPLES)
        assert (reading.weighing, reading.divisor) == ("divided", 1000.0)


def test_what_the_graph_does_not_show_is_not_guessed(output, target):
    similarity = functional.normalize(output) @ functional.normalize(output).T
    for loss in (
        functional.cross_entropy(output, target) + output.pow(2).sum(),  # a mean and a sum
        output.logsumexp(0).logsumexp(0),
        output.pow(2).mean().sqrt(),
        output.std(),
        output.max(),
        torch.linalg.vector_norm(output),
        similarity.exp().sum().log(),
    ):
        assert kind(loss) is None, loss.grad_fn


def test_label_smoothing_is_a_mean(output, target):
    assert kind(functional.cross_entropy(output, target, label_smoothing=0.1)) == "samples"


def test_of_means_and_sums_the_one_counts_that_reduces_the_samples(output, target, weight):
    sequences = torch.randn(SAMPLES, 7, 5) @ weight
    single = [functional.mse_loss(each, each.detach() + 1) for each in output]
    for loss in (
        output.pow(2).mean(0).sum(),
        output.pow(2).sum(1).mean(),
        output.pow(2).mean(0).mean(),
        sequences.pow(2).sum((1, 2)).mean(),
        (sequences.pow(2).sum((-1, -2)) / torch.arange(1.0, 7)).mean(),
        sequences.transpose(0, 1).pow(2).sum(0).mean(),
        torch.stack([functional.cross_entropy(output, target), output.abs().mean()]).sum(),
        torch.stack(single).mean(),
        functional.cross_entropy(output, target).mean(),
        functional.cross_entropy(output, target) + 0.0 * output.sum(),
    ):
        assert kind(loss) == "samples", loss.grad_fn


def test_a_sum_may_be_multiplied_by_one_over_its_samples(output):
    assert kind(output.pow(2).sum(1).sum() * (1 / SAMPLES)) == "samples"
    assert kind(output.pow(2).sum(1).sum() * 0.3 / SAMPLES / 4) == "samples"


def test_values_that_a_rank_selects_count_by_their_number(output, target):
    chosen = torch.tensor([True, True, False, False, True, True])
    for loss, count in (
        (functional.cross_entropy(output[chosen], target[chosen]), 4),
        (functional.cross_entropy(output, target, reduction="none")[chosen].mean(), 4),
        (functional.mse_loss(output[chosen], output[chosen].detach() * 2), 4 * CLASSES),
        (functional.cross_entropy(output, target.masked_fill(~chosen, -100), label_smoothing=0.1), 4),
    ):
        reading = read_loss(loss, SAMPLES)
        assert (reading.weighing, reading.divisor) == ("tokens", count), loss.grad_fn
    reading = read_loss(output[chosen].pow(2).sum() / chosen.sum(), SAMPLES)
    assert (reading.weighing, reading.divisor) == ("divided", 4)


def test_a_ratio_of_sums_over_the_batch_is_no_mean(output):
    shared, whole = (output.sigmoid() * 0.5).sum(0), output.sigmoid().sum(0)
    for loss in (1 - (shared / whole).mean(), 1 - shared.sum() / whole.sum()):
        assert kind(loss) is None, loss.grad_fn


def test_a_part_of_a_batch_is_not_taken_for_the_batch(output):
    half = output[: SAMPLES - 2]
    assert kind(functional.mse_loss(half, half.detach() + 1)) is None
    assert kind(half.pow(2).mean()) is None
    assert kind(sum(functional.mse_loss(each, each.detach() + 1) for each in output)) is None


def test_sums_over_two_numbers_are_not_guessed(output):
    assert kind(output.pow(2).sum() / 7 + output.abs().sum() / 9) is None
    assert kind(output.pow(2).sum() / 7 + output.abs().sum() / 7) == "divided"


def test_a_comparison_of_each_sample_with_all_is_told(output, target):
    similarity = output @ output.T
    for loss in (
        functional.cross_entropy(similarity, torch.arange(SAMPLES)),
        (functional.cross_entropy(similarity, torch.arange(SAMPLES)) + similarity.pow(2).mean()) / 2,
        similarity.sigmoid().sum() / SAMPLES,
    ):
        assert read_loss(loss, SAMPLES).is_square, loss.grad_fn
    assert not read_loss(functional.cross_entropy(output, target), SAMPLES).is_square


MASK = torch.tensor([1.0, 1, 0, 0, 0, 1])


def test_numbers_below_a_sum_divide_it(output, target):
    losses = functional.cross_entropy(output, target, reduction="none")
    for loss in ((losses / SAMPLES).sum(), (losses * (1 / SAMPLES)).sum(), (torch.tensor(1 / SAMPLES) * losses).sum()):
        assert kind(loss) == "samples", loss.grad_fn
    reading = read_loss((losses * torch.full((SAMPLES,), 1 / SAMPLES)).sum(), SAMPLES)
    assert (reading.weighing, reading.divisor) == ("tokens", 6.0)
    reading = read_loss((losses * MASK / MASK.sum()).sum(), SAMPLES)
    assert (reading.weighing, reading.divisor) == ("divided", 3.0)


def test_weights_that_sum_to_one_make_a_sum_a_mean_over_tokens(output, target):
    losses = functional.cross_entropy(output, target, reduction="none")
    weights = MASK / MASK.sum()
    for loss in (
        (losses * weights).sum(),
        (weights * losses).sum(),
        (losses * MASK * weights).sum(),
        (losses[:, None] * weights[:, None]).sum() / 4,  # of four accumulated ones
        (losses * (MASK / MASK.mean())).mean(),
        (losses * MASK).mean() / MASK.mean(),
        (losses * MASK).mean() / MASK.mean() / 4,
    ):
        reading = read_loss(loss, SAMPLES)
        assert (reading.weighing, reading.divisor) == ("tokens", 3.0), loss.grad_fn


def test_unequal_weights_that_sum_to_one_are_not_guessed(output, target):
    losses = functional.cross_entropy(output, target, reduction="none")
    weights = torch.arange(1.0, SAMPLES + 1)
    for loss in (
        (losses * weights.softmax(0)).sum(),
        (losses * (weights / weights.mean())).mean(),
        (losses * weights).mean() / weights.mean(),
    ):
        assert kind(loss) is None, loss.grad_fn


def test_weights_of_samples_change_neither_a_sum_nor_a_mean(output, target):
    losses = functional.cross_entropy(output, target, reduction="none")
    weights = torch.arange(1.0, SAMPLES + 1)
    assert [kind((losses * each).sum()) for each in (MASK, weights, MASK * weights)] == ["none"] * 3
    assert [kind((losses * each).mean()) for each in (MASK, weights, MASK * weights)] == ["samples"] * 3
    assert kind((output.pow(2) / 2 + output).sum()) == "none"  # a number of one term alone


def test_weights_of_values_that_change_their_shape_in_between_show_nothing(output):
    weights = torch.rand(SAMPLES, CLASSES)
    assert kind(((output * weights).flatten() * weights.flatten()).sum()) == "none"
