"""State dicts: parts, lists of parts, and entries that an early state lacks."""

import pytest

from paceline.utils.state_dict import Stateful


class Counted(Stateful):
    _saved = ("count",)

    def __init__(self, count=0):
        self._count = count


class Whole(Stateful):
    _saved = ("names",)
    _parts = ("part", "several")
    _defaults = {"names": ["a default"]}  # noqa: RUF012

    def __init__(self, part, several):
        self.names = ["own"]
        self.part = part
        self.several = several


def test_a_part_may_be_one_object_a_list_of_them_or_none():
    state = Whole(None, [Counted(1), Counted(2)]).state_dict()
    assert state == {"names": ["own"], "part": None, "several": [{"count": 1}, {"count": 2}]}
    again = Whole(None, [Counted(), Counted()])
    again.load_state_dict(state)
    assert again.state_dict() == state


def test_a_list_of_parts_has_the_length_of_the_state():
    with pytest.raises(ValueError, match="longer"):
        Whole(None, [Counted()]).load_state_dict(Whole(None, [Counted(), Counted()]).state_dict())


def test_an_entry_that_an_early_state_lacks_has_its_default_which_nothing_changes():
    state = Whole(Counted(3), []).state_dict()
    del state["names"]
    first, second = Whole(Counted(), []), Whole(Counted(), [])
    first.load_state_dict(state)
    first.names.append("another")
    second.load_state_dict(state)
    assert second.names == ["a default"]
    assert second.part.state_dict() == {"count": 3}


def test_an_entry_without_a_default_may_not_be_missing():
    with pytest.raises(KeyError, match="part"):
        Whole(None, []).load_state_dict({"several": []})
