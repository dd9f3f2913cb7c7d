"""Builds a decoder from stored tensors, one at a time: the peak is the model plus one tensor."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from burnish.core.errors import UserError
from burnish.model.config import ModelConfig
from burnish.model.decoder import Decoder
from burnish.model.names import Part, parts


def assemble(
    config: ModelConfig, fill: Callable[[Part, Tensor], None], *, source: str, dtype: torch.dtype
) -> Decoder:
    """A decoder in evaluation mode; `fill` writes a part's numbers into the given rows of `dtype`.

    Check names and shapes against `parts(config)` before: this allocates the whole model.

    Raises:
        UserError: if a weight is NaN or infinite.
    """
    # On "meta" the parameters cost nothing: torch would spend 0.7 s to fill 135M of them.
    with torch.device("meta"):
        decoder = Decoder(config)
    state = {
        name: torch.empty(tensor.shape, dtype=dtype)
        for name, tensor in decoder.state_dict().items()
    }
    for part in parts(config):
        rows = state[part.own][part.start : part.start + part.shape[0]]
        fill(part, rows)
        # NaN spreads through min and max: one pass, a third of the time of isfinite().all().
        if not all(map(math.isfinite, torch.stack(rows.aminmax()).tolist())):
            raise UserError(
                f"{source}: tensor {part.own} holds NaN or infinity; the file is damaged.",
                fix="download the file again and compare its checksum.",
            )
    decoder.load_state_dict(state, assign=True)
    return decoder.eval()
