"""How often guesses were right: an estimate that forgets."""

# Weight that one verification keeps after the next; a request changes its mind within about ten.
_KEPT = 0.9
# An estimate that is not used drifts back to what others see, so that it is tried again.
_KEPT_IDLE = 0.995
# How many tokens of experience the prior is worth.
_PRIOR_TOKENS = 2.0


class Acceptance:
    """Probability that the next drafted token is accepted, given that those before it were."""

    def __init__(self, prior: float, kept: float = _KEPT) -> None:
        """Nothing seen; `prior` is the answer until something is."""
        assert 0.0 <= prior <= 1.0
        self.prior, self._kept = prior, kept
        self._right = self._tried = 0.0

    @property
    def rate(self) -> float:
        """The estimate, in [0, 1]."""
        return (self._right + _PRIOR_TOKENS * self.prior) / (self._tried + _PRIOR_TOKENS)

    def saw(self, num_accepted: int, num_drafted: int) -> None:
        """A draft was checked. What follows a wrong token was never tried."""
        assert 0 <= num_accepted <= num_drafted
        self._right = self._kept * self._right + num_accepted
        self._tried = self._kept * self._tried + num_accepted + (num_accepted < num_drafted)

    def idle(self) -> None:
        """A step went by without a draft."""
        self._right *= _KEPT_IDLE
        self._tried *= _KEPT_IDLE
