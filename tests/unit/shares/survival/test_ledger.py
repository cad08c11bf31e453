"""Ledger of batches after losses."""

from paceline.shares.survival.ledger import BatchLedger


def dealt(ledger, count):
    return [ledger.deal([[10 * number], [10 * number + 1]]) for number in range(count)]


def owed(ledger):
    return list(iter(ledger.take_owed, None))


def test_a_batch_that_no_step_has_used_is_owed():
    ledger = BatchLedger()
    batches = dealt(ledger, 3)
    for batch in batches[:2]:
        assert ledger.hand_out(batch)
        assert ledger.compute(batch)
    assert not ledger.is_in_vain
    ledger.end_update(is_used=False)
    assert owed(ledger) == [batch.whole for batch in batches[:2]]
    assert ledger.undone == 0


def test_a_batch_of_a_second_step_is_told():
    ledger = BatchLedger()
    (batch,) = dealt(ledger, 1)
    ledger.hand_out(batch)
    assert ledger.compute(batch)
    ledger.end_update(is_used=True)
    assert not ledger.compute(batch)


def test_batches_dealt_before_a_loss_are_in_vain_or_are_not_handed_out():
    ledger = BatchLedger()
    batches = dealt(ledger, 6)
    for batch in batches[:3]:
        ledger.hand_out(batch)
    ledger.compute(batches[0])
    ledger.end_update(is_used=True)
    ledger.give_up((ledger.undone, ledger.handed_out), ((ledger.handed_out, ledger.dealt),))
    for batch in batches[1:3]:
        ledger.compute(batch)
        assert ledger.is_in_vain
        ledger.end_update(is_used=False)
    assert [ledger.hand_out(batch) for batch in batches[3:]] == [False] * 3
    assert owed(ledger) == [batch.whole for batch in batches[1:]]
    later = ledger.deal(batches[1].whole)
    assert ledger.hand_out(later)
    ledger.compute(later)
    assert not ledger.is_in_vain


def test_a_rank_that_begins_later_counts_as_the_others():
    ledger = BatchLedger()
    ledger.hand_out(ledger.deal([[0]]))
    ledger.shift(50)
    assert (ledger.handed_out, ledger.dealt) == (51, 51)
    ledger.shift(50)
    assert ledger.handed_out == 51
