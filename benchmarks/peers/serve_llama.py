"""llama.cpp, through its C interface, as a child; runs in its own virtual environment.

Sequences are decoded together as `llama-batched-bench` does: one `llama_decode` per step.
"""

import ctypes
from typing import Any

import llama_cpp as ll
import numpy as np
from child import serve

_BATCH_TOKENS = 2048


class Llama:
    """One model and a context for as many sequences as asked."""

    def __init__(self, setup: dict[str, Any]) -> None:
        ll.llama_backend_init()
        self.threads = setup["threads"]
        params = ll.llama_model_default_params()
        self.model = ll.llama_load_model_from_file(setup["gguf"].encode(), params)
        if not self.model:
            raise ValueError(f"{setup['gguf']} cannot be loaded")
        self.vocab_size = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.context, self.shape = None, (0, 0)
        self.batch = ll.llama_batch_init(_BATCH_TOKENS, 0, 1)

    def generate(self, prompts: list[list[int]], new: int) -> int:
        """Greedy; the end token is an ordinary one."""
        self.prepare(len(prompts), len(prompts[0]) + new)
        tokens: list[int] = []
        for row, prompt in enumerate(prompts):
            tokens.append(self.read_prompt(row, prompt))
        for step in range(1, new):
            position = len(prompts[0]) + step - 1
            tokens = self.decode([(t, position, row, True) for row, t in enumerate(tokens)])
        return len(prompts) * new

    def prepare(self, rows: int, length: int) -> None:
        if self.shape != (rows, length):
            if self.context is not None:
                ll.llama_free(self.context)
            params = ll.llama_context_default_params()
            params.n_ctx, params.n_seq_max = rows * (length + 1), rows
            params.n_batch = params.n_ubatch = _BATCH_TOKENS
            params.n_threads = params.n_threads_batch = self.threads
            params.kv_unified = True
            self.context = ll.llama_init_from_model(self.model, params)
            if not self.context:
                raise ValueError("no context")
            self.shape = (rows, length)
        ll.llama_memory_clear(ll.llama_get_memory(self.context), True)

    def read_prompt(self, row: int, prompt: list[int]) -> int:
        last: list[int] = []
        for start in range(0, len(prompt), _BATCH_TOKENS):
            part = prompt[start : start + _BATCH_TOKENS]
            ends = start + len(part) == len(prompt)
            last = self.decode(
                [(t, start + i, row, ends and i == len(part) - 1) for i, t in enumerate(part)]
            )
        return last[-1]

    def decode(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """The likeliest next token of every entry that asks for it."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, position, row, wants) in enumerate(entries):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
            batch.logits[i] = wants
        status = ll.llama_decode(self.context, batch)
        if status != 0:
            raise ValueError(f"llama_decode returned {status}")
        chosen = []
        for i, entry in enumerate(entries):
            if entry[3]:
                row = ll.llama_get_logits_ith(self.context, i)
                address = ctypes.cast(row, ctypes.POINTER(ctypes.c_float))
                logits = np.ctypeslib.as_array(address, (self.vocab_size,))
                chosen.append(int(logits.argmax()))
        return chosen


def build(setup: dict[str, Any]) -> dict[str, Any]:
    llama = Llama(setup)
    return {"generate": llama.generate, "forget": lambda: None}


if __name__ == "__main__":
    serve(build)
