"""Texts of a balanced script."""

import pytest

from paceline.policies.shares import Pieces
from paceline.shares.texts import hint_of_memory


@pytest.mark.parametrize(("samples", "equal"), [(12, 8), (9, 8), (17, 16), (1000, 700), (4, 8)])
def test_the_share_that_is_named_after_a_lack_of_memory_is_smaller(samples, equal):
    named = float(hint_of_memory(samples, equal).partition("--max-share ")[2].split()[0])
    assert Pieces(equal, pieces=equal, max_share=named).most < max(samples, equal + 1)
