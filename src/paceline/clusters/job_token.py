"""Tokens of jobs: a fresh one, and an estimate of how hard a given one is to guess."""

from __future__ import annotations

import secrets
from math import log2
from string import ascii_lowercase, ascii_uppercase, digits, hexdigits

from paceline.clusters.launch_env import TOKEN

MIN_BITS = 128
RANDOM_BYTES = 32
MOST_REPEATS = 4  # number of times that one character counts, on average
CLASSES = (ascii_lowercase, ascii_uppercase, digits, "-_+/=")
OTHER_SIGNS = 28  # printable ASCII characters in no class


def make_token() -> str:
    """Return a random token of 256 bits, in letters, digits, ``-`` and ``_``."""
    return secrets.token_urlsafe(RANDOM_BYTES)


def estimate_bits(token: str) -> float:
    """Return an upper estimate of the entropy of a token in bits.

    A random token of n characters from an alphabet of m has ``n * log2(m)`` bits. The alphabet follows from the classes
    of characters in the token: 10 for digits, 16 for hexadecimal digits, and else the sum of lower case (26), upper
    case (26), digits (10), signs of base64 (5) and others (28). At most four characters for each different one count,
    so that repeating a short text adds nothing. Words have fewer bits than this.

    >>> estimate_bits("0123456789abcdef" * 2)
    128.0
    >>> round(estimate_bits("secret"))
    28
    >>> estimate_bits("")
    0.0
    """
    characters = set(token)
    length = min(len(token), MOST_REPEATS * len(characters))
    if characters <= set(digits):
        alphabet = len(digits)
    elif characters <= set(hexdigits) and token in (token.lower(), token.upper()):
        alphabet = 16
    else:
        found = [each for each in CLASSES if characters & set(each)]
        alphabet = sum(map(len, found)) + OTHER_SIGNS * bool(characters - set("".join(CLASSES)))
    return length * log2(alphabet)


def describe_weakness(token: str) -> str:
    """Return why a token is easy to guess, and what to type instead; empty for a token of `MIN_BITS` or more.

    >>> describe_weakness("secret")
    'PACELINE_TOKEN has about 28 bits, expected at least 128: paceline token makes one'
    """
    bits = estimate_bits(token)
    if bits >= MIN_BITS:
        return ""
    return f"{TOKEN} has about {bits:.0f} bits, expected at least {MIN_BITS}: paceline token makes one"
