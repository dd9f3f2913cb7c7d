"""What a step costs, from the steps that were measured.

Seconds of a step are taken as a + b * tokens, with a and b of their own for every size of batch
(powers of two): weights are read once, each token adds arithmetic, and keys and values are read
once per sequence. Until there are measurements, a machine is assumed on which about 24 tokens take
as long as reading the weights (bf16 at 300 GFLOP/s over 14 GB/s gives 21).
"""

_TOKENS_PER_READ = 24.0
_KEPT = 0.98
# Spread of token counts, squared, that the prior slope is worth against one measured step.
_PRIOR_SPREAD = 4.0
# From here on a slope is the measured steps' own. Fewer steps are not worth an experiment.
_KNOWN_SPREAD, _FIRST_STEPS = 64.0, 8.0


class _Line:
    """A weighted line through (tokens, seconds) that forgets."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self._weight = self._weight * _KEPT + 1.0
        share = 1.0 / self._weight
        from_tokens, from_seconds = tokens - self._tokens, seconds - self._seconds
        self._tokens += share * from_tokens
        self._seconds += share * from_seconds
        self._squares += share * (from_tokens * (tokens - self._tokens) - self._squares)
        self._products += share * (from_tokens * (seconds - self._seconds) - self._products)

    @property
    def is_blind(self) -> bool:
        """Whether its steps had so much the same number of tokens that the slope is a guess."""
        return self._weight >= _FIRST_STEPS and self._squares * self._weight < _KNOWN_SPREAD

    def at(self, tokens: float) -> float:
        assumed = self._seconds / (_TOKENS_PER_READ + self._tokens)
        prior = _PRIOR_SPREAD / self._weight
        slope = (self._products + prior * assumed) / (self._squares + prior)
        return max(self._seconds + max(0.0, slope) * (tokens - self._tokens), 1e-3 * self._seconds)


class StepCosts:
    """Cost of a forward by number of sequences and tokens."""

    def __init__(self) -> None:
        """Nothing measured."""
        self._lines: dict[int, _Line] = {}

    def saw(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step over so many sequences and tokens took so long."""
        if num_rows > 0 and seconds > 0.0:
            self._lines.setdefault(num_rows.bit_length(), _Line()).add(num_tokens, seconds)

    def predict(self, num_rows: int, num_tokens: float) -> float:
        """Cost of such a step: seconds, or a relative number while nothing is measured."""
        if not self._lines:
            return 1.0 + num_tokens / _TOKENS_PER_READ
        wanted = num_rows.bit_length()
        nearest = min(self._lines, key=lambda size: (abs(size - wanted), size))
        return self._lines[nearest].at(num_tokens)

    def is_blind(self, num_rows: int) -> bool:
        """Whether what a token adds to steps of this size is assumed, not measured."""
        line = self._lines.get(num_rows.bit_length())
        return line is not None and line.is_blind

    @property
    def is_measured(self) -> bool:
        """Whether `predict` gives seconds."""
        return bool(self._lines)
