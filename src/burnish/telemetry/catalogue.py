"""Every metric of the run loop, declared in one place.

Groups are `all` (what was dispatched) and `effective` (what was trained), mean and tail, so that a
good-looking mean cannot hide what was thrown away.
"""

from burnish.telemetry.metrics import Metric, Reduction, Registry

CATALOGUE = Registry()
"""What a run may record. Extensions call `CATALOGUE.declare` where they build their recorder."""


def _metric(name: str, unit: str, reduction: Reduction, meaning: str, label: str = "") -> Metric:
    return CATALOGUE.declare(
        Metric(name=name, unit=unit, reduction=reduction, meaning=meaning, label=label)
    )


_LAST, _MEAN, _SUM, _MAX = Reduction.LAST, Reduction.MEAN, Reduction.SUM, Reduction.MAX

# What is learned
REWARD_MEAN = _metric("reward_mean", "1", _MEAN, "Mean score of scored rollouts.", "domain")
PASS_RATE = _metric("pass_rate", "ratio", _MEAN, "Share of scored rollouts that pass.", "domain")
SCORED_ROLLOUTS = _metric(
    "scored_rollouts", "rollouts", _SUM, "Denominator of reward_mean and pass_rate.", "domain"
)
INVALID_ROLLOUTS = _metric(
    "invalid_rollouts", "rollouts", _SUM, "Rollouts without a score: no denominator.", "domain"
)
TRAINED_ROLLOUTS = _metric(
    "trained_rollouts", "rollouts", _SUM, "Rollouts that entered the loss.", "domain"
)
TRAINED_TOKENS = _metric(
    "trained_tokens", "tokens", _SUM, "Sampled tokens that entered the loss.", "domain"
)
DOMAIN_SHARE = _metric(
    "domain_share", "ratio", _LAST, "Share of new groups that the schedule gives.", "domain"
)
DOMAIN_MAX_GAP = _metric(
    "domain_max_gap",
    "groups",
    _LAST,
    "Most groups of others that a domain can ever wait for its next one.",
    "domain",
)

# Optimisation
LOSS = _metric("loss", "1", _MEAN, "Total loss of the step.")
POLICY_LOSS = _metric("policy_loss", "1", _MEAN, "Policy-gradient part of the loss.")
KL_LOSS = _metric("kl_loss", "nats", _MEAN, "Penalty to the reference model, before weighting.")
GRAD_NORM = _metric("grad_norm", "1", _MEAN, "Global gradient norm before clipping.")
LEARNING_RATE = _metric("learning_rate", "1", _LAST, "Step size of the optimizer.")
ENTROPY = _metric("entropy", "nats", _MEAN, "Mean entropy of the policy at trained tokens.")
CLIP_FRACTION = _metric("clip_fraction", "ratio", _MEAN, "Trained tokens with a clipped ratio.")
KL_ENGINE_K1 = _metric(
    "kl_engine_k1", "nats", _MEAN, "Mean of log p_engine - log p_trainer at sampled tokens."
)
KL_ENGINE_K3 = _metric(
    "kl_engine_k3", "nats", _MEAN, "Mean of r - 1 - log r, r = p_trainer / p_engine; >= 0."
)
ZERO_VARIANCE_RATIO = _metric(
    "zero_variance_ratio", "ratio", _MEAN, "Groups with equal scores: no gradient.", "domain"
)

# Asynchrony
LAG_MEAN = _metric("lag_mean", "versions", _MEAN, "Trainer version - version of trained tokens.")
LAG_MAX = _metric("lag_max", "versions", _MAX, "Largest lag of a trained token.")
DROPPED = _metric("dropped_rollouts", "rollouts", _SUM, "Rollouts not trained, why.", "reason")
TRAINED_LENGTH_MEAN = _metric(
    "trained_length_mean_tokens", "tokens", _MEAN, "Mean sampled length of trained rollouts."
)
DISPATCHED_LENGTH_MEAN = _metric(
    "dispatched_length_mean_tokens", "tokens", _MEAN, "The same over all that were finished."
)
QUEUE_DEPTH = _metric("queue_depth", "items", _LAST, "Items waiting.", "queue")
EVENT_LOOP_LAG = _metric("event_loop_lag_s", "s", _MAX, "Longest delay of the event loop.")

# Speed
ENGINE_TOKENS_PER_S = _metric(
    "engine_tokens_per_s", "tokens/s", _MEAN, "Sampled tokens per second of wall clock."
)
TRAINER_TOKENS_PER_S = _metric(
    "trainer_tokens_per_s", "tokens/s", _MEAN, "Tokens through forward and backward per second."
)
ENGINE_BUSY_RATIO = _metric(
    "engine_busy_ratio", "ratio", _MEAN, "Share of wall clock in which the engine computed."
)
TRAINER_BUSY_RATIO = _metric(
    "trainer_busy_ratio", "ratio", _MEAN, "Share of wall clock in which the trainer computed."
)
CACHED_TOKEN_RATIO = _metric(
    "cached_token_ratio", "ratio", _MEAN, "Prompt tokens whose keys and values were reused."
)
ENGINE_QUEUE_P95 = _metric(
    "engine_queue_p95_s", "s", _LAST, "95% of requests waited no longer for their first forward."
)
ENGINE_FIRST_TOKEN_MEAN = _metric(
    "engine_first_token_mean_s", "s", _LAST, "Mean time from arrival to the first token."
)
ENGINE_FIRST_TOKEN_P95 = _metric(
    "engine_first_token_p95_s", "s", _LAST, "95% of requests had their first token by then."
)
ENGINE_INTER_TOKEN_MEAN = _metric(
    "engine_inter_token_mean_s", "s", _LAST, "Mean time between two tokens of one request."
)
ENGINE_INTER_TOKEN_P95 = _metric(
    "engine_inter_token_p95_s", "s", _LAST, "95% of tokens followed the one before within this."
)
ENGINE_USED_PAGE_RATIO = _metric(
    "engine_used_page_ratio", "ratio", _LAST, "Share of the cache's pages that are in use."
)
ENGINE_PREEMPTIONS = _metric(
    "engine_preemptions", "requests", _SUM, "Requests that had to give pages back.", "how"
)
ENGINE_FAILED_REQUESTS = _metric(
    "engine_failed_requests", "requests", _SUM, "Requests that ended with a failure of their own."
)
ENGINE_ACCEPTED_RATIO = _metric(
    "engine_accepted_ratio", "ratio", _MEAN, "Share of guessed tokens that were right."
)
ENGINE_GUESSES = _metric(
    "engine_guesses", "tokens", _SUM, "Guessed tokens that were checked.", "result"
)
ENGINE_UNGUESSED = _metric(
    "engine_unguessed",
    "sequences",
    _SUM,
    "Decoding sequences of a step for which nothing was guessed.",
    "reason",
)
ENGINE_ADAPTERS = _metric(
    "engine_adapters", "adapters", _LAST, "LoRA adapters that requests can name."
)
ENGINE_ADAPTED_TOKENS = _metric(
    "engine_adapted_tokens", "tokens", _SUM, "Sampled tokens that went through an adapter."
)
ENGINE_GRAMMAR_TOKENS = _metric(
    "engine_grammar_tokens", "tokens", _SUM, "Sampled tokens under a grammar."
)
ENGINE_MASK_SECONDS = _metric(
    "engine_mask_s", "s", _SUM, "Time that the engine waited for what grammars allow."
)
ENGINE_KV_GAP = _metric(
    "engine_kv_gap",
    "nats",
    _MEAN,
    "Mean distance of log-probs of sampled tokens from full attention (`engine.kv.report_gap`).",
)
ENGINE_TIER_BYTES = _metric(
    "engine_tier_bytes", "bytes", _LAST, "Keys and values, by where they lie.", "where"
)
ENGINE_TIER_TRAFFIC = _metric(
    "engine_tier_traffic_bytes", "bytes", _SUM, "Keys and values read and written.", "direction"
)
ENGINE_TIER_HIT_RATIO = _metric(
    "engine_tier_hit_ratio", "ratio", _MEAN, "Wanted pages that were in memory already."
)
ENGINE_TIER_PREFETCHED = _metric(
    "engine_tier_prefetched", "pages", _SUM, "Pages of a layer read ahead.", "result"
)
STEP_SECONDS = _metric("step_s", "s", _SUM, "Wall clock of the step.")
PUBLICATION_SECONDS = _metric("publication_s", "s", _SUM, "Handing new weights to the engine.")

# Sandbox
SANDBOX_COMMANDS = _metric(
    "sandbox_commands", "commands", _SUM, "Commands in boxes, by how they ended.", "status"
)
SANDBOX_EXEC_MEAN = _metric("sandbox_exec_mean_s", "s", _MEAN, "Mean time of a command in a box.")
SANDBOX_EXEC_MAX = _metric("sandbox_exec_max_s", "s", _MAX, "Longest command in a box.")
SANDBOX_WAIT_MEAN = _metric("sandbox_wait_mean_s", "s", _MEAN, "Mean wait for a box.")
SANDBOX_WAIT_MAX = _metric("sandbox_wait_max_s", "s", _MAX, "Longest wait for a box.")

# Health
CANARY_MAX_ABS_DIFF = _metric(
    "canary_max_abs_diff", "nats", _MAX, "Engine against trainer on the fixed probe (invariant 4)."
)
FAILURES = _metric("failures", "rollouts", _SUM, "Classified failures.", "kind")
QUARANTINED_DOMAINS = _metric("quarantined_domains", "domains", _LAST, "Shut out of sampling.")
RSS_BYTES = _metric("rss_bytes", "bytes", _MAX, "Resident memory of this process.")
EVAL_PASS_RATE = _metric(
    "eval_pass_rate", "ratio", _LAST, "Held-out pass rate, when measured during a run.", "domain"
)
