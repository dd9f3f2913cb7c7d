"""The engine on a second device: the same tokens, and no tensor on the wrong side."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.core.errors import UserError
from burnish.core.vocabulary import KvPolicyKind
from burnish.rollout.engine.limits import CoreLimits
from burnish.rollout.engine.long.policy import KvPolicy
from burnish.rollout.engine.placement import find_device
from burnish.rollout.engine.tier.limits import TierLimits
from burnish.run.config import RunConfig
from burnish.run.engines import check_engine

SUPPORT = Path(__file__).parents[2] / "support"
# fp32, where the CPU's side multiplies packed matrices.
TOLERANCE = 1e-4
CASES = (
    *("sampling", "windowed", "coded", "preempted", "guessed", "adapted", "updated"),
    "flashinfer",
)


def differences_on(device: str) -> dict[str, Any]:
    """From a process of its own: the device stays registered."""
    done = subprocess.run(
        [sys.executable, SUPPORT / "far_engine.py", Path(__file__).parent, device],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SUPPORT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"stderr": done.stderr[-4000:]}


@pytest.fixture(scope="module")
def differences() -> dict[str, Any]:
    return differences_on("far")


@pytest.mark.slow
def test_every_case_was_tried(differences: dict[str, Any]) -> None:
    assert {*differences} == {*CASES, "stderr"}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_second_device_gives_the_tokens_of_the_first(
    case: str, differences: dict[str, Any]
) -> None:
    assert isinstance(differences[case], float), differences[case] or differences["stderr"]
    assert differences[case] <= TOLERANCE


@pytest.mark.gpu
def test_a_gpu_gives_the_tokens_of_the_cpu() -> None:
    """Where FlashInfer is installed the last case is its kernels' stand-in all the same."""
    found = differences_on("cuda")
    assert all(isinstance(found[case], float) and found[case] <= 1e-3 for case in CASES), found


@pytest.mark.parametrize("name", ["cuda:99", "nonsense", "meta", "cpu:x"])
def test_a_device_that_is_not_there_is_a_users_mistake(name: str) -> None:
    with pytest.raises(UserError, match=r"engine\.device") as caught:
        find_device(name)
    assert "cpu" in caught.value.fix


@pytest.mark.parametrize(
    "limits",
    [
        CoreLimits(device="cuda", exact=True),
        CoreLimits(device="cuda:1", kv=KvPolicy(kind=KvPolicyKind.QUEST)),
        CoreLimits(device="cuda", tier=TierLimits(1 << 20, 1 << 20)),
    ],
)
def test_what_only_the_cpu_can_do_is_refused_elsewhere(limits: CoreLimits) -> None:
    with pytest.raises(UserError, match="not on cuda"):
        limits.check()


def test_equal_bits_are_not_asked_of_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a machine that has one.
    monkeypatch.setattr("burnish.rollout.engine.placement.find_device", torch.device)
    config = RunConfig.model_validate({"engine": {"device": "cuda"}})
    with pytest.raises(UserError, match="canary_tolerance"):
        check_engine(config)
    check_engine(RunConfig.model_validate({"engine": {"device": "cuda", "canary_tolerance": 0.05}}))


def test_servers_choose_their_own_device() -> None:
    engine = {"backend": "vllm", "device": "cuda", "remote": {"urls": ["http://127.0.0.1:1"]}}
    with pytest.raises(UserError, match=r"engine\.device is for the engine of this process"):
        check_engine(RunConfig.model_validate({"engine": engine}))
