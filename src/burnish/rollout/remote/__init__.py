"""Engines behind HTTP: vLLM, SGLang and whatever speaks OpenAI's completions with token ids."""
