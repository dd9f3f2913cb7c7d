"""Whether a model can be exact here: the same bits in engine and trainer, in any batch."""

import torch

from burnish.core.errors import UserError
from burnish.model.config import ModelConfig
from burnish.model.kernels.attention import UNIT_KEYS, attention_problem
from burnish.model.kernels.build import INSTALL_FIX
from burnish.model.kernels.library import kernels
from burnish.model.kernels.native_decoder import native_problem


def refuse_inexact(config: ModelConfig, dtype: torch.dtype) -> None:
    """Refuse exact mode where PyTorch's operators would have to do the work: their bits vary.

    Raises:
        UserError: naming what is missing.
    """
    if dtype is not torch.bfloat16:
        raise UserError(
            f"exact mode computes in bfloat16, not in {str(dtype).removeprefix('torch.')}.",
            fix="set the dtype to bfloat16, or exact to false, in [engine] and [train].",
        )
    problem = native_problem(config) or attention_problem(config.head_dim, UNIT_KEYS, dtype)
    if problem is not None:
        fix = "set exact to false in [engine] and [train]."
        if kernels().can_build:
            fix = f"{INSTALL_FIX}; or {fix}"
        raise UserError(f"exact mode needs the native kernels: {problem}.", fix=fix)
