"""Rounds of sums that the ranks begin before it is known that all of their gradients count."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paceline.engines.distributed.transport.announced_messages import SummedGradient


class EarlyRounds:
    """Rounds of early sums in the newest group, of which each has a task of every member at one version.

    Under BSP all gradients of a version count, so their sum may begin while they are computed. It is used if that has
    come true. All members take part in every round, in the same order. So once one of them has missed a round, no sum
    begins early until another group forms.

    Args:
        is_certain: whether every gradient counts unless something fails.

    Example:
        >>> rounds = EarlyRounds(is_certain=True)
        >>> rounds.form(1, {0, 1})
        >>> [rounds.give(worker, version=0) for worker in (0, 1)]
        [1, 1]
        >>> rounds.begun(0, draw=1)
        >>> rounds.begun(1, draw=1)
        >>> gradients = [SummedGradient(worker, 1, 8.0, at=worker) for worker in (0, 1)]
        >>> rounds.generation_of(gradients), rounds.generation_of(gradients[:1])
        (1, 0)
    """

    def __init__(self, *, is_certain: bool) -> None:
        self.is_certain = is_certain
        self._generation = 0  # of the group; 0 where nothing is summed early
        self._members: frozenset[int] = frozenset()
        self._newest = -1  # version of a task
        self._version = -1  # of the round; before the first one, the newest one when the group formed
        self._given: set[int] = set()  # members with a task of the round
        self._asked: set[int] = set()  # members whose newest task is summed early in this group
        self._begun: dict[int, int] = {}  # newest draw whose sum a member has begun in this group
        self._has_round = False  # whether a round has begun in this group

    def form(self, generation: int, members: Collection[int]) -> None:
        """Begin anew with the group of this number, of these workers."""
        self._generation = generation if self.is_certain else 0
        self._members = frozenset(members)
        self._version = self._newest
        self._given = set(members)
        self._asked = set()
        self._begun = {}
        self._has_round = False

    def give(self, worker: int, version: int) -> int:
        """Return the group in which the gradient of a worker's task at a version is summed early; 0 for none.

        The first round has a version that is newer than all tasks before the group: other members may have theirs.
        """
        generation = self._generation_for(worker, version)
        if generation:
            self._asked.add(worker)
        else:
            self._asked.discard(worker)
        return generation

    def _generation_for(self, worker: int, version: int) -> int:
        self._newest = max(self._newest, version)
        if not self._has_round and version <= self._version:
            return 0
        if version != self._version and self._given == self._members:
            self._version = version
            self._given = set()
            self._has_round = True
        if version != self._version or worker in self._given or worker not in self._members:
            self._generation = 0
        self._given.add(worker)
        return self._generation

    def begun(self, worker: int, draw: int) -> None:
        """Note that a member has begun its part of the sum with the gradient of a draw.

        A task may be older than the group: then its sum is that of the group before, with other members.
        """
        if worker in self._asked:
            self._begun[worker] = draw

    def generation_of(self, gradients: Sequence[SummedGradient]) -> int:
        """Return the group that has summed these gradients early, each with the same weight; 0 for none."""
        are_begun = all(each.at == each.worker and self._begun.get(each.worker) == each.draw for each in gradients)
        are_equal = len({each.weight for each in gradients}) == 1
        is_round = {each.worker for each in gradients} == self._members == self._given
        return self._generation if are_begun and are_equal and is_round else 0
