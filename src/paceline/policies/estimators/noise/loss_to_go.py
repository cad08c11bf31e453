"""Loss still to go, from the fall of the loss so far."""

from __future__ import annotations

from math import exp, inf, log, nan, sqrt

from paceline.utils.state_dict import Stateful

FIRST_GRADIENTS = 24
STARTS = (1 / 8, 1 / 3)  # of the windows, as shares of the run; both end now
BLOCKS = 64  # at most
LARGEST_RISE = 1.5  # over the least value
SIGNIFICANT, CERTAIN = 3.0, 5.0  # standard errors
SLOPE = 0.63  # of the logarithm of the ratio of both values, against the power of the fall
POWERS = (0.5, 3.0)


class LossToGo(Stateful):
    """Estimator of the loss still to go, P: c / t^p for a loss c / t^p + constant at gradient t.

    The mean losses of blocks of gradients are regressed on 1 / i over two windows, from t / 8 and from t / 3 to now.
    Each slope over t is a value, P_1 and P_2, which are both P if p = 1. Otherwise

        P = P_2 exp(0.63 (1 - p)) / p,    p = 1 - log(P_2 / P_1) / 0.63,    0.5 <= p <= 3,

    within a fifth for p from 0.5 to 2. If one of them is not significant, P is the smaller one, and a value is at least
    its standard error. P is at most 1.5 times its least value in the latest half of the run, or more: noise that raises
    the loss must not look like a loss that has far to go. If no loss was negative, P is at most the mean of the latest
    tenth of the losses.

    Attributes:
        count: number of gradients.
        value: P; nan before the first estimate.
        has_fallen: whether the loss has fallen significantly since the run began.
    """

    _saved = (
        "count",
        "value",
        "has_fallen",
        "_size",
        "_sums",
        "_squares",
        "_lowest",
        "_due_at",
        "_least",
        "_least_before",
        "_halved_at",
        "_dropped_at",
        "_before",
    )

    def __init__(self) -> None:
        self.count = 0
        self.value = nan
        self.has_fallen = False
        self._size = 1  # gradients of a block; the last one may have fewer
        self._sums: list[float] = []
        self._squares: list[float] = []
        self._lowest = inf  # loss of a gradient
        self._due_at = 3  # gradients; P changes little from one gradient to the next
        self._least = self._least_before = inf  # since the run has doubled last, and from then to the doubling before
        self._halved_at = FIRST_GRADIENTS
        self._dropped_at = 0  # gradient of a drop of the learning rate, after which the value is kept for a while
        self._before = 0.0  # mean loss before this drop

    def accept(self, loss: float) -> None:
        """Add the loss of a gradient."""
        if self.count % self._size == 0:
            if len(self._sums) == BLOCKS:
                self._merge()
            self._sums.append(0.0)
            self._squares.append(0.0)
        self.count += 1
        self._sums[-1] += loss
        self._squares[-1] += loss * loss
        self._lowest = min(self._lowest, loss)

    def _merge(self) -> None:
        """Make one block of every two."""
        self._size *= 2
        for values in (self._sums, self._squares):
            values[:] = [one + other for one, other in zip(values[::2], values[1::2], strict=True)]

    def freeze(self) -> None:
        """Keep the value for a ninth of the run so far, and leave the fall until then out.

        This is for a drop of the learning rate by a schedule, after which the loss falls because the noise does.
        """
        if not self._dropped_at and self.count:
            self._dropped_at = self.count
            self._before = self._mean(int(0.9 * self.count))

    def update(self) -> float:
        """Compute P from all gradients so far, and return it."""
        if self._dropped_at:
            if self.count < self._dropped_at / 0.9 + 1:
                return self.value
            self._leave_drop_out()
        if self.count < self._due_at:
            return self.value
        self._due_at = self.count + 1 + self.count // BLOCKS
        (wide, its_error), (narrow, error) = (self._fit(int(start * self.count)) for start in STARTS)
        is_significant = wide > SIGNIFICANT * its_error and narrow > SIGNIFICANT * error
        self.has_fallen |= self.count >= FIRST_GRADIENTS and wide > CERTAIN * its_error
        if is_significant:
            power = min(max(1 - log(narrow / wide) / SLOPE, POWERS[0]), POWERS[1])
            self.value = narrow * exp(SLOPE * (1 - power)) / power
        else:
            self.value = min(max(wide, its_error), max(narrow, error))
        if self._lowest >= 0:
            self.value = min(self.value, self._mean(int(0.9 * self.count)))
        self.value = self._capped(self.value)
        return self.value

    def _capped(self, value: float) -> float:
        """Return the value, at most 1.5 times the least one."""
        if self.count < FIRST_GRADIENTS:
            return value
        if self.count >= 2 * self._halved_at:
            self._halved_at = self.count
            self._least_before, self._least = self._least, inf
        self._least = min(self._least, value)
        return min(value, LARGEST_RISE * min(self._least, self._least_before))

    def _mean(self, first: int) -> float:
        """Return the mean loss of the gradients from this one on, or of a few more."""
        blocks = self._sums[first // self._size :]
        return sum(blocks) / (self.count - (len(self._sums) - len(blocks)) * self._size)

    def _leave_drop_out(self) -> None:
        """Shift the losses before the drop to the level after it, and forget those between."""
        after = self._mean(self._dropped_at + (self.count - self._dropped_at) // 2)
        shift = after - self._before
        for i in range(len(self._sums)):
            count = min(self._size, self.count - i * self._size)
            mean = self._sums[i] / count
            shifted = mean + shift if i < self._dropped_at // self._size else after
            self._squares[i] += count * (shifted * shifted - mean * mean)
            self._sums[i] = count * shifted
        self._dropped_at = 0

    def _fit(self, first: int) -> tuple[float, float]:
        """Return the slope of the loss against 1 / i, over t, and its standard error, from this gradient on."""
        size, t = self._size, self.count
        begin = min(first // size, max(len(self._sums) - 2, 0))
        count = total = xs = squares = products = 0.0
        within = 0.0
        for i in range(begin, len(self._sums)):
            n = min(size, t - i * size)
            x = 1 / (i * size + 0.5 * (n + 1))
            count += n
            total += self._sums[i]
            xs += n * x
            squares += n * x * x
            products += x * self._sums[i]
            within += self._squares[i]
        spread = squares - xs * xs / count
        if spread <= 0:
            return 0.0, 0.0
        slope = (products - xs * total / count) / spread
        rest = within - total * total / count - slope * slope * spread
        return slope / t, sqrt(max(rest, 0.0) / max(count - 2, 1) / spread) / t
