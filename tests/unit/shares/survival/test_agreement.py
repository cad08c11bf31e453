"""Agreement of the living after losses: a model of ranks that run one script, lose sums, and lose each other."""

import random

import pytest

from paceline.shares.survival.agreement import OutOfStepError, PlaceReport, agree
from paceline.shares.survival.ledger import BatchLedger
from selections import parametrize_few

BATCHES, AHEAD = 12, 3
COLLECTIVE = "collective"


class Rank:
    """Rank whose parameters are the batches that it has used, in order, and which walks through a script.

    An iteration is a sum, a step, and in every third one another collective. Loaders deal ahead.
    """

    def __init__(self):
        self.ledger = BatchLedger()
        self.used, self.results = [], []
        self.position, self.voids, self.stepped = 0, set(), -1
        self.iteration, self.queue, self.place = 0, [], "next"
        self.left = list(range(BATCHES))
        self.is_given = self.is_sum = False
        self.steps = []

    def deal_ahead(self):
        while self.left and len(self.queue) < AHEAD:
            self.queue.append(self.ledger.deal([[self.left.pop(0)]]))

    def next_batch(self):
        while True:
            self.deal_ahead()
            if self.queue:
                batch = self.queue.pop(0)
            elif (owed := self.ledger.take_owed()) is not None:
                batch = self.ledger.deal(owed)
            else:
                return None
            if self.ledger.hand_out(batch):
                return batch

    def walk(self):
        """Go on to the next unit that others take part in, and return what it is; None at the end."""
        while True:
            if self.place == "next":
                self.batch = self.next_batch()
                if self.batch is None:
                    self.place = "end"
                    continue
                self.ledger.compute(self.batch)
                self.place = "sum"
            elif self.place == "sum" and self.position in self.voids:
                self.pass_unit("step")
            elif self.place == "step":
                self.end_iteration()
            else:
                self.is_sum = self.place == "sum"
                return None if self.place == "end" else self.place

    def end_iteration(self):
        self.step()
        self.place = COLLECTIVE if self.iteration % 3 == 2 else "next"
        self.iteration += 1
        self.is_sum = False

    def pass_unit(self, place="step"):
        self.position += 1
        self.place = place

    def complete(self):
        """Have the unit at which the rank stands."""
        if self.place == COLLECTIVE:
            self.results.append(self.iteration)
            self.pass_unit("next")
        else:
            self.pass_unit("step")

    def step(self):
        is_in_vain = not self.is_given and self.ledger.is_in_vain
        if not is_in_vain:
            self.stepped = self.position - 1
            if not self.is_given:
                self.used.append(self.batch.whole[0][0])
        self.steps.append(not is_in_vain)
        self.ledger.end_update(is_used=not is_in_vain)
        self.is_given = False

    def report(self):
        ledger = self.ledger
        return PlaceReport(
            position=self.position,
            voids=tuple(self.voids),
            stepped=self.stepped,
            undone=ledger.undone,
            handed_out=ledger.handed_out,
            dealt=ledger.dealt,
            dropped=ledger.dropped,
            is_sum=self.is_sum,
        )

    def go_on(self, rank, agreed, ranks):
        self.voids = set(agreed.voids)
        if rank in agreed.given:
            self.used, self.is_given = list(ranks[agreed.source].used), True
        self.ledger.give_up(agreed.in_vain, agreed.dropped)
        if self.is_sum:
            self.pass_unit("step")
        elif rank in agreed.told:
            self.complete()


def run(seed, count):
    """Run ranks with losses at random places to the end, and return those that live."""
    draw = random.Random(seed)
    ranks = {rank: Rank() for rank in range(count)}
    while {each.walk() for each in ranks.values()} != {None}:
        if len(ranks) == 1 or draw.random() < 0.8:
            for each in ranks.values():
                if each.place != "end":
                    each.complete()
            continue
        # A rank is lost in the unit: some have it and walk on to the next one, which they cannot have.
        del ranks[draw.choice(list(ranks))]
        for each in ranks.values():
            if each.place != "end" and draw.random() < 0.5:
                each.complete()
                if each.place == "step" and draw.random() < 0.5:
                    each.end_iteration()  # and stand between two units
                else:
                    each.walk()
        settle(draw, ranks)
    return ranks


def settle(draw, ranks):
    """Let the living agree; another loss may come when only some of them have gone on."""
    while True:
        agreed = agree({rank: each.report() for rank, each in ranks.items()})
        is_interrupted = len(ranks) > 1 and draw.random() < 0.4
        before = {rank: list(each.used) for rank, each in ranks.items()}
        went_on = [rank for rank in ranks if not is_interrupted or draw.random() < 0.5]
        for rank in went_on:
            each = ranks[rank]
            each.go_on(rank, agreed, ranks)
        assert all(ranks[rank].used == before[rank] for rank in ranks if rank not in went_on)
        if not is_interrupted:
            return
        for rank in went_on:
            ranks[rank].walk()
        del ranks[draw.choice(list(ranks))]


@parametrize_few("count", [2, 3, 5, 8], keep=1)
def test_the_living_make_the_same_steps_and_use_each_batch_once(count):
    for seed in range(400):
        ranks = run(seed, count)
        histories = {tuple(each.used) for each in ranks.values()}
        assert len(histories) == 1, seed
        assert sorted(histories.pop()) == list(range(BATCHES)), seed
        assert len({(tuple(each.steps), tuple(each.results), each.position) for each in ranks.values()}) == 1, seed


def test_ranks_at_unlike_places_cannot_go_on():
    with pytest.raises(OutOfStepError, match="rank 0 at 3, rank 1 at 5"):
        agree({0: PlaceReport(3), 1: PlaceReport(5)})


def test_a_rank_that_lacks_a_step_gets_the_state_of_the_first_that_has_it():
    agreed = agree(
        {
            1: PlaceReport(4, stepped=2, is_sum=True),
            2: PlaceReport(5, stepped=4, is_sum=True),
            3: PlaceReport(5, stepped=4, is_sum=True),
        }
    )
    assert (agreed.source, agreed.given, agreed.told, agreed.voids) == (2, (1,), (), (5,))


def test_a_sum_that_was_used_in_no_step_is_left_out():
    agreed = agree({0: PlaceReport(4, stepped=2, is_sum=True), 1: PlaceReport(5, stepped=2)})
    assert (agreed.given, agreed.told, agreed.voids) == ((), (), ())


def test_the_result_of_a_collective_is_told():
    agreed = agree({0: PlaceReport(4), 1: PlaceReport(5, is_sum=True)})
    assert (agreed.source, agreed.given, agreed.told, agreed.voids) == (1, (), (0,), (5,))


@pytest.mark.parametrize(
    ("other", "is_apart"),
    [({}, False), ({"checksum": 8}, True), ({"updates": 5}, True), ({"rates": (0.2,)}, True), ({"undone": 3}, False)],
)
def test_a_rank_comes_back_only_to_the_place_of_the_others_with_their_samples(other, is_apart):
    there = PlaceReport(4, updates=4, rates=(0.1,), checksum=7)
    agreed = agree({0: there, 1: there, 2: there._replace(is_new=True, **other)})
    assert (agreed.apart, agreed.late) == ((2,) if is_apart else (), ())
    assert agreed.given == (() if is_apart else (2,))


def test_a_rank_that_was_passed_is_late_and_counts_nothing():
    there = PlaceReport(6, updates=6, handed_out=6, dealt=8)
    agreed = agree({0: there, 1: there, 2: PlaceReport(5, updates=5, handed_out=9, dealt=12, is_new=True)})
    assert (agreed.late, agreed.apart, agreed.given) == ((2,), (), ())
    assert (agreed.in_vain, agreed.dropped) == ((0, 6), ((6, 8),))
