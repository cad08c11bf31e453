"""Tokens of jobs: how many bits they have."""

import secrets

import pytest

from paceline.clusters.job_token import MIN_BITS, describe_weakness, estimate_bits, make_token


def test_a_new_token_is_strong_and_needs_no_quotes_in_a_shell():
    tokens = {make_token() for _ in range(100)}
    assert len(tokens) == 100
    for token in tokens:
        assert estimate_bits(token) >= MIN_BITS
        assert token.replace("-", "").replace("_", "").isalnum()


@pytest.mark.parametrize(
    ("token", "bits"),
    [
        ("", 0),
        ("abcdef", 24),
        ("ABCDEF01", 32),
        ("aBcDeF", 34),
        ("2718281828459045", 53),
        ("ghijklmn", 38),
        ("Ghijklmn", 46),
        ("Ghij-lm4", 49),
        ("Ghij lm4", 52),
        ("grün", 23),
        ("a" * 64, 16),
        ("01" * 64, 27),
    ],
)
def test_length_and_classes_of_characters_give_the_bits(token, bits):
    assert estimate_bits(token) == pytest.approx(bits, abs=0.5)


def test_random_tokens_of_128_bits_give_no_warning():
    for _ in range(200):
        for token in (secrets.token_hex(16), secrets.token_urlsafe(22), secrets.token_hex(16).upper()):
            assert describe_weakness(token) == ""


@pytest.mark.parametrize("token", ["secret", "a" * 100, "fdd46210917fcb0fe00782f76ecada", "1234567890" * 3])
def test_a_short_token_is_reported_without_being_shown(token):
    text = describe_weakness(token)
    assert "expected at least 128: paceline token makes one" in text
    assert token not in text
