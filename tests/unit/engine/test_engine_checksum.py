"""The fingerprint of weights: equal for equal values, different for any that moved."""

import pytest
import torch

from burnish.rollout.engine.checksum import digest

SHAPES = {"big": (300, 128), "small": (5,), "odd": (33, 7)}


def state(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_values_have_equal_digests_however_they_are_stored(dtype: torch.dtype) -> None:
    backwards = dict(reversed(list(state().items())))
    strided = backwards | {"big": backwards["big"].T.contiguous().T}
    assert digest(state(), dtype) == digest(strided, dtype)
    assert digest(state().copy(), torch.bfloat16) == digest(state(torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_moved_a_changed_or_a_renamed_value_shows(name: str, dtype: torch.dtype) -> None:
    original = digest(state(), dtype)
    flat = state()[name].flatten()
    for first, second in ((0, 1), (0, len(flat) - 1), (len(flat) // 3, len(flat) // 2)):
        moved = flat.clone()
        moved[[first, second]] = moved[[second, first]]
        assert digest(state() | {name: moved.view(SHAPES[name])}, dtype) != original
    changed = flat.clone()
    changed[-1] += 0.5
    assert digest(state() | {name: changed.view(SHAPES[name])}, dtype) != original
    renamed = state()
    renamed["other"] = renamed.pop(name)
    assert digest(renamed, dtype) != original
