"""Ledger of gradients that count: each is in one sum, and what a lost rank has is found again before its sum."""

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.events import Accept, Apply, Compute
from paceline.engines.distributed.announced_sums.gradient_ledger import GradientLedger
from paceline.engines.distributed.transport.announced_messages import LOST, SummedGradient

WORKERS = 3


def update(version):
    return Apply(version=version, gradients=(), lr_scale=1.0, reason="")


def accepted(ledger, worker, draw, version=0, samples=4, missing=b""):
    ledger.assign(Compute(worker, version, draw))
    ledger.accept(Accept(worker=worker, draw=draw, staleness=0, samples=samples), missing)


def test_a_sum_has_what_was_accepted_since_the_one_before():
    ledger = GradientLedger()
    accepted(ledger, 0, 1)
    accepted(ledger, 1, 1, samples=6)
    assert ledger.has_next
    first = ledger.announce(None)
    assert [each.summed for each in first.gradients] == [SummedGradient(0, 1, 4, at=0), SummedGradient(1, 1, 6, at=1)]
    assert not ledger.has_next
    accepted(ledger, 0, 2)
    second = ledger.announce(update(1))
    assert [each.summed for each in second.gradients] == [SummedGradient(0, 2, 4, at=0)]
    assert (first.number, second.number, ledger.version) == (1, 2, 1)
    assert (first.version, second.version) == (1, 1)


def test_a_parameter_is_missing_from_a_sum_if_it_is_from_each_gradient():
    ledger = GradientLedger()
    accepted(ledger, 0, 1, missing=bytes([0b011]))
    accepted(ledger, 1, 1, missing=bytes([0b110]))
    assert [number in ledger.announce(None).missing for number in range(1)] == [False]
    accepted(ledger, 0, 2, missing=bytes([0b011]))
    accepted(ledger, 1, 2, missing=bytes([0b110]))
    missing = ledger.announce(None).missing
    assert [number in missing for number in range(3)] == [False, True, False]


def test_what_a_lost_rank_has_is_lost_until_another_one_has_it():
    ledger = GradientLedger()
    accepted(ledger, 0, 1)
    accepted(ledger, 1, 1)
    ledger.announce(update(1))
    accepted(ledger, 1, 2, version=1)
    ledger.lose(1)
    assert ledger.has_lost
    [in_sum] = ledger.lost(in_sums=True)
    assert (in_sum.task.worker, in_sum.task.draw) == (1, 1)
    assert ledger.lost(in_sums=False) == [in_sum], "no rank has version 1 yet"
    assert [each.at for each in ledger.open_gradients()] == [0, LOST]
    in_sum.at = 0
    assert ledger.open_gradients() == [SummedGradient(0, 1, 4, at=0), SummedGradient(1, 1, 4, at=0)]
    ledger.settle(1)
    assert ledger.open_gradients() == []
    [of_next] = ledger.lost(in_sums=False)
    assert (of_next.task.worker, of_next.task.draw) == (1, 2)
    assert ledger.lost(in_sums=True) == []
    of_next.at = 2
    assert not ledger.has_lost


def test_a_gradient_that_is_accepted_after_its_rank_was_lost_is_lost():
    ledger = GradientLedger()
    ledger.assign(Compute(1, 0, 5))
    ledger.lose(1)
    ledger.accept(Accept(worker=1, draw=1, staleness=0, samples=4), b"")
    assert ledger.has_lost
    ledger.lost(in_sums=False)[0].at = 0
    accepted(ledger, 1, 6)  # of the process that has come back
    assert not ledger.has_lost


def test_a_rank_that_is_lost_takes_what_it_has_computed_for_another_one():
    ledger = GradientLedger()
    accepted(ledger, 0, 1)
    ledger.lose(0)
    [lost] = ledger.lost(in_sums=False)
    lost.at = 2
    ledger.lose(2)
    assert ledger.lost(in_sums=False) == [lost]


def test_a_lost_stale_gradient_can_be_computed_again_at_a_later_version():
    ledger = GradientLedger()
    accepted(ledger, 0, 1, version=0)
    for version in range(1, 4):
        ledger.announce(update(version))
        accepted(ledger, 0, version + 1, version=version)
    ledger.settle(3)
    accepted(ledger, 1, 1, version=0)  # which began before the updates
    ledger.lose(1)
    assert [(each.task.worker, each.task.version) for each in ledger.lost(in_sums=False)] == [(1, 0)]


def test_a_gradient_says_which_sums_all_ranks_have():
    ledger = GradientLedger()
    for version in range(50):
        accepted(ledger, 0, version + 1, version=version)
        ledger.announce(update(version + 1))
        assert len(ledger.open_gradients()) <= 2


def test_a_resumed_run_begins_with_its_version():
    ledger = GradientLedger()
    ledger.resume_at(7)
    accepted(ledger, 0, 1, version=7)
    ledger.lose(0)
    assert len(ledger.lost(in_sums=False)) == 1


steps = st.lists(
    st.one_of(
        st.tuples(st.just("gradient"), st.integers(0, WORKERS - 1)),
        st.tuples(st.just("sum"), st.booleans()),
        st.tuples(st.just("lose"), st.integers(0, WORKERS - 1)),
        st.tuples(st.just("settle"), st.integers(0, 3)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_each_gradient_is_in_one_sum_and_at_a_rank_when_it_is_announced(script):
    ledger, draws, counted, announced, versions = GradientLedger(), [0] * WORKERS, [], [], {}
    for kind, argument in script:
        if kind == "gradient":
            draws[argument] += 1
            accepted(ledger, argument, draws[argument], version=ledger.version)
            counted.append((argument, draws[argument]))
        elif kind == "lose":
            ledger.lose(argument)
            assert all(each.at != argument for each in ledger.open_gradients())
        elif kind == "settle":
            number = max((each.number for each in announced), default=0) - argument
            ledger.settle(number)
            for each in announced[: max(0, number)]:
                assert not {one.summed for one in each.gradients if one.at is not None} & set(ledger.open_gradients())
        elif ledger.has_next or argument:
            while ledger.has_lost:  # as the coordinator does
                found = ledger.lost(in_sums=False)
                for each in found:
                    assert each.task.version <= ledger.version
                    each.at = 0
                if not found:
                    ledger.settle(ledger.number)
            made = ledger.announce(update(ledger.version + 1) if argument and ledger.has_next else None)
            assert all(each.at is not None and each.number == made.number for each in made.gradients)
            announced.append(made)
            versions[made.number] = ledger.version
    summed = [(each.task.worker, each.task.draw) for one in announced for each in one.gradients]
    assert len(set(summed)) == len(summed)
    assert summed == counted[: len(summed)], "in the order in which they were accepted"
    assert list(versions) == list(range(1, len(announced) + 1))
