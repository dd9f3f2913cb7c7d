"""Tokenisation: equal to transformers', and deaf to markup in user text."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from burnish.core.errors import UserError
from burnish.core.records import Message
from burnish.model.chat import ChatRenderer
from burnish.model.gguf_file import GgufFile
from burnish.model.gguf_tokenizer import _PRE_TOKENIZERS, read_tokenizer
from burnish.model.hf_directory import read_tokenizer as read_hf
from burnish.model.tokenizer import Tokenizer

STRINGS = [
    "", " ", "   ", "\n", "\n\n\n", "\t\r\n", "Hello, world!", "hello  world   ", " leading",
    "12345 6789.01 1,000", "x1y22z333", "def f(x):\n    return x**2  # ok\n\n\n",
    "I'm you're he'll WE'VE can't", "na\u00efve caf\u00e9 e\u0301",
    "\u4f60\u597d\uff0c\u4e16\u754c",
    "\u0417\u0434\u0440\u0430\u0432\u0441\u0442\u0432\u0443\u0439",
    "\U0001f600\U0001f468\u200d\U0001f469",
    "\u0661\u0662\u0663 \u2167 \u00bd", "\u00a0\u2003\u3000x", "a" * 3000, "=" * 500,
    "\u0000\u0001\ufffd\ufdd0", '{"a": [1, 2.5e-3, null]}', "<|im_en", "im_end|>", "http://a.b/c?d=e&f",
]  # fmt: skip
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<empty_output>"]


@pytest.fixture(scope="session")
def exported(smollm: ChatRenderer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tokenizer as transformers builds it from what `export` writes."""
    from burnish.model.config import from_hf
    from burnish.model.hf_directory import _small_files

    config = from_hf(
        {"model_type": "llama", "vocab_size": 49152, "hidden_size": 64, "intermediate_size": 8,
         "num_hidden_layers": 1, "num_attention_heads": 1}
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tokenizer")
    smollm.tokenizer.save(folder / "tokenizer.json")
    for name, text in _small_files(config, smollm.tokenizer, smollm, "bfloat16").items():
        (folder / name).write_text(text, encoding="utf-8")
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", STRINGS)
def test_smollm_equals_transformers(text: str, smollm: ChatRenderer, exported: Any) -> None:
    assert smollm.tokenizer.encode(text) == exported(text)["input_ids"]


@settings(max_examples=300, deadline=None)
@given(text=st.text())
def test_any_text_equals_transformers(text: str, smollm: ChatRenderer, exported: Any) -> None:
    # Markup in a text is only text to us; there is a test for that.
    assume(not any(markup in text for markup in exported.get_added_vocab()))
    assert smollm.tokenizer.encode(text) == exported(text)["input_ids"]


def test_chats_equal_transformers(smollm: ChatRenderer, exported: Any) -> None:
    turns = ("user", "Hi, 12?"), ("assistant", "Yes: 34.\n"), ("tool", "{}"), ("user", "\u4f60 ")
    for start in ((), (("system", "Be brief."),)):
        chat = [{"role": role, "content": content} for role, content in (*start, *turns)]
        theirs = exported.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert list(smollm.prompt([Message(**turn) for turn in chat])) == theirs


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=("C",), max_codepoint=0xFFFF)))
def test_printable_text_comes_back(text: str, smollm: ChatRenderer) -> None:
    """SmolLM2 has no token for some control characters and rare planes: those bytes are lost."""
    assert smollm.tokenizer.decode(smollm.tokenizer.encode(text)) == text


def test_smollm_splits_digits_one_by_one(smollm: ChatRenderer) -> None:
    assert [smollm.tokenizer.decode([i]) for i in smollm.tokenizer.encode("2024")] == list("2024")


def test_smollm_gives_the_published_ids(smollm: ChatRenderer) -> None:
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    ids = smollm.tokenizer.encode(text, allow_special=True)
    assert ids == [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198]


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.sampled_from([*SPECIAL, "<|im_", "end|>", " ", "\n", "a", "<"])))
def test_user_text_never_becomes_a_special_token(parts: list[str], smollm: ChatRenderer) -> None:
    text = "".join(parts)
    ids = smollm.tokenizer.encode(text)
    assert not set(ids) & set(smollm.tokenizer.special_ids.values())
    assert smollm.tokenizer.decode(ids) == text


def test_markup_becomes_special_tokens_when_allowed(smollm: ChatRenderer) -> None:
    for content in SPECIAL:
        assert smollm.tokenizer.encode(content, allow_special=True) == [
            smollm.tokenizer.special_ids[content]
        ]


def test_lone_surrogates_are_replaced(smollm: ChatRenderer) -> None:
    assert smollm.tokenizer.encode("a\ud800b") == smollm.tokenizer.encode("a?b")


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2", "smollm"])
def test_pre_tokenizers_split_as_their_family_does(pre: str) -> None:
    document = json.loads(Backend(models.BPE()).to_str())
    document["pre_tokenizer"] = _PRE_TOKENIZERS[pre]
    backend = Backend.from_str(json.dumps(document))
    pieces = [p for p, _ in backend.pre_tokenizer.pre_tokenize_str("I'm 12345 A.\n\n  b")]
    numbers = {
        "llama-bpe": ["\u0120", "123", "45"],
        "qwen2": ["\u0120", *"12345"],
        "gpt-2": ["\u012012345"],
        "smollm": ["\u0120", *"12345"],
    }[pre]
    tail = (
        ["\u0120A", ".\u010a\u010a", "\u0120", "\u0120b"]
        if pre in ("llama-bpe", "qwen2")
        else ["\u0120A", ".", "\u010a\u010a\u0120", "\u0120b"]
    )
    assert pieces == ["I", "'m", *numbers, *tail]


def test_qwen2_normalises_to_nfc(smollm_file: GgufFile) -> None:
    file = GgufFile(smollm_file.path)
    file.metadata |= {"tokenizer.ggml.pre": "qwen2"}
    tokenizer = read_tokenizer(file)
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tokenizer.ggml.model": "llama"}, "'llama' is not implemented"),
        ({"tokenizer.ggml.model": None}, "None is not implemented|'None' is not implemented"),
        ({"tokenizer.ggml.pre": "tekken"}, "'tekken'"),
        ({"tokenizer.ggml.tokens": None}, "missing"),
        ({"tokenizer.ggml.token_type": 7}, "differ in number"),
        ({"tokenizer.ggml.merges": ["zz qq"]}, "merge 'zz qq'"),
        ({"tokenizer.ggml.eos_token_id": 10**9}, "eos_token_id is 1000000000"),
    ],
)
def test_damaged_tokenizer_metadata_is_named(
    change: dict[str, Any], complaint: str, smollm_file: GgufFile
) -> None:
    file = GgufFile(smollm_file.path)
    file.metadata |= change
    with pytest.raises(UserError, match=complaint) as caught:
        read_tokenizer(file)
    assert str(file.path) in str(caught.value)


def test_twice_the_same_token_is_refused(smollm_file: GgufFile) -> None:
    file = GgufFile(smollm_file.path)
    file.metadata["tokenizer.ggml.tokens"][500] = file.metadata["tokenizer.ggml.tokens"][501]
    with pytest.raises(UserError, match="twice"):
        read_tokenizer(file)


def test_a_tokenizer_that_is_not_byte_level_is_refused(tiny_document: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="not byte-level"):
        Tokenizer(
            tiny_document | {"decoder": {"type": "BPEDecoder", "suffix": "_"}}, source="x", named={}
        )


def test_a_special_token_that_is_a_plain_word_is_refused(tiny_document: dict[str, Any]) -> None:
    token = tiny_document["added_tokens"][0] | {"content": "\u0120the"}
    ids = tiny_document["model"]["vocab"]
    plain = token | {"content": "the", "id": ids["\u0120the"]}
    document = tiny_document | {"added_tokens": [*tiny_document["added_tokens"], plain]}
    # "the" is a special token and, under another id, what merges may give: harmless.
    Tokenizer(document, source="x", named={})
    one = token | {"content": "t", "id": ids["t"]}
    with pytest.raises(UserError, match="cannot be told"):
        Tokenizer(tiny_document | {"added_tokens": [one]}, source="x", named={})


def test_limits_stored_in_the_file_do_not_cut_prompts(tiny_document: dict[str, Any]) -> None:
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    tokenizer = Tokenizer(tiny_document | {"truncation": cut}, source="x", named={})
    assert len(tokenizer.encode("xyz" * 50)) == 150


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": 1}', "[" * 100_000, '{"a": "\ud800"}'])
def test_a_damaged_tokenizer_json_is_one_clear_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        read_hf(tmp_path)
