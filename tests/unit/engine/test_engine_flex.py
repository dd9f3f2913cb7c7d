"""Flex attention over pages gives what gathering them gives."""

import msgspec
import pytest
import torch

from burnish.core.errors import UserError
from burnish.core.vocabulary import KvDtype
from burnish.model.config import ModelConfig
from burnish.model.decoder import Decoder
from burnish.rollout.engine.cache.flex import FlexCache
from burnish.rollout.engine.cache.gathered import GatheredCache
from burnish.rollout.engine.cache.step import Span, Step, Visibility
from burnish.rollout.engine.cache.storage import CacheShape
from burnish.rollout.engine.limits import CoreLimits

PAGE, NUM_PAGES = 16, 24
# fp32: some 300 products, summed in another order.
TOLERANCE = 1e-5
STEPS = {
    "tokens of several texts": [
        Span([3], 0, 1),
        Span([5, 1, 9], 37, 38),
        Span([2, 0], 31, 32),
        Span([7, 11], 16, 17),
    ],
    "tokens beside prompts": [
        Span([4, 20], 20, 21),
        Span([*range(10, 20)], 0, 150),
        Span([8, 6, 2], 16, 45),
    ],
    "pages that were given up": [
        Span([5, -1, 9], 40, 41),
        Span([7, -1, -1, 3, 1], 60, 75),
    ],
}


@pytest.mark.slow
# PyTorch warns that it is not compiled: that is what a test without a GPU can have.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("visibility", [Visibility(), Visibility(20, 0), Visibility(20, 4)])
@pytest.mark.parametrize("spans", STEPS.values(), ids=STEPS.keys())
def test_flex_attention_sees_what_gathering_sees(
    spans: list[Span], visibility: Visibility, decoder: Decoder
) -> None:
    config: ModelConfig = msgspec.structs.replace(decoder.config, num_layers=2)
    shape = CacheShape(config, NUM_PAGES, PAGE, torch.float32)
    caches = [GatheredCache(shape), FlexCache(shape)]
    generator = torch.Generator().manual_seed(0)

    def numbers(count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, config.head_dim, generator=generator)

    for layer in range(config.num_layers):
        everywhere = Step([Span([*range(NUM_PAGES)], 0, PAGE * NUM_PAGES)], PAGE, Visibility())
        keys, values = (numbers(everywhere.num_tokens, config.num_kv_heads) for _ in range(2))
        for cache in caches:
            cache.write(layer, everywhere, keys, values)
    for layer in range(config.num_layers):
        step = Step(spans, PAGE, visibility)
        queries = numbers(step.num_tokens, config.num_heads)
        wanted, found = (cache.attend(layer, queries, step) for cache in caches)
        torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0.0)


def test_flex_attention_is_refused_where_it_cannot_be() -> None:
    for limits in (
        CoreLimits(flex=True),
        CoreLimits(flex=True, device="cuda", kv_dtype=KvDtype.INT8),
    ):
        with pytest.raises(UserError, match=r"engine\.flex_attention"):
            limits.check()
    CoreLimits(flex=True, device="cuda").check()
