"""What a request needs of a server, looked at before anything is sent."""

from burnish.core.engines import EngineCapabilities
from burnish.core.errors import UserError
from burnish.core.records import GenerateRequest, SamplingParams
from burnish.core.vocabulary import EngineFeature
from burnish.rollout.remote.dialect import LogprobScope

_TRUNCATED = "top_p, top_k or min_p"


def needed_features(request: GenerateRequest) -> frozenset[EngineFeature]:
    """Everything beyond plain sampling that a request asks for."""
    params = request.params
    wanted = {
        EngineFeature.TOP_K: params.top_k != 0,
        EngineFeature.MIN_P: params.min_p != 0.0,
        EngineFeature.MIN_TOKENS: params.min_tokens != 0,
        EngineFeature.STOP_STRINGS: bool(params.stop),
        EngineFeature.TOP_LOGPROBS: params.num_top_logprobs != 0,
        EngineFeature.PROMPT_LOGPROBS: request.prompt_logprobs,
        EngineFeature.GRAMMAR: params.grammar is not None,
        EngineFeature.ADAPTERS: request.adapter is not None,
        EngineFeature.PRIORITIES: request.priority != 0,
    }
    return frozenset(feature for feature, asked in wanted.items() if asked)


def refuse_unfit(
    request: GenerateRequest,
    capabilities: EngineCapabilities,
    scope: LogprobScope,
    vocab_size: int,
) -> None:
    """Refuse what the servers cannot do, or what could never run.

    Raises:
        UserError: naming the value and its bound.
    """
    where = f"request {request.request_id}:"
    refuse_ids(request.prompt_ids, vocab_size, where)
    length, context = len(request.prompt_ids), capabilities.max_context_tokens
    only_scores = request.params.max_tokens == 0 and request.prompt_logprobs
    if length >= context + only_scores:
        raise UserError(
            f"{where} the prompt has {length} tokens, the servers' context is {context}.",
            fix="shorten the prompt or drop old turns.",
        )
    if request.params.max_tokens < 1 and not only_scores:
        raise UserError(
            f"{where} max_tokens is {request.params.max_tokens}.",
            fix="ask for >= 1, or for 0 together with prompt_logprobs.",
        )
    _refuse_params(request.params, capabilities, where)
    capabilities.require(*needed_features(request))
    if request.params.grammar is not None:
        capabilities.require_grammar(request.params.grammar.kind)
    _refuse_scope(request.params, scope, where)


def refuse_ids(token_ids: tuple[int, ...], vocab_size: int, where: str) -> None:
    """Refuse tokens that the model does not have.

    Raises:
        UserError: there are none, or one is out of range.
    """
    if not token_ids:
        raise UserError(f"{where} the prompt is empty.", fix="give at least one token.")
    if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise UserError(
            f"{where} a prompt token is outside 0..{vocab_size - 1}.",
            fix="encode the prompt with the model's own tokenizer.",
        )


def _refuse_params(params: SamplingParams, capabilities: EngineCapabilities, where: str) -> None:
    most = capabilities.max_top_logprobs
    bounds = (
        ("temperature", params.temperature, 0.0 <= params.temperature < 1e6, "use 0 to 1e6."),
        ("top_p", params.top_p, 0.0 < params.top_p <= 1.0, "use 0 < top_p <= 1."),
        ("top_k", params.top_k, params.top_k >= 0, "use >= 1, or 0 for all."),
        ("min_p", params.min_p, 0.0 <= params.min_p < 1.0, "use 0 <= min_p < 1."),
        (
            "min_tokens",
            params.min_tokens,
            0 <= params.min_tokens <= params.max_tokens,
            "use 0 <= min_tokens <= max_tokens.",
        ),
        (
            "num_top_logprobs",
            params.num_top_logprobs,
            0 <= params.num_top_logprobs <= max(most, 0) or not most,
            f"use 0..{most}.",
        ),
        ("stop", params.stop, all(params.stop), "leave empty strings out."),
    )
    for name, value, is_fit, fix in bounds:
        if not is_fit:
            raise UserError(f"{where} {name} is {value}.", fix=fix)


def _refuse_scope(params: SamplingParams, scope: LogprobScope, where: str) -> None:
    """Log-probs of another distribution than the sampled one would poison every ratio."""
    if scope is LogprobScope.SAMPLED or params.temperature == 0.0:
        return
    truncated = params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0
    if not truncated and (scope is LogprobScope.TEMPERED or params.temperature == 1.0):
        return
    what = _TRUNCATED if truncated else f"temperature {params.temperature:g}"
    raise UserError(
        f"{where} the servers report log-probs before {what} ({scope}), not of what was sampled.",
        fix="sample at temperature 1 without truncation, or start the servers so that they report "
        "processed log-probs (docs/engine.md).",
    )
