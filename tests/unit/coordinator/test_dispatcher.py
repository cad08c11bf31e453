"""What a worker without a server computes before it is told to is what it is told to compute then."""

from hypothesis import given
from hypothesis import strategies as st

from arrivals import arrival
from paceline.catalogue.parser import parse_plan
from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.minibatch_sampler import MinibatchSampler
from paceline.core.events import NOT_FINITE, Compute, Drop, Joined, Lost
from paceline.core.stop import Stop
from paceline.protocols.plan_checks import checked_plan


def coordinator(n, per_epoch, partitioned, epochs, ahead):
    minibatches = None
    if per_epoch:
        per_run = epochs * per_epoch
        ahead = 0 if partitioned else ahead
        minibatches = MinibatchSampler(n, per_epoch=per_epoch, partitioned=partitioned, per_run=per_run, ahead=ahead)
    plan = checked_plan(parse_plan("dc_s3gd"), n, total=None, per_epoch=None)
    return Coordinator(plan, workers=n, stop=Stop(updates=50), minibatches=minibatches)


def works(commands):
    return {command.worker: command for command in commands if isinstance(command, Compute)}


@given(
    n=st.integers(1, 5),
    per_epoch=st.sampled_from([0, 1, 3, 7]),
    partitioned=st.booleans(),
    reserve=st.integers(0, 2),
    finite=st.lists(st.booleans(), min_size=60, max_size=60),
    changes=st.lists(st.sampled_from(["none", "none", "none", "lost", "joined"]), min_size=12, max_size=12),
)
def test_next_minibatches_are_known_in_advance_unless_a_worker_joins_or_work_is_requeued(
    n, per_epoch, partitioned, reserve, finite, changes
):
    decides = coordinator(n, per_epoch, partitioned, epochs=4, ahead=reserve)
    at_work = works(decides.begin(0.0))
    draws = iter(finite)
    for now, change in enumerate(changes, start=1):
        if decides.stopped or not at_work:
            return
        first = max(at_work) if change == "joined" else -1  # a newcomer's part no update waits for
        if change == "joined" or (change == "lost" and len(at_work) > 1):
            worker = max(at_work)
            event = Lost(now, worker, "gone") if change == "lost" else Joined(now, worker)
            del at_work[worker]
            at_work |= works(decides.handle(event))
        ahead, commands = decides.expected_work(), []
        for worker in sorted(at_work, key=lambda worker: (worker != first, worker)):
            commands += decides.handle(arrival(now, worker, at_work[worker].draw, finite=next(draws, True)))
        at_work = works(commands)
        came_back = any(isinstance(command, Drop) and command.reason != NOT_FINITE for command in commands)
        for worker, work in at_work.items() if change != "joined" and not came_back else ():
            assert worker in ahead
            assert (work.draw, work.minibatch) == (ahead[worker].draw, ahead[worker].minibatch)
            assert work.upcoming == ahead[worker].upcoming
