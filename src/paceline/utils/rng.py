"""Counter-based random streams by purpose, so that no draw depends on timing or on other draws."""

from hashlib import blake2b

from numpy.random import Generator, Philox


def stream(seed: int, purpose: str, *keys: int) -> Generator:
    """Return the counter-based random stream of (seed, purpose, keys), the same on every machine.

    Args:
        seed: seed of the run, >= 0.
        purpose: purpose of the numbers, for example ``"compute time"``.
        *keys: further keys, usually the worker, and the draw if each draw has its own stream.

    >>> float(stream(0, "compute time", 3).random()) == float(stream(0, "compute time", 3).random())
    True

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox).
    """
    return Generator(Philox(key=_digest(16, seed, purpose, keys)))


def derived_seed(seed: int, purpose: str, *keys: int) -> int:
    """Return the seed of (seed, purpose, keys) for another library's generator, in [0, 2**63).

    >>> 0 <= derived_seed(0, "dropout", 3, 17) < 2**63
    True
    """
    return _digest(8, seed, purpose, keys) >> 1


def _digest(size_bytes: int, seed: int, purpose: str, keys: tuple[int, ...]) -> int:
    # int(), because the repr of a NumPy integer differs from that of the Python integer.
    name = repr((int(seed), purpose, *map(int, keys)))
    return int.from_bytes(blake2b(name.encode(), digest_size=size_bytes).digest(), "little")
