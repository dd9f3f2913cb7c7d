"""Which cache a machine and a model get."""

from burnish.model.kernels.attention import attention_problem
from burnish.rollout.engine.cache.flashinfer import FlashInferCache, flashinfer_problem
from burnish.rollout.engine.cache.gathered import GatheredCache
from burnish.rollout.engine.cache.paired import PairedCache
from burnish.rollout.engine.cache.storage import CacheShape, KvCache


def open_cache(shape: CacheShape) -> KvCache:
    """Native kernels where they can serve the model, PyTorch's operators elsewhere.

    On CUDA flex attention if it is asked for, else FlashInfer's kernels where they are installed.
    """
    config = shape.config
    if shape.flex and shape.device.type == "cuda":
        # Its import takes as long as loading a small model.
        from burnish.rollout.engine.cache.flex import FlexCache

        return FlexCache(shape)
    if shape.device.type != "cpu":
        return FlashInferCache(shape) if flashinfer_problem(shape) is None else GatheredCache(shape)
    if attention_problem(config.head_dim, shape.page_size, shape.dtype) is None:
        return PairedCache(shape)
    return GatheredCache(shape)
