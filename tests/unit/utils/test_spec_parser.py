from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.utils.spec_parser import Call, bind, parse_call, split_top


def k_sync(k, wait_s=0.0, verbose=False):
    return k, wait_s, verbose


def bsp():
    return "bsp"


FACTORIES = {"k_sync": k_sync, "bsp": bsp}


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("bsp", Call("bsp")),
        (" bsp ( ) ", Call("bsp")),
        ("k_sync(k=12)", Call("k_sync", {"k": 12})),
        ("f(a=-1.5, b=1e3)", Call("f", {"a": -1.5, "b": 1000.0})),
        ("f(a=inf, b=true, c=false)", Call("f", {"a": inf, "b": True, "c": False})),
        ("f(a=word, b=traces/a-1.csv)", Call("f", {"a": "word", "b": "traces/a-1.csv"})),
        ("f(a=aws@127.0.0.1:8080)", Call("f", {"a": "aws@127.0.0.1:8080"})),
        ("f(a='x, y', b=\"it's)\")", Call("f", {"a": "x, y", "b": "it's)"})),
        ("f(a=[1, 2.0, [x]], b=[])", Call("f", {"a": [1, 2.0, ["x"]], "b": []})),
        ("f(a={b=1, c={d=[x]}}, e={})", Call("f", {"a": {"b": 1, "c": {"d": ["x"]}}, "e": {}})),
    ],
)
def test_valid_texts_are_parsed(text, call):
    assert parse_call(text) == call
    assert [type(value) for value in parse_call(text).kwargs.values()] == [
        type(value) for value in call.kwargs.values()
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["''", "type a name"]),
        ("12", ["'12'", "type a name"]),
        ("k-sync(k=1)", ["'k-sync(k=1)'", "did you mean 'k_sync(k=1)'?"]),
        ("k_sync(k=1", ["'k_sync(k=1'", "type a name"]),
        ("k_sync(12)", ["'12' has no name", "k=12"]),
        ("k_sync(k=1,)", ["'' has no name"]),
        ("k_sync(k=)", ["'' is not a value"]),
        ("k_sync(k=f(x=1))", ["'f(x=1)' is not a value", "type a number"]),
        ("k_sync(k=1 2)", ["'1 2' is not a value"]),
        ("k_sync(k=1, k=2)", ["k is given twice"]),
        ("f(a={1})", ["'1' has no name in {...}", "{GPU=1}"]),
        ("f(a={b=1, b=2})", ["b is given twice"]),
        ("f(a={b=1)", ["ends too early", "type the missing }"]),
        ("k_sync(k=[1)", ["'k=[1' ends too early", "type the missing ]"]),
        ("k_sync(k=1)(k=2)", ["unbalanced ')'"]),
        ("k_sync(k=(1])", ["unbalanced ']'"]),
        ("k_sync(k='1)", ["type the missing '"]),
        ("k_sync(k=([1]))", ["'([1])' is not a value"]),
    ],
)
def test_invalid_syntax_is_an_error_with_a_remedy(text, words):
    with pytest.raises(UsageError) as error:
        parse_call(text)
    assert all(word in str(error.value) for word in words), error.value


@settings(deadline=None)  # a busy machine is not a failure
@given(st.lists(st.text("abc .", min_size=1), min_size=1))
def test_split_inverts_join_for_any_bracket_content(parts):
    wrapped = [f"({part}+[+])'+('" for part in parts]
    assert split_top("+".join(wrapped), "+") == wrapped


def test_split_at_a_separator_of_two_characters():
    assert split_top("a.until(x>>y) >> b >> c", ">>") == ["a.until(x>>y) ", " b ", " c"]


def test_bind_calls_the_factory():
    assert bind(parse_call("bsp"), FACTORIES) == "bsp"
    assert bind(parse_call("k_sync(k=2, verbose=true)"), FACTORIES) == (2, 0.0, True)


def test_the_unit_of_a_knob_may_be_left_out():
    assert bind(parse_call("k_sync(k=2, wait=3)"), FACTORIES) == bind(parse_call("k_sync(k=2, wait_s=3)"), FACTORIES)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("k_sink(k=1)", ["'k_sink' is not known", "did you mean 'k_sync'"]),
        ("zzz", ["'zzz' is not known", "known: bsp, k_sync"]),
        ("k_sync(k=1, verbos=true)", ["no knob 'verbos'", "did you mean 'verbose'"]),
        ("k_sync", ["k_sync needs k", "type k_sync(k=...)"]),
        ("k_sync(k=1, wait=1, wait_s=2)", ["wait_s is given twice"]),
        ("bsp(k=1)", ["bsp has no knobs", "'k'", "type bsp"]),
    ],
)
def test_arguments_that_do_not_fit_the_factory_are_errors_with_a_remedy(text, words):
    with pytest.raises(UsageError) as error:
        bind(parse_call(text), FACTORIES)
    assert all(word in str(error.value) for word in words), error.value
