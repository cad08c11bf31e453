"""Numbers of samples whose data stay with the ranks that compute."""


class SampleNumbers:
    """Numbers of the samples, in place of the data, which stay with the ranks.

    Args:
        count: number of samples, >= 1.
        digest: digest of the first and the last sample, empty if unknown.
    """

    def __init__(self, count: int, digest: str = "") -> None:
        self._count = count
        self.digest = digest

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._count

    def __getitem__(self, index: int) -> int:
        """Return a number."""
        return index
