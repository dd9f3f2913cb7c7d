"""A second device in this process: its tensors cannot meet the host's unless they are moved.

For code that will run on an accelerator where there is none: the numbers are the CPU's, and an
operation that mixes devices fails as it would there. PyTorch calls a device like this one a Python
backend of the key PrivateUse1; it is registered for the whole process, so use a process of its own.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

NAME = "far"
# What may take tensors of both sides.
_MOVES = frozenset({"aten::_to_copy", "aten::copy_", "aten::_copy_from"})


class FarTensor(torch.Tensor):
    """Numbers that the host reaches only by moving them."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "FarTensor":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def tolist(self) -> Any:
        return self.held.tolist()

    def cpu(self, *_: Any) -> Tensor:
        return self.held.clone()

    @classmethod
    def __torch_dispatch__(cls, op: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(op, args, kwargs or {})


def compute(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = op.name().split(".")[0]
    asked = kwargs.pop("device", None)
    is_far = asked is not None and torch.device(asked).type == NAME

    def bring(value: Any) -> Any:
        nonlocal is_far
        if isinstance(value, FarTensor):
            is_far = is_far or asked is None
            return value.held
        if isinstance(value, Tensor) and value.dim() and name not in _MOVES:
            raise RuntimeError(f"{op} was given a tensor of the host among those of {NAME}")
        return value

    plain, options = pytree.tree_map(bring, args), pytree.tree_map(bring, kwargs)
    options.pop("pin_memory", None)
    if asked is not None:
        options["device"] = "cpu"
    result = op(*plain, **options)
    if op._schema.is_mutable:
        return args[0] if "out" not in kwargs else kwargs["out"]
    return pytree.tree_map(
        lambda x: FarTensor(x) if is_far and isinstance(x, Tensor) else x, result
    )


def register() -> None:
    backend_registration._setup_privateuseone_for_python_backend(NAME)

    @torch.library.impl("aten::empty.memory_format", "privateuseone")
    def empty(size: Any, dtype: Any = None, *_: Any, **__: Any) -> Tensor:
        return FarTensor(torch.empty(size, dtype=dtype, device="cpu"))

    @torch.library.impl("aten::empty_strided", "privateuseone")
    def empty_strided(size: Any, stride: Any, dtype: Any = None, *_: Any, **__: Any) -> Tensor:
        return FarTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))

    @torch.library.impl("aten::_copy_from", "privateuseone")
    def copy_from(source: Tensor, target: Tensor, *_: Any) -> Tensor:
        held = source.held if isinstance(source, FarTensor) else source
        (target.held if isinstance(target, FarTensor) else target).copy_(held)
        return target
