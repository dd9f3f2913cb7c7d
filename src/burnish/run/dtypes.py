"""Names of number formats in a configuration, as torch knows them."""

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
