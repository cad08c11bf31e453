"""Pickles by value, for processes that do not import the main module and share no memory with this one."""

import sys
from types import ModuleType

import pytest

import paceline as pl
from paceline.processes.shared_pickle import by_value, from_value
from tiny_jobs import tiny_job

TEXT = """
from functools import lru_cache

FACTOR = 2

def double(number):
    return FACTOR * number

@lru_cache(maxsize=3)
def cached(number):
    return double(number)

class Doubled:
    def __init__(self, number):
        self.number = cached(number)
"""


@pytest.fixture
def module(monkeypatch):
    """Make a module of a name that is gone afterwards."""

    def make(name, text=TEXT):
        made = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, made)
        exec(text, vars(made))
        return made

    return make


@pytest.mark.parametrize("name", ["__main__", "__mp_main__"])
def test_what_the_main_module_defines_is_pickled_by_value(name, module):
    main = module(name)
    data = by_value([main.double, main.cached, main.Doubled, main.Doubled(3)])
    module(name, "")
    double, cached, kind, instance = from_value(data)
    assert (double(1), cached(2), kind(3).number, instance.number) == (2, 4, 6, 6)
    assert cached.cache_parameters()["maxsize"] == 3


def test_an_object_pickled_by_name_in_the_main_module_is_refused(module):
    main = module("__main__", "class Named:\n    def __reduce__(self):\n        return 'named'\n\nnamed = Named()\n")
    data = by_value(main.named)
    with pytest.raises(pl.UsageError, match="named was pickled by its name in the main module"):
        from_value(data)


def test_a_module_that_trains_while_it_is_imported_is_refused(tmp_path, monkeypatch):
    text = "import paceline as pl\nfrom tiny_jobs import tiny_job\n\ndef part():\n    pass\n\nif TRAINS:\n    "
    text += "pl.train(tiny_job(), protocol='bsp', cluster=pl.Cluster(2), stop='updates=1')\n"
    (tmp_path / "training_module.py").write_text(text.replace("TRAINS", "False"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the file changes within a second
    data = by_value(__import__("training_module").part)
    (tmp_path / "training_module.py").write_text(text.replace("TRAINS", "True "))
    monkeypatch.delitem(sys.modules, "training_module")
    with pytest.raises(pl.UsageError, match="a module that defines a part of the job trains when it is imported"):
        from_value(data)
    assert pl.train(tiny_job(), protocol="bsp", cluster=pl.Cluster(2), stop="updates=1").history.totals.updates == 1
