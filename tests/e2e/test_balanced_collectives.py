"""Collectives of a script at every place of its training, under unequal shares."""

import pytest

from balance_collectives import CASES, REFUSED
from balanced_ranks import printed_by

pytestmark = [pytest.mark.slow]


@pytest.mark.parametrize("ranks", [2, 3])
def test_values_are_those_of_equal_shares_or_the_call_is_refused(ranks):
    found = {each["case"]: each for each in printed_by("balance_collectives.py", [], ranks)}
    assert list(found) == list(CASES)
    assert {name for name, each in found.items() if each.get("refused") == 2} == REFUSED
    others = [each for name, each in found.items() if name not in REFUSED]
    assert len(others) >= 30
    assert [each for each in others if each["changes"] < 2 or each["distance"] > 1e-12] == []
