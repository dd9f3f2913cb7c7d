import asyncio

import pytest
import torch

from burnish.core.clock import ManualClock
from burnish.core.errors import ClassifiedFailure
from burnish.model.config import ModelConfig
from burnish.model.decoder import Decoder
from burnish.rollout.engine.score import reference_score
from burnish.rollout.engine.worker import EngineWorker
from burnish.run.publish import Publisher, WeightSource

PROBE = tuple(range(5, 25))


def tiny():
    torch.manual_seed(0)
    return Decoder(
        ModelConfig(
            family="llama",
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            max_position_embeddings=64,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
        )
    )


def publish(delivered, masters, version=1):
    """Serve `delivered` while the trainer holds `masters`."""

    async def snapshot():
        return delivered

    async def score(ids):
        return reference_score(masters, ids, torch.bfloat16)

    async def go():
        engine = EngineWorker(masters.config, tiny().state_dict(), num_threads=1)
        try:
            publisher = Publisher(
                engine,
                WeightSource(snapshot, score),
                probe_ids=PROBE,
                tolerance=0.0,
                clock=ManualClock(),
            )
            return await publisher.publish(version)
        finally:
            await engine.close()

    return asyncio.run(go())


def moved(decoder, name, by):
    state = {n: t.clone() for n, t in decoder.state_dict().items()}
    state[name] += by
    return state


def test_delivered_weights_answer_with_the_same_bits():
    masters = tiny()
    publication = publish(masters.state_dict(), masters)
    assert publication.version == 1
    assert publication.canary_max_abs_diff == 0.0


@pytest.mark.parametrize("name", list(tiny().state_dict()))
def test_one_stale_tensor_stops_the_run_with_both_values_named(name):
    masters = tiny()
    stale = moved(masters, name, 0.05)
    with pytest.raises(ClassifiedFailure) as caught:
        publish(stale, masters)
    message = caught.value.failure.message
    assert "the trainer gives log-prob" in message
    assert "the engine" in message
    assert caught.value.failure.where == "canary of the served weights"
