"""Where an engine computes: this machine's processors, or an accelerator."""

from contextlib import AbstractContextManager, nullcontext

import torch

from burnish.core.errors import UserError, one_line

CPU = torch.device("cpu")


def find_device(name: str) -> torch.device:
    """The device of a name such as "cuda" or "cuda:1", tried with one tensor.

    Raises:
        UserError: there is no such device here.
    """
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it holds no numbers")
        torch.empty(1, device=device)
    # AssertionError: "Torch not compiled with CUDA enabled".
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"engine.device {name!r} cannot be used: {one_line(error)}.",
            fix='set engine.device = "cpu", or install a PyTorch for that device.',
        ) from error
    return device


def placed(device: torch.device) -> AbstractContextManager[object]:
    """New tensors lie on `device`. Nothing is added to what a step on the CPU costs."""
    return nullcontext() if device.type == "cpu" else device
