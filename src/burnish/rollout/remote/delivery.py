"""New weights for one replica, and the proof that they are what answers.

The server is asked to score a fixed probe before and after. Other weights and the same scores to
the last bit mean that the old weights still answer: that is an error here, however content the
server was. A different score alone is no proof that the right weights came: labels and digests
are compared as far as the server shows them, and the run's canary compares with the trainer.
"""

import secrets
from collections.abc import Sequence

from burnish.rollout.remote.dialect import Delivery, Dialect
from burnish.rollout.remote.failures import RemoteFailure, RemoteProblem
from burnish.rollout.remote.replica import Replica

# Spread over the vocabulary of any model with at least 100 tokens; long enough to touch every
# layer's norms and heads.
PROBE_IDS = tuple((17 * i * i + 29 * i + 3) % 97 for i in range(24))


async def deliver(
    dialect: Dialect,
    replica: Replica,
    delivery: Delivery,
    *,
    version: int,
    was_digest: str | None,
    timeout_s: float,
) -> None:
    """Update and prove. Returns when the next token will come from `version`.

    Args:
        dialect: of the server.
        replica: the server; its version and label are set.
        delivery: what to send.
        version: of these weights.
        was_digest: of the weights that it serves now; None if that is not known.
        timeout_s: for the update itself.

    Raises:
        UserError: the server refuses the weights.
        RemoteFailure: it failed, or still serves the old ones.
    """
    before = replica.scores
    if before is None and was_digest is not None:
        before = await score_fresh(dialect, replica, PROBE_IDS)
    await dialect.update(replica.wire, delivery, timeout_s)
    replica.serve(version, delivery.label if replica.label is not None else None)
    after = await score_fresh(dialect, replica, PROBE_IDS)
    if was_digest is not None and was_digest != delivery.digest and after == before:
        what = f"version {version}: it scores the probe exactly as before the update"
        raise RemoteFailure(RemoteProblem.NOT_DELIVERED, replica.url, what)
    await dialect.check_delivery(replica.wire, delivery, replica.facts.dtype)
    replica.scores = after


async def score_fresh(
    dialect: Dialect, replica: Replica, token_ids: Sequence[int]
) -> tuple[float, ...]:
    """Scores over keys and values of their own: nothing that was computed before is reused."""
    if not token_ids:
        return ()
    salt = secrets.token_hex(8)
    return await dialect.score(replica.wire, token_ids, replica.facts.model, salt)
