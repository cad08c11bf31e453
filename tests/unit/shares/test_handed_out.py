"""Which batch a pass computes, and which loaders train."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from paceline.errors import UsageError
from paceline.shares.batches import divided
from paceline.shares.handed_out import HandedOut, HandedOutBatches
from paceline.shares.training_loaders import TrainingLoaders

LOADER, OTHER = DataLoader(range(4)), DataLoader(range(4))


def batch(own, loader=LOADER, iteration=None):
    """Return a batch of rank 0, of which rank 1 computes the rest of 16."""
    return HandedOut(loader, divided((own, 16 - own), 8)._replace(iteration=iteration))


@pytest.fixture
def batches():
    return HandedOutBatches(0, lambda loader: loader is LOADER)


def test_a_plain_loop_computes_the_batch_that_it_was_given(batches):
    for own in (8, 8, 10, 6):
        given = batch(own)
        batches.add(given)
        batches.forward_began([(own,)])
        assert batches.backward_began() is given


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_batches_that_are_taken_ahead_are_told_apart_by_their_sizes(batches, ahead):
    given = [batch(own) for own in (8, 8, 8, 10, 10, 6, 8, 8, 12, 12, 12)]
    for number, each in enumerate(given):
        for taken in given[number + ahead : number + ahead + 1] if number else given[: ahead + 1]:
            batches.add(taken)
        batches.forward_began([(each.dealt.samples[0], 3), (64,)])
        assert batches.backward_began().dealt == each.dealt


def test_batches_of_a_whole_update_may_be_taken_at_once(batches):
    for update in ((8, 8, 8), (10, 10, 6), (6, 8, 8)):
        given = [batch(own) for own in update]
        for each in given:
            batches.add(each)
        for each in given:
            batches.forward_began([(each.dealt.samples[0],)])
            assert batches.backward_began().dealt == each.dealt


def test_a_second_pass_computes_the_same_batch(batches):
    batches.add(batch(10))
    batches.forward_began([(10,)])
    first = batches.backward_began()
    batches.forward_began([(10,)])
    assert batches.backward_began() is first
    assert batches.backward_began() is first


def is_repeated(batches, samples):
    """Compute so many samples once, and return whether they are of a batch that the script has kept."""
    batches.forward_began([(samples,)])
    batches.backward_began()
    return batches.is_repeated


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_batch_that_a_script_has_kept_is_told_once_its_loader_has_ended(batches, passes, is_ahead):
    sizes = [8, 10, 6]
    for number, own in enumerate(sizes):
        batches.add(batch(own))
        if is_ahead and number == 2:
            batches.loader_ended(LOADER)  # before the last batch is computed
        assert not any(is_repeated(batches, own) for _ in range(passes))
    batches.loader_ended(LOADER)
    assert is_repeated(batches, 6)
    with pytest.raises(UsageError, match="that it has kept"):
        batches.forward_began([(8,)])
    batches.add(batch(8))  # of the next iteration
    assert not is_repeated(batches, 8)


def test_a_batch_may_have_more_passes_than_any_before_while_its_loader_goes_on(batches):
    for own, passes in ((8, 1), (10, 5), (6, 2)):
        batches.add(batch(own))
        assert not any(is_repeated(batches, own) for _ in range(passes))


def read(batches, sizes, loader, ahead=0):
    """Yield the batches of an iteration over a loader, which is some batches ahead."""
    taken, iteration = [], object()
    for own in sizes:
        taken.append(batch(own, loader, iteration))
        batches.add(taken[-1])
        if len(taken) > ahead:
            yield taken.pop(0)
    batches.loader_ended(loader)
    yield from taken


SIZES = st.lists(st.sampled_from((6, 8, 10)), min_size=4, max_size=6)  # more batches than are taken ahead


@settings(deadline=None)
@given(st.lists(st.tuples(SIZES, st.sampled_from([None, LOADER, OTHER]), st.integers(0, 5)), max_size=5), st.data())
def test_a_script_may_evaluate_with_any_loader_between_its_updates(epochs, data):
    ahead = data.draw(st.integers(0, 3))
    batches = HandedOutBatches(0, lambda loader: loader is LOADER)
    for sizes, evaluated, at in epochs:
        for number, each in enumerate(read(batches, sizes, LOADER, ahead)):
            batches.forward_began([(each.dealt.samples[0], 5)])
            assert batches.backward_began() is each
            if evaluated is not None and number == at:
                list(read(batches, data.draw(SIZES), evaluated, ahead))


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_loader_may_be_made_anew_for_each_epoch_and_read_for_other_purposes(ahead):
    loaders = [DataLoader(range(4)) for _ in range(3)]
    trained = []
    batches = HandedOutBatches(0, lambda loader: loader in trained)
    for loader in loaders:
        for each in read(batches, (8, 8, 10, 8, 6), loader, ahead):
            batches.forward_began([(each.dealt.samples[0],)])
            assert batches.backward_began() is each
            trained.append(loader)
        list(read(batches, (8, 8, 10), loader, ahead))


def test_batches_for_evaluation_do_not_count(batches):
    batches.add(batch(8))
    batches.forward_began([(8,)])
    batches.backward_began()
    for _ in range(5):
        batches.add(batch(8, OTHER))
    trained = batch(8)
    batches.add(trained)
    batches.forward_began([(8,)])
    assert batches.backward_began() is trained


@pytest.mark.parametrize("is_seen", [False, True])
def test_the_latest_batch_counts_where_the_model_does_not_show_it(batches, is_seen):
    for own in (8, 10, 12):
        given = batch(own)
        batches.add(given)
        if is_seen:
            batches.forward_began([(64,)])
        assert batches.backward_began() is given


def test_batches_taken_ahead_that_cannot_be_told_apart_are_refused(batches):
    batches.add(batch(8))
    batches.add(batch(10))
    with pytest.raises(UsageError, match="taken batches of 8, 10 samples"):
        batches.forward_began([(64,)])


def test_a_loader_trains_if_its_batch_is_computed_or_if_it_takes_part_in_two_passes_in_a_row():
    loaders, second, evaluating = TrainingLoaders(), DataLoader(range(4)), DataLoader(range(4))
    for _ in range(3):
        loaders.handed_out(evaluating, 8)
    for _ in range(3):
        loaders.handed_out(second, 4)
        loaders.handed_out(LOADER, 8)
        loaders.backward_began(LOADER, 8)
        loaders.backward_began(LOADER, 8)
    loaders.handed_out(evaluating, 8)
    loaders.handed_out(LOADER, 8)
    loaders.backward_began(LOADER, 8)
    assert [loaders.batch_size(each) for each in (LOADER, second, evaluating)] == [8, 4, None]
    assert [loaders.trains(each) for each in (LOADER, second, evaluating, None)] == [True, True, False, True]


def test_a_pass_of_as_many_samples_as_with_equal_shares_is_refused(batches):
    batches.add(batch(10))
    with pytest.raises(UsageError, match="computes 8 samples, but this rank's batch has 10"):
        batches.forward_began([(8, 3)])


@pytest.mark.parametrize("shapes", [[(8, 10)], [(8, 3), (10,)], [(80, 3)], [(5, 3)], []])
def test_a_pass_whose_tensors_may_be_of_the_batch_is_not_refused(batches, shapes):
    batches.add(batch(10))
    batches.forward_began(shapes)
    assert batches.backward_began().dealt == batch(10).dealt


def test_a_batch_that_another_thread_has_taken_is_refused_if_it_is_trained_on(batches):
    batches.add(batch(8, OTHER)._replace(is_by_thread=True))  # for evaluation
    batches.add(batch(8))
    batches.forward_began([(8,)])
    batches.backward_began()
    batches.add(batch(8)._replace(is_by_thread=True))
    batches.forward_began([(8,)])
    with pytest.raises(UsageError, match="in another thread"):
        batches.backward_began()


@pytest.mark.parametrize("part", [2, 4])
def test_a_batch_that_is_computed_in_parts_is_refused(batches, part):
    batches.add(batch(8))
    for _ in range(8 // part - 1):
        batches.forward_began([(part, 3)])
        batches.backward_began()
    with pytest.raises(UsageError, match=f"batch of 8 samples in parts of {part}.*batch_size={part}"):
        batches.forward_began([(part, 3)])


def test_passes_that_do_not_show_the_batch_are_no_parts_of_it(batches):
    for _ in range(4):
        batches.add(batch(8))
        batches.forward_began([(4, 8, 3)])
        batches.forward_began([(8, 3)])
        batches.forward_began([(4, 8, 3)])
        batches.backward_began()


def test_batches_of_two_loaders_in_one_pass_have_one_weight():
    batches = HandedOutBatches(0, lambda _: True)
    for own, other in ((8, 8), (10, 10), (6, 6)):
        batches.add(batch(own, LOADER))
        batches.add(batch(other, OTHER))
        batches.forward_began([(own,)])
        batches.forward_began([(other,)])
        batches.backward_began()
    last = HandedOut(LOADER, divided((4, 4), 4))
    batches.add(last)
    batches.add(batch(10, OTHER))
    batches.forward_began([(4,)])
    batches.forward_began([(10,)])
    with pytest.raises(UsageError, match="one backward pass computes batches of several loaders"):
        batches.backward_began()


def test_each_of_two_loaders_may_have_its_own_pass():
    batches = HandedOutBatches(0, lambda _: True)
    batches.add(HandedOut(LOADER, divided((4, 4), 4)))
    batches.add(batch(10, OTHER))
    for samples in (4, 10):
        batches.forward_began([(samples,)])
        assert batches.backward_began().dealt.samples[0] == samples


def test_batches_that_are_taken_ahead_are_counted_in_their_iteration(batches):
    first, second = object(), object()
    for own in (8, 10, 6):
        batches.add(batch(own, iteration=first))
    batches.forward_began([(8,)])
    assert batches.ahead == 2
    batches.add(batch(12, OTHER, second))
    assert batches.ahead == 2
    batches.forward_began([(10,)])
    assert batches.ahead == 1
