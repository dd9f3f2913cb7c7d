"""Records of the engine: what was written before a field existed still decodes."""

from typing import Any

import msgspec
import pytest

from burnish.core.engines import EngineCapabilities
from burnish.core.errors import UserError
from burnish.core.records import (
    GenerateRequest,
    Generation,
    Grammar,
    Record,
    SamplingParams,
)
from burnish.core.vocabulary import EngineFeature, GrammarKind, StopReason

# As written by the first release of these records: no field of theirs may become required.
OLD: dict[type[Record], bytes] = {
    SamplingParams: b'{"temperature":0.5,"top_p":0.9,"max_tokens":7,"stop_token_ids":[2],"seed":3}',
    GenerateRequest: b'{"request_id":"a","prompt_ids":[1,2],"params":{"max_tokens":4}}',
    Generation: (
        b'{"request_id":"a","token_ids":[5],"logprobs":[-0.5],"weight_versions":[2],'
        b'"stop_reason":"length","cached_tokens":1}'
    ),
}


@pytest.mark.parametrize("kind", OLD)
def test_old_records_decode_with_the_new_fields_off(kind: type[Record]) -> None:
    decoded = msgspec.json.decode(OLD[kind], type=kind)
    again = msgspec.json.decode(msgspec.json.encode(decoded), type=kind)
    assert again == decoded
    old = msgspec.json.decode(OLD[kind])
    for name, value in msgspec.to_builtins(decoded).items():
        if name not in old:
            assert value in (0, 0.0, None, False, [], ()), name


def test_new_fields_survive_the_round_trip() -> None:
    params = SamplingParams(
        top_k=5, min_p=0.1, min_tokens=2, stop=("\n\n",), num_top_logprobs=3,
        grammar=Grammar(kind=GrammarKind.REGEX, text="a+"),
    )  # fmt: skip
    request = GenerateRequest(
        request_id="a", prompt_ids=(1,), params=params, priority=2, session_id="s",
        adapter="x", prompt_logprobs=True,
    )  # fmt: skip
    answer = Generation(
        request_id="a", token_ids=(1,), logprobs=(-1.0,), weight_versions=(0,),
        stop_reason=StopReason.STOP, top_logprobs=(((1, -1.0), (2, -2.0)),),
        prompt_logprobs=(0.0,), unmasked_logprobs=(-3.0,), queued_s=0.1, first_token_s=0.2,
    )  # fmt: skip
    record: Any
    for record in (request, answer):
        assert msgspec.json.decode(msgspec.json.encode(record), type=type(record)) == record


def test_a_missing_feature_is_refused_by_name() -> None:
    able = EngineCapabilities(
        name="small", features=frozenset({EngineFeature.SCORE}), max_context_tokens=8
    )
    able.require(EngineFeature.SCORE)
    with pytest.raises(UserError, match=r"small cannot do sleep, stream"):
        able.require(EngineFeature.STREAM, EngineFeature.SLEEP, EngineFeature.SCORE)
