"""Chat messages to tokens and back, token-in token-out.

A conversation is built by appending: `prompt`, sampled tokens, `extend`, sampled tokens, ... No
token is ever made from text a second time, so what the trainer sees is what the engine sampled.
"""

from collections.abc import Sequence
from typing import Any

from burnish.core.errors import UserError
from burnish.core.records import Message, ToolSpec
from burnish.model import tool_calls
from burnish.model.template import ChatTemplate, unused_marks
from burnish.model.tokenizer import Tokenizer

_USER = {"role": "user", "content": "?"}
# Tokens that end a document or a turn in the supported families, whatever the metadata say.
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>")


class ChatRenderer:
    """Renders through the model's own chat template."""

    def __init__(self, tokenizer: Tokenizer, template: str | None, *, source: str) -> None:
        """Compile the template and find out how it ends a turn and what it can do with tools.

        Raises:
            UserError: if there is no template, or it does not suit.
        """
        if not template:
            raise UserError(
                f"{source}: the model has no chat template.",
                fix="use an instruct model, or put a chat_template.jinja into its directory.",
            )
        self.tokenizer = tokenizer
        self.template = ChatTemplate(template, tokenizer, source=source)
        self._native_tools = "tools" in self.template.variables and "<tool_call>" in template
        self._tool_role = self._accepts_tool_role()
        self.end_of_turn_id = self._find_end_of_turn()
        ends = [tokenizer.token_id("eos_token"), tokenizer.token_id("eot_token")]
        ends += [tokenizer.special_ids.get(content) for content in _END_TOKENS]
        self.stop_token_ids: tuple[int, ...] = tuple(
            dict.fromkeys([self.end_of_turn_id, *(i for i in ends if i is not None)])
        )

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> tuple[int, ...]:
        """Tokens of a chat, up to and with the opening of the next assistant turn.

        Assistant turns among `messages` are laid out as if they had been sampled: the result is
        `prompt(before) + assistant(turn) + extend(after)`.
        """
        first = next((i for i, m in enumerate(messages) if m.role == "assistant"), len(messages))
        if first == 0:
            raise UserError(
                "A chat must not begin with an assistant message.",
                fix="put a user message first.",
            )
        ids = self._opening(messages[:first], tools)
        rest = messages[first:]
        while rest:
            end = next((i for i, m in enumerate(rest[1:], 1) if m.role == "assistant"), len(rest))
            ids += (*self.assistant(rest[0]), *self.extend(rest[1:end], stopped=True))
            rest = rest[end:]
        return ids

    def assistant(self, message: Message) -> tuple[int, ...]:
        """Tokens of an answer as the policy would sample it, with the end-of-turn token."""
        turn = self._to_template(message)
        (mark,) = unused_marks(turn, 1)
        safe = self.template.protect(turn, mark)
        opening = self.template.render([_USER], generate=True)
        whole = self.template.render([_USER, safe], generate=False)
        if not whole.startswith(opening):
            raise self._unsuited("opens an assistant turn differently when asked to generate")
        pieces = list(self.template.encode(whole[len(opening) :], mark))
        ends = [i for i, (_, ids) in enumerate(pieces) if ids == [self.end_of_turn_id]]
        if not ends:
            raise self._unsuited("does not end every assistant turn with the same token")
        return tuple(i for _, ids in pieces[: ends[-1] + 1] for i in ids)

    def extend(self, replies: Sequence[Message], stopped: bool) -> tuple[int, ...]:
        """Tokens to append after the sampled tokens of a turn, up to the next assistant turn.

        Args:
            replies: what came back: tool results, or the user's next message.
            stopped: whether the sampled tokens end with a stop token; if not, the end-of-turn
                token comes first.
        """
        turns = [self._to_template(message) for message in replies]
        tokens = self._after_assistant(turns, generate=True)
        return tokens[1:] if stopped else tokens

    def parse(self, token_ids: Sequence[int]) -> Message:
        """The message that sampled tokens spell, without the stop token. Never raises."""
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        parsed = tool_calls.parse(self.tokenizer.decode(ids))
        return Message(
            role="assistant",
            content=parsed.content,
            tool_calls=parsed.calls,
            malformed_tool_call=parsed.malformed,
        )

    def _opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[int, ...]:
        turns = [self._to_template(message) for message in messages]
        offered: list[dict[str, Any]] = []
        if tools and self._native_tools:
            offered = [_openai(tool) for tool in tools]
        elif tools:
            text = tool_calls.describe(tools)
            if turns and turns[0]["role"] == "system":
                text = f"{turns.pop(0)['content']}\n\n{text}"
            turns.insert(0, {"role": "system", "content": text})
        (mark,) = unused_marks([turns, offered], 1)
        rendered = self.template.render(
            self.template.protect(turns, mark),
            tools=self.template.protect(offered, mark),
            generate=True,
        )
        return tuple(i for _, ids in self.template.encode(rendered, mark) for i in ids)

    def _after_assistant(
        self, turns: Sequence[dict[str, Any]], *, generate: bool
    ) -> tuple[int, ...]:
        """Tokens that follow the content of an assistant turn, from its end-of-turn token on."""
        mark, stand_in = unused_marks(turns, 2)
        answer = {"role": "assistant", "content": stand_in}
        chat = [_USER, answer, *self.template.protect(turns, mark)]
        rendered = self.template.render(chat, generate=generate)
        _, _, after = rendered.rpartition(stand_in)
        return tuple(i for _, ids in self.template.encode(after, mark) for i in ids)

    def _find_end_of_turn(self) -> int:
        after = self._after_assistant([], generate=False)
        if not after or after[0] not in self.tokenizer.special_ids.values():
            raise self._unsuited("does not end an assistant turn with a special token")
        return after[0]

    def _accepts_tool_role(self) -> bool:
        chat = [_USER, {"role": "assistant", "content": "!"}, {"role": "tool", "content": "@"}]
        try:
            return "@" in self.template.render(chat, generate=True)
        except UserError:
            return False

    def _unsuited(self, why: str) -> UserError:
        return UserError(
            f"{self.template.source}: the chat template {why}.", fix="use another instruct model."
        )

    def _to_template(self, message: Message) -> dict[str, Any]:
        """Calls are written into the content, so that all templates treat them alike."""
        if message.role == "tool" and not self._tool_role:
            return {
                "role": "user",
                "content": f"<tool_response>\n{message.content}\n</tool_response>",
            }
        content = message.content
        if message.tool_calls:
            calls = tool_calls.write(message.tool_calls, spread=self._native_tools)
            content = f"{content}\n{calls}" if content else calls
        return {"role": message.role, "content": content}


def _openai(tool: ToolSpec) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
        },
    }
