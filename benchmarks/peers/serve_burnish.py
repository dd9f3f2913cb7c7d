"""Our own engine as a child of the benchmark."""

import os
import time
from typing import Any

import textbook
import torch
from child import serve

from burnish.core.records import GenerateRequest, SamplingParams
from burnish.model.loading import load_model
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.limits import CoreLimits


class Engine:
    """Operations on one core."""

    def __init__(self, setup: dict[str, Any]) -> None:
        torch.set_num_threads(setup["threads"])
        if setup.get("textbook"):
            textbook.install()
        loaded = load_model(setup["model"], dtype="bfloat16")
        self.state = loaded.decoder.state_dict()
        limits = CoreLimits(
            num_pages=setup["num_pages"], max_running=setup["max_batch"], budget_tokens=2048
        )
        self.core = EngineCore(loaded.config, self.state, limits=limits)
        self.limits, self.number = limits, 0

    def add(self, prompts: list[list[int]], new: int) -> None:
        for prompt in prompts:
            self.number += 1
            params = SamplingParams(max_tokens=new, temperature=0.0, seed=self.number)
            self.core.add(
                GenerateRequest(
                    request_id=str(self.number), prompt_ids=tuple(prompt), params=params
                )
            )

    def generate(self, prompts: list[list[int]], new: int) -> int:
        self.add(prompts, new)
        tokens = 0
        while self.core.has_work:
            tokens += sum(len(generation.token_ids) for _, generation in self.core.step())
        return tokens

    def forget(self) -> None:
        self.core.forget_prefixes()

    def pages(self, prompts: list[list[int]], new: int) -> int:
        """Most cache pages in use at once, times the bytes of one."""
        self.core.forget_prefixes()
        self.add(prompts, new)
        most = 0
        while self.core.has_work:
            self.core.step()
            most = max(most, self.limits.num_pages - self.core.free_pages)
        return most * self.page_bytes()

    def page_bytes(self) -> int:
        config = self.core.config
        token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
        return token_bytes * self.limits.page_size

    def swap(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """Change the weights in the middle of a batch."""
        self.core.forget_prefixes()
        self.add(prompts, new)
        while self.core.num_waiting:
            self.core.step()
        for _ in range(new // 2):
            self.core.step()
        old = self.core.weight_version
        # The worker packs new weights while the batch goes on; the batch waits for the rest only.
        prepared = self.core.prepare(self.state)
        start = time.perf_counter()
        self.core.update_weights(prepared, old + 1)
        pause_s = time.perf_counter() - start
        ended = []
        while self.core.has_work:
            ended += [generation for _, generation in self.core.step()]
        right = all(
            list(g.weight_versions) == sorted(g.weight_versions)
            and set(g.weight_versions) == {old, old + 1}
            for g in ended
        )
        return {"pause_s": pause_s, "versions_right": right and len(ended) == len(prompts)}


def build(setup: dict[str, Any]) -> dict[str, Any]:
    engine = Engine(setup)
    return {
        "generate": engine.generate,
        "forget": engine.forget,
        "pages": engine.pages,
        "swap": engine.swap,
        "kernels": lambda: os.environ.get("BURNISH_KERNELS", "chosen at run time"),
    }


if __name__ == "__main__":
    serve(build)
