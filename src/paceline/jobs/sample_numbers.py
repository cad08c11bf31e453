"""Numbers of samples whose data stay with the ranks that compute."""


class SampleNumbers:
    """Numbers of the samples, in place of the data, which stay with the ranks.

    Args:
        count: number of samples, >= 1.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._count

    def __getitem__(self, index: int) -> int:
        """Return a number."""
        return index
