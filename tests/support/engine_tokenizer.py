"""A tokenizer for the tiny models of the tests: a token for each printable character."""

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = 0
"""Of a text."""


def tiny_tokenizer(vocab_size: int) -> Tokenizer:
    """The end, white space, the printable characters, and fill that nothing encodes to."""
    plain = [chr(code) for code in range(33, 127)]
    names = ["<end>", "\u0120", "\u010a", "\u0109", *plain]
    fill = [f"Z{chr(65 + i // 26)}{chr(65 + i % 26)}" for i in range(vocab_size - len(names))]
    tokenizer = Tokenizer(models.BPE({n: i for i, n in enumerate([*names, *fill])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


@functools.cache
def tiny_tokenizer_json(vocab_size: int) -> str:
    """The contents of its `tokenizer.json`."""
    text: str = tiny_tokenizer(vocab_size).to_str()
    return text
