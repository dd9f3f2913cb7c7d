"""Sampling held to a grammar: which tokens may come next, by the llguidance library.

A grammar never sees stop tokens: where the text may end, the request's own stop tokens are allowed
beside the grammar's; where it can only end, they alone are.

Shapes: V rows of the model's vocabulary.
"""

import json
from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from burnish.core.errors import UserError, one_line
from burnish.core.records import Grammar
from burnish.core.vocabulary import GrammarKind

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_CACHED_GRAMMARS = 256


class GrammarCompiler:
    """Grammars over one tokenizer. Compiling is safe from any thread."""

    def __init__(self, tokenizer_json: str, vocab_size: int) -> None:
        """Index the vocabulary (0.2 s for 49,152 tokens).

        Args:
            tokenizer_json: the contents of `tokenizer.json`.
            vocab_size: V; may be more than the tokenizer has.

        Raises:
            UserError: if the library is missing or cannot read the tokenizer.
        """
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise UserError(
                "constrained sampling needs llguidance.", fix='pip install "burnish[train]".'
            ) from error
        try:
            self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size)
        except ValueError as error:
            raise UserError(
                f"grammars cannot be compiled for this tokenizer ({one_line(error)}).",
                fix="use a model with a byte-level BPE tokenizer.",
            ) from error
        self.vocab_size = vocab_size
        self._compiled: OrderedDict[Grammar, _Compiled] = OrderedDict()

    def compile(self, grammar: Grammar, stop_token_ids: Collection[int]) -> "GrammarState":
        """The state before the first token.

        Raises:
            UserError: if the grammar is malformed, matches nothing or is beyond the limits, or
                matches only the empty text and there is no stop token to end it.
        """
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._parse(grammar)
            self._compiled[grammar] = compiled
            while len(self._compiled) > _CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        if compiled.is_empty and not stop_token_ids:
            raise _refused(grammar, "only the empty text matches it, and no stop token ends that")
        return self._start(compiled.matcher, stop_token_ids)

    def _start(self, matcher: "LLMatcher", stop_token_ids: Collection[int]) -> "GrammarState":
        ends = list(self._tokenizer.eos_tokens)
        return GrammarState(matcher.deep_copy(), stop_token_ids, ends, self.vocab_size)

    def _parse(self, grammar: Grammar) -> "_Compiled":
        from llguidance import LLMatcher

        try:
            if grammar.kind == GrammarKind.JSON_SCHEMA:
                # Parsed by us first: the library takes any text as a schema.
                text = LLMatcher.grammar_from_json_schema(json.loads(grammar.text))
            elif grammar.kind == GrammarKind.REGEX:
                text = LLMatcher.grammar_from_regex(grammar.text)
            else:
                text = LLMatcher.grammar_from_lark(grammar.text)
            matcher = LLMatcher(self._tokenizer, text, log_level=0)
        except (ValueError, RecursionError, TypeError) as error:
            raise _refused(grammar, one_line(error)) from error
        if matcher.is_error():
            raise _refused(grammar, _joined(matcher.get_error()))
        try:
            return _Compiled(matcher, is_empty=not self._start(matcher, ()).may_go_on)
        except GrammarLimitError as error:
            raise _refused(grammar, f"no text matches it ({error})") from error


class _Compiled(NamedTuple):
    matcher: "LLMatcher"
    """Before the first token; only copies of it move."""
    is_empty: bool
    """Whether nothing but the empty text matches."""


class GrammarState:
    """Where one request is in its grammar. Owned by the engine's thread."""

    def __init__(
        self,
        matcher: "LLMatcher",
        stop_token_ids: Collection[int],
        end_ids: list[int],
        vocab_size: int,
    ) -> None:
        """Begin at the state of `matcher`, which is not shared; `end_ids` are its own stops."""
        self._matcher, self._stops, self._end_ids = matcher, stop_token_ids, end_ids
        self._words = torch.zeros(-(-vocab_size // 32), dtype=torch.int32)
        self._vocab_size = vocab_size

    @property
    def may_go_on(self) -> bool:
        """Whether any token can follow, stop tokens aside.

        Raises:
            GrammarLimitError: if the library gives up on this text.
        """
        return bool(self._bits().any())

    @property
    def is_complete(self) -> bool:
        """Whether the text can only end here; without stop tokens it ends by itself."""
        return self._matcher.is_stopped()

    def allowed_bits(self) -> NDArray[np.uint8]:
        """Bits [V / 8], the first token lowest: which tokens may come next.

        None is set behind a complete text without stop tokens, or where the model lacks the token.

        Raises:
            GrammarLimitError: if the library gives up on this text.
        """
        return self._with_ends(self._bits())

    @property
    def mask_bytes(self) -> int:
        """Of `allowed_bits`."""
        return 4 * len(self._words)

    def _with_ends(self, bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Allow the request's own stops where the text may end, and there only."""
        may_end = self._matcher.is_stopped() or self._matcher.is_accepting()
        for token in self._stops:
            bits[token >> 3] &= ~(1 << (token & 7)) & 0xFF
            bits[token >> 3] |= may_end << (token & 7)
        return bits

    def allowed(self) -> Tensor:
        """The same as booleans [V].

        Raises:
            GrammarLimitError: if the library gives up on this text.
        """
        bits = np.unpackbits(self.allowed_bits(), bitorder="little")
        return torch.from_numpy(bits[: self._vocab_size].view(np.bool_))

    def advance(self, token: int) -> None:
        """Take a sampled token. A stop token changes nothing: the text has ended.

        Raises:
            GrammarLimitError: if the library gives up on this text.
            ValueError: if the token was not allowed.
        """
        if token in self._stops:
            return
        if self._matcher.is_stopped() or self._matcher.validate_tokens([token]) != 1:
            self._raise_if_broken()
            raise ValueError(f"token {token} is not in the grammar")
        self._matcher.consume_token(token)

    def retreat(self, num_tokens: int) -> None:
        """Take back the last tokens given to `advance`, stop tokens not counted."""
        if num_tokens and not self._matcher.rollback(num_tokens):
            self._raise_if_broken()

    def prefix_length(self, tokens: list[int]) -> int:
        """How many of `tokens` the grammar would take from here."""
        # The library takes its own end tokens where a text may end: nobody samples them.
        tokens = list(takewhile(lambda token: token not in self._end_ids, tokens))
        return self._matcher.validate_tokens(tokens) if not self._matcher.is_stopped() else 0

    def _bits(self) -> NDArray[np.uint8]:
        """What the grammar allows, its own end tokens aside."""
        if not self._matcher.is_stopped():
            self._matcher.unsafe_compute_mask_ptr(self._words.data_ptr(), self.mask_bytes)
            return self._without_own_ends(self._words.numpy().view(np.uint8).copy())
        return self._without_own_ends(np.zeros(self.mask_bytes, dtype=np.uint8))

    def _without_own_ends(self, bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """In place, once the library has computed them."""
        self._raise_if_broken()
        for token in self._end_ids:
            bits[token >> 3] &= ~(1 << (token & 7)) & 0xFF
        return bits

    def _raise_if_broken(self) -> None:
        if self._matcher.is_error():
            raise GrammarLimitError(_joined(self._matcher.get_error()))


def allowed_together(
    states: Sequence[GrammarState], executor: "LLExecutor"
) -> list["NDArray[np.uint8] | GrammarLimitError"]:
    """`allowed_bits` of many texts of one vocabulary, by the threads of `executor`."""
    if not states:
        return []
    size = states[0].mask_bytes
    rows = np.zeros((len(states), size), dtype=np.uint8)
    open_texts = [
        (state._matcher, row) for row, state in enumerate(states) if not state.is_complete
    ]
    if open_texts:
        executor.unsafe_compute_mask_ptr(open_texts, rows.ctypes.data, size, len(states))
    found: list[NDArray[np.uint8] | GrammarLimitError] = []
    for state, bits in zip(states, rows, strict=True):
        try:
            found.append(state._with_ends(state._without_own_ends(bits)))
        except GrammarLimitError as error:
            found.append(error)
    return found


class GrammarLimitError(Exception):
    """The grammar is too ambiguous or too large for this text: the request fails, alone."""


def _joined(text: str) -> str:
    # The library's own state follows the reason.
    return " ".join(text.partition("<state>")[0].split())[:300]


def _refused(grammar: Grammar, why: str) -> UserError:
    return UserError(
        f"the {grammar.kind} grammar cannot be used: {why}.",
        fix="correct the grammar, or leave it out of the request.",
    )
