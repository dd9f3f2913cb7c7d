"""`transformers.generate` as a child of the benchmark."""

from typing import Any

import torch
from child import serve
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def build(setup: dict[str, Any]) -> dict[str, Any]:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(setup["threads"])
    model = AutoModelForCausalLM.from_pretrained(setup["directory"], dtype=torch.bfloat16).eval()

    def generate(prompts: list[list[int]], new: int) -> int:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new,
                max_new_tokens=new,
                pad_token_id=0,
            )
        return (out.shape[1] - ids.shape[1]) * out.shape[0]

    return {"generate": generate, "forget": lambda: None}


if __name__ == "__main__":
    serve(build)
