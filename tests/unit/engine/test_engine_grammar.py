"""Tokens that a grammar allows: always a document of the grammar, never a dead end."""

import json
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.core.errors import UserError
from burnish.core.records import Grammar
from burnish.core.vocabulary import GrammarKind
from burnish.model.gguf_file import GgufFile
from burnish.model.gguf_tokenizer import read_tokenizer
from burnish.model.loading import resolve
from burnish.model.tokenizer import Tokenizer
from burnish.rollout.engine.grammar import GrammarCompiler, GrammarState

STOP = 2  # <|im_end|>
VOCAB = 49_152
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "ages": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return read_tokenizer(GgufFile(resolve("smollm2-135m-instruct")))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.to_json(), VOCAB)


def schema(value: Any) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(value))


def walk(state: GrammarState, seed: int, most: int = 200) -> list[int]:
    """A random text: any allowed token, each as likely as another, until a stop."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    while len(tokens) < most:
        allowed = state.allowed().nonzero()[:, 0]
        assert len(allowed)
        token = int(allowed[int(torch.randint(len(allowed), (1,), generator=generator))])
        # A stop is one of thousands where strings may go on: take it when it is there.
        if bool(state.allowed()[STOP]):
            token = STOP
        tokens.append(token)
        state.advance(token)
        if token == STOP:
            return tokens
    return tokens


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_walk_to_the_stop_is_a_document_of_the_schema(
    seed: int, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    tokens = walk(compiler.compile(schema(SCHEMA), (STOP,)), seed)
    if tokens[-1] != STOP:
        return
    document = json.loads(tokenizer.decode(tokens[:-1]))
    assert set(document) == {"name", "ages"}
    assert len(document["name"]) <= 8
    assert all(type(age) is int for age in document["ages"])


def test_a_stop_is_allowed_only_where_the_text_may_end(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = compiler.compile(Grammar(kind=GrammarKind.REGEX, text="yes|no!*"), (STOP, 0))
    assert not state.allowed()[[STOP, 0]].any()
    for token in tokenizer.encode("no"):
        state.advance(token)
    assert state.allowed()[[STOP, 0]].all()
    assert state.allowed()[tokenizer.encode("!")[0]]
    assert not state.is_complete


def test_nothing_but_a_stop_follows_a_complete_text(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = compiler.compile(Grammar(kind=GrammarKind.REGEX, text="yes"), (STOP,))
    for token in tokenizer.encode("yes"):
        state.advance(token)
    assert state.is_complete
    assert state.allowed().nonzero().flatten().tolist() == [STOP]


def test_no_special_token_is_part_of_a_text(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = compiler.compile(Grammar(kind=GrammarKind.REGEX, text="(?s:.*)"), (STOP,))
    allowed = set(state.allowed().nonzero().flatten().tolist())
    assert allowed & set(tokenizer.special_ids.values()) == {STOP}


def test_two_requests_of_one_grammar_do_not_share_a_state(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = Grammar(kind=GrammarKind.LARK, text='start: "a" "b"')
    first, second = (compiler.compile(grammar, (STOP,)) for _ in range(2))
    before = second.allowed()
    first.advance(tokenizer.encode("a")[0])
    assert torch.equal(second.allowed(), before)
    assert not torch.equal(first.allowed(), before)


def test_retreat_gives_the_earlier_masks_again(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = compiler.compile(schema(SCHEMA), (STOP,))
    tokens = tokenizer.encode('{"name": "x", "ages": [1, 2]}')
    masks = []
    for token in tokens:
        masks.append(state.allowed())
        state.advance(token)
    for mask in reversed(masks):
        state.retreat(1)
        assert torch.equal(state.allowed(), mask)


def test_a_token_outside_the_grammar_is_refused(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = compiler.compile(Grammar(kind=GrammarKind.REGEX, text="yes"), (STOP,))
    with pytest.raises(ValueError, match="not in the grammar"):
        state.advance(tokenizer.encode("no")[0])


def test_the_part_of_a_draft_that_fits_is_counted(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = compiler.compile(Grammar(kind=GrammarKind.REGEX, text="[0-9]{3}"), (STOP,))
    draft = tokenizer.encode("12 apples")
    assert tokenizer.decode(draft[: state.prefix_length(draft)]) == "12"


@pytest.mark.parametrize(
    ("grammar", "complaint"),
    [
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text="{"), "json_schema"),
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"type": "complex"}'), "json_schema"),
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"$ref": "http://a/b"}'), "json_schema"),
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text="[" * 100_000), "json_schema"),
        (Grammar(kind=GrammarKind.REGEX, text="("), "regex"),
        (Grammar(kind=GrammarKind.REGEX, text="(?=a)b"), "regex"),
        (Grammar(kind=GrammarKind.REGEX, text="[^\\s\\S]"), "regex"),
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"$ref": "#"}'), "json_schema"),
        (Grammar(kind=GrammarKind.LARK, text="start: missing"), "lark"),
        (Grammar(kind=GrammarKind.LARK, text=""), "lark"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_one_clear_line(
    grammar: Grammar, complaint: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(UserError, match=re.escape(f"the {complaint} grammar")) as caught:
        compiler.compile(grammar, (STOP,))
    assert "\n" not in str(caught.value)
    assert caught.value.fix


def test_a_vocabulary_larger_than_the_tokenizer_never_samples_the_rest(
    tokenizer: Tokenizer,
) -> None:
    compiler = GrammarCompiler(tokenizer.to_json(), VOCAB + 77)
    state = compiler.compile(Grammar(kind=GrammarKind.REGEX, text="(?s:.*)"), (STOP,))
    assert state.allowed().shape == (VOCAB + 77,)
    assert not state.allowed()[VOCAB:].any()
