"""Keys of conversations, their way to the queue, and what they call."""

from services.aggregator.declared.making import (
    G,
    S,
    T,
    count,
    observed,
    ratio,
)

EQUIPPED = "the recipe has tools or environments"
CALLED = "the model called a tool"
LIVED = "the recipe has environments"
REWARDS = "an environment has get_reward()"
TURNS = "a conversation had two turns"

ROLLOUT = (
    observed(
        "rollout/duration_s",
        G,
        "s",
        "One conversation, from its first engine call to its last token or tool result.",
    ),
    observed("rollout/engine_s", G, "s", "Of rollout/duration_s: in the engine."),
    observed(
        "rollout/tool_s",
        G,
        "s",
        "Of rollout/duration_s: in tools, calls at the same time counted once.",
        only_when=EQUIPPED,
    ),
    observed(
        "rollout/env_s", G, "s", "Of rollout/duration_s: in the environment.", only_when=EQUIPPED
    ),
    observed(
        "rollout/env_s/{environment}",
        G,
        "s",
        "The same, of conversations in this environment.",
        only_when=LIVED,
    ),
    observed(
        "rollout/request_wait_s",
        G,
        "s",
        "A request's wait for a generator, by the queue server's clock.",
    ),
    observed("rollout/turns_mean", G, "turns", "Engine calls in one conversation."),
    observed(
        "rollout/turns_max", G, "turns", "Most engine calls in one conversation.", default="max"
    ),
    ratio(
        "rollout/samples_per_rollout",
        G,
        "Training sequences over conversations: 1 unless forked or nothing to train.",
        unit="samples",
    ),
    ratio(
        "rollout/fork_frac",
        G,
        "Forked turn-to-turn transitions over all; absent with one turn.",
        only_when=TURNS,
    ),
    ratio(
        "rollout/realign_frac",
        G,
        "Realigned turn-to-turn transitions over all; absent with one turn.",
        only_when=TURNS,
    ),
    ratio(
        "rollout/demoted_tokens_frac",
        G,
        "Sampled tokens that realignment demoted to context, over sampled tokens.",
    ),
    ratio(
        "rollout/drift_tokens_mean",
        G,
        "Held tokens beyond the common prefix with a turn's re-tokenised prompt, over transitions.",
        unit="tokens",
        only_when=TURNS,
    ),
    observed(
        "rollout/drift_tokens_max",
        G,
        "tokens",
        "Most such tokens at one transition.",
        default="max",
        only_when=TURNS,
    ),
    count(
        "rollout/cancelled_total",
        G,
        "conversations",
        "Conversations cancelled because their group had become too old.",
        only_when="a group became too old while it was generated",
    ),
    count(
        "rollout/ended/{reason}",
        G,
        "conversations",
        "How conversations ended: stop, length, context, turns, time.",
    ),
    count(
        "rollout/untrained_sequence_total",
        G,
        "sequences",
        "Sequences without a trained token.",
        only_when="a sequence had no trained token",
    ),
    count(
        "rollout/generated_tok_s",
        G,
        "tokens",
        "Generated tokens of the whole fleet, a second: all that the engines produced, also what "
        "was demoted or dropped later.",
        default="rate",
        old_names=("generation_tok_per_s",),
    ),
    observed(
        "rollout/inflight",
        G,
        "conversations",
        "Conversations running, added up over the replicas that report.",
        default="sum_last",
    ),
    ratio("rollout/slots_busy_frac", G, "Slot-seconds in use over all slot-seconds."),
    ratio(
        "rollout/slots_starved_frac",
        G,
        "Slot-seconds free while no request waited, over all: pacing or a slow trainer.",
    ),
    count(
        "rollout/failed_total",
        G,
        "conversations",
        "Conversations that failed; they are never scored as zero.",
    ),
    count(
        "rollout/failed/{reason}",
        G,
        "conversations",
        "Conversations that failed, by reason.",
        only_when="a conversation failed",
    ),
    count(
        "rollout/vllm_retry_total",
        G,
        "calls",
        "Engine calls tried again.",
        only_when="the engine failed at a request and lived on",
    ),
    count(
        "rollout/score_block_s",
        G,
        "s",
        "Generation held back because the groups stream was full.",
        only_when="the groups stream was full",
    ),
    observed("rollout/score_s", S, "s", "Scoring of one group.", old_names=("scoring_time_ms",)),
    observed(
        "rollout/score_wait_s",
        S,
        "s",
        "A group's wait for a scorer, by the queue server's clock.",
        old_names=("wait_scoring_ms",),
    ),
    observed(
        "rollout/score_queue_size",
        T,
        "groups",
        "Groups waiting to be scored; by the trainer, to be known also with no scorer alive.",
        default="last",
    ),
    ratio("rollout/scorer_busy_frac", S, "Time with at least one group in work, over time."),
    ratio(
        "rollout/scorer_load_frac",
        S,
        "Of all that a scorer can have in work at a time, groups (scorer.max_groups) or calls in "
        "worker processes (rewards.workers), whichever is nearer its end.",
    ),
    count(
        "rollout/backpressure_s",
        S,
        "s",
        "Scoring held back because the rollout queue was full.",
        only_when="the samples stream was full",
    ),
)

COMPLETIONS = (
    ratio("completions/mean_length", G, "Generated tokens over conversations.", unit="tokens"),
    observed(
        "completions/max_length", G, "tokens", "Most tokens of a conversation.", default="max"
    ),
    observed(
        "completions/min_length", G, "tokens", "Fewest tokens of a conversation.", default="min"
    ),
    ratio(
        "completions/clipped_ratio",
        G,
        "Conversations ended by length, on none of the model's end tokens, over conversations.",
    ),
)

TOOLS = (
    observed(
        "tools/call_frequency",
        G,
        "calls",
        "Calls of tools in one conversation.",
        only_when=EQUIPPED,
    ),
    ratio("tools/failure_frequency", G, "Failed calls over calls.", only_when=CALLED),
    count(
        "tools/{tool}/call_total",
        G,
        "calls",
        "Calls of a tool that the recipe declares.",
        only_when=CALLED,
    ),
    count(
        "tools/{tool}/failure_total",
        G,
        "calls",
        "Calls of this tool that failed.",
        only_when=CALLED,
    ),
    count(
        "tools/unknown_name_total",
        G,
        "calls",
        "Calls of a tool that does not exist: a fault of the policy, not of the environment.",
        only_when="the model called a tool that does not exist",
    ),
    observed("tools/latency_s", G, "s", "One call of any tool.", only_when=CALLED),
    observed("tools/{tool}/latency_s", G, "s", "One call of this tool.", only_when=CALLED),
    observed("tools/parallel_calls_mean", G, "calls", "Calls in one turn.", only_when=CALLED),
    ratio(
        "tools/loop_exhausted_frac",
        G,
        "Conversations cut off while still asking for tools, or by an environment's time limit, "
        "over conversations that could use tools or an environment.",
        only_when=EQUIPPED,
    ),
)

ENVIRONMENT = (
    observed(
        "env/reset_s", G, "s", "Reset of an environment for one conversation.", only_when=LIVED
    ),
    observed(
        "env/reward_s",
        G,
        "s",
        "An environment's own reward of one conversation.",
        only_when=REWARDS,
    ),
)
