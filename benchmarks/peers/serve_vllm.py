"""vLLM on the CPU as a child of the benchmark; runs in its own virtual environment."""

import os
from typing import Any

from child import serve


def build(setup: dict[str, Any]) -> dict[str, Any]:
    threads = setup["threads"]
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams

    llm = LLM(
        setup["directory"],
        dtype="bfloat16",
        # Compiling takes two minutes of start-up here and was worth less than the noise.
        enforce_eager=True,
        max_model_len=setup["max_tokens"],
        max_num_seqs=setup["max_batch"],
        max_num_batched_tokens=max(2048, setup["max_batch"]),
        enable_prefix_caching=True,
    )

    def generate(prompts: list[list[int]], new: int) -> int:
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = llm.generate(asked, params, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    return {"generate": generate, "forget": llm.reset_prefix_cache}


if __name__ == "__main__":
    serve(build)
