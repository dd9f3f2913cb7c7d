"""Measures which distribution a server's log-probs belong to, instead of believing it.

The likeliest token is drawn (`top_p` close to 0) at two temperatures. Truncated log-probs are then
zero both times; tempered ones fall as the temperature rises; raw ones stay the same.
"""

import logging
from collections.abc import Sequence
from contextlib import aclosing

from burnish.core.records import GenerateRequest, SamplingParams
from burnish.rollout.remote.dialect import Ask, Dialect, LogprobScope
from burnish.rollout.remote.replica import Replica
from burnish.rollout.remote.wire import Wire

_LOG = logging.getLogger(__name__)

_TOP_P = 1e-6
# The most that servers take.
_HOT = 2.0
# Two prompts that hardly any model continues with certainty.
_PROBES = ((11, 7, 5), (3, 12, 9, 4))
_CERTAIN = -1e-4
# A batch of other requests may move a bf16 log-prob by some tenths; tempering moves it by nats.
_SAME_NATS = 0.5


async def measure_scope(dialect: Dialect, replica: Replica, salt: str) -> LogprobScope:
    """Ask the server: what it says of itself is noted, and what it does counts.

    Raises:
        UserError: it refuses such requests.
        RemoteFailure: it failed.
    """
    wire, model = replica.wire, replica.facts.model
    pairs = []
    for prompt in _PROBES:
        cold = await _likeliest(dialect, wire, model, salt, prompt, 1.0)
        hot = await _likeliest(dialect, wire, model, salt, prompt, _HOT)
        pairs.append((cold, hot))
    measured = LogprobScope.RAW
    if all(cold > _CERTAIN and hot > _CERTAIN for cold, hot in pairs):
        measured = LogprobScope.SAMPLED
    elif all(hot < cold - _SAME_NATS for cold, hot in pairs):
        measured = LogprobScope.TEMPERED
    _LOG.info("%s says %s, measured %s", replica.url, replica.facts.scope, measured)
    return measured


def weakest(scopes: Sequence[LogprobScope]) -> LogprobScope:
    """What all of them can promise."""
    return min(scopes, key=(LogprobScope.RAW, LogprobScope.TEMPERED, LogprobScope.SAMPLED).index)


async def _likeliest(
    dialect: Dialect, wire: Wire, model: str, salt: str, prompt: tuple[int, ...], temperature: float
) -> float:
    params = SamplingParams(max_tokens=1, temperature=temperature, top_p=_TOP_P)
    request = GenerateRequest(request_id="probe", prompt_ids=prompt, params=params)
    async with aclosing(dialect.generate(wire, Ask(request, model, salt))) as chunks:
        async for chunk in chunks:
            if chunk.logprobs:
                return chunk.logprobs[0]
    return float("-inf")
