"""The catalogue: the single declaration of every metric's key, instrument, unit, reductions,
producers and meaning.

The rule of a key is declared here and never guessed from its name or from the first value seen. A
key with a placeholder, `rewards/{function}`, declares all keys that fit it; names that the policy
invents never become one. Keys under `custom/` need no declaration: they keep the instrument that
they first come with.

Reductions: the declared default first, then all others that the instrument allows.
"""

from services.aggregator.metric import ALL, Catalogue, Metric, Services
from services.aggregator.reduce import Reduction

G: Services = ("generator",)
S: Services = ("scorer",)
T: Services = ("trainer",)
A: Services = ("aggregator",)


def _count(
    key: str, producers: Services, unit: str, meaning: str, *, default: Reduction = "sum"
) -> Metric:
    return Metric(key, "count", unit, default, producers, meaning)


def _observed(
    key: str, producers: Services, unit: str, meaning: str, *, default: Reduction = "mean"
) -> Metric:
    return Metric(key, "observation", unit, default, producers, meaning)


def _ratio(key: str, producers: Services, meaning: str, *, unit: str = "1") -> Metric:
    return Metric(key, "ratio", unit, "ratio", producers, meaning)


ROLLOUT = (
    _observed(
        "rollout/duration_s",
        G,
        "s",
        "One conversation, from its first engine call to its last token.",
    ),
    _observed("rollout/engine_s", G, "s", "Of it: in the engine."),
    _observed(
        "rollout/request_wait_s",
        G,
        "s",
        "A request's wait for a generator, by the queue server's clock.",
    ),
    _observed("rollout/turns_mean", G, "turns", "Engine calls in one conversation."),
    _observed(
        "rollout/turns_max", G, "turns", "Most engine calls in one conversation.", default="max"
    ),
    _ratio(
        "rollout/samples_per_rollout",
        G,
        "Training sequences over conversations: 1 unless forked or nothing to train.",
        unit="samples",
    ),
    _ratio(
        "rollout/fork_frac", G, "Forked turn-to-turn transitions over all; absent with one turn."
    ),
    _ratio(
        "rollout/realign_frac",
        G,
        "Realigned turn-to-turn transitions over all; absent with one turn.",
    ),
    _ratio(
        "rollout/demoted_tokens_frac",
        G,
        "Sampled tokens that realignment demoted to context, over sampled tokens.",
    ),
    _ratio(
        "rollout/drift_tokens_mean",
        G,
        "Held tokens beyond the common prefix with a turn's re-tokenised prompt, over transitions.",
        unit="tokens",
    ),
    _observed("rollout/drift_tokens_max", G, "tokens", "The most of them in one.", default="max"),
    _count(
        "rollout/cancelled_total",
        G,
        "conversations",
        "Conversations cancelled because their group had become too old.",
    ),
    _count(
        "rollout/ended/{reason}",
        G,
        "conversations",
        "How conversations ended: stop, length, context, turns, time.",
    ),
    _count(
        "rollout/untrained_sequence_total", G, "sequences", "Sequences without a trained token."
    ),
    _count(
        "rollout/generated_tok_s",
        G,
        "tokens",
        "Generated tokens of the whole fleet, a second: all that the engines produced, also what "
        "was demoted or dropped later.",
        default="rate",
    ),
    _observed(
        "rollout/inflight",
        G,
        "conversations",
        "Conversations running, added up over the replicas that report.",
        default="sum_last",
    ),
    _ratio("rollout/slots_busy_frac", G, "Slot-seconds in use over all slot-seconds."),
    _ratio(
        "rollout/slots_starved_frac",
        G,
        "Slot-seconds free while no request waited, over all: pacing or a slow trainer.",
    ),
    _count(
        "rollout/failed_total",
        G,
        "conversations",
        "Conversations that failed; they are never scored as zero.",
    ),
    _count("rollout/failed/{reason}", G, "conversations", "Conversations that failed, by reason."),
    _count("rollout/vllm_retry_total", G, "calls", "Engine calls tried again."),
    _count(
        "rollout/score_block_s", G, "s", "Generation held back because the groups stream was full."
    ),
    _observed("rollout/score_s", S, "s", "Scoring of one group."),
    _observed(
        "rollout/score_wait_s", S, "s", "A group's wait for a scorer, by the queue server's clock."
    ),
    _observed(
        "rollout/score_queue_size",
        T,
        "groups",
        "Groups waiting to be scored; by the trainer, to be known also with no scorer alive.",
        default="last",
    ),
    _ratio("rollout/scorer_busy_frac", S, "Time with at least one group in work, over time."),
    _count(
        "rollout/backpressure_s", S, "s", "Scoring held back because the rollout queue was full."
    ),
)

COMPLETIONS = (
    _ratio("completions/mean_length", G, "Generated tokens over conversations.", unit="tokens"),
    _observed(
        "completions/max_length", G, "tokens", "Most tokens of a conversation.", default="max"
    ),
    _observed(
        "completions/min_length", G, "tokens", "Fewest tokens of a conversation.", default="min"
    ),
    _ratio(
        "completions/clipped_ratio",
        G,
        "Conversations ended by length, on none of the model's end tokens, over conversations.",
    ),
)

REWARD = (
    _observed("reward", S, "reward", "Total reward of a scored conversation."),
    _observed("reward_std", S, "reward", "Standard deviation of the rewards within a group."),
    _observed(
        "rewards/{function}",
        S,
        "reward",
        "One function's rewards; where it abstained there is no observation.",
    ),
    _count("reward/unscored_total", S, "conversations", "Conversations that no function scored."),
    _count(
        "reward/failed_calls_total",
        S,
        "calls",
        "Calls of a reward function that raised, timed out or answered nonsense.",
    ),
    _ratio("reward/zero_std_frac", S, "Groups without signal over groups."),
)

QUEUE = (
    _observed("queue/waiting/{stream}", T, "groups", "Groups waiting in a stream.", default="last"),
    _observed("queue/held/{stream}", T, "groups", "Groups held by consumers.", default="last"),
    _observed(
        "queue/oldest_wait_s/{stream}", T, "s", "Age of the oldest waiting group.", default="last"
    ),
    _ratio("queue/fill_frac/{stream}", T, "Groups waiting over the stream's capacity."),
    _count(
        "queue/takeover_total", ALL, "groups", "Entries claimed from a worker that fell silent."
    ),
    _count("queue/lost_total", ALL, "groups", "Hand-offs refused because the claim was lost."),
    _count("queue/redelivered_total", ALL, "groups", "Entries delivered again."),
    _count("queue/dead_total", ALL, "groups", "Entries moved to the dead letters."),
    _count(
        "queue/bad_wait_total",
        ALL,
        "waits",
        "Waits left out because the queue server's clock was stepped.",
    ),
    _count("queue/unavailable_s", ALL, "s", "Time without the queue server."),
)

SAMPLE = (
    _observed(
        "sample/rollout_queue_size",
        T,
        "groups",
        "Groups waiting in the samples stream.",
        default="last",
    ),
    _observed(
        "sample/time_in_queue_s",
        T,
        "s",
        "A sample's wait in the rollout queue, by the queue server's clock; the trainer's wait is "
        "perf/rollout_wait_s.",
    ),
    _observed("sample/staleness_mean", T, "versions", "Versions behind, when admitted."),
    _observed(
        "sample/staleness_max", T, "versions", "Most versions behind, when admitted.", default="max"
    ),
    _count("sample/dropped_stale_total", T, "samples", "Samples dropped as stale."),
    _count("sample/dropped/{reason}", T, "samples", "Samples dropped, by reason."),
    _count("group/dropped/{reason}", T, "groups", "Groups dropped, by reason."),
    _count("group/given_up_total", T, "groups", "Groups whose prompt will not be tried again."),
    _ratio(
        "sample/dropped_tokens_mean",
        T,
        "Tokens over samples of what was dropped: shows whether dropping favours short ones.",
        unit="tokens",
    ),
    _observed("sample/forwarded_tokens_mean", T, "tokens", "All tokens of a sample."),
    _observed("sample/forwarded_tokens_max", T, "tokens", "Longest sample.", default="max"),
    _observed(
        "sample/trained_tokens_mean", T, "tokens", "Tokens of a sample that the loss is taken over."
    ),
)

BATCH = (
    _ratio("batch/masked_token_frac", T, "Tokens forwarded but not trained, over forwarded."),
    _observed("batch/samples_per_row", T, "samples", "Samples in a packed row."),
    _observed("batch/row_tokens_mean", T, "tokens", "Tokens of a packed row."),
    _observed("batch/row_tokens_max", T, "tokens", "Longest packed row.", default="max"),
    _observed("batch/row_imbalance", T, "1", "Largest row's attention load over the mean load."),
    _ratio("batch/row_fill_frac", T, "Tokens in rows over token budget times rows."),
    _ratio(
        "batch/duplication",
        T,
        "Tokens forwarded over the step's unique tokens; fill alone rewards duplicated prompts.",
    ),
    _ratio(
        "batch/pad_frac",
        T,
        "Padding between ranks over all positions: transferred, never forwarded.",
    ),
    _ratio("batch/packing_ratio", T, "Raw tokens over unique tokens forwarded."),
    _observed("batch/microbatches_per_step", T, "microbatches", "Micro-batches of a step."),
    _observed("batch/samples_per_step", T, "samples", "Samples of a step."),
    _observed("batch/groups_per_step", T, "groups", "Groups of a step."),
    _observed("batch/forwarded_tokens_per_step", T, "tokens", "Tokens forwarded in a step."),
    _observed("batch/trained_tokens_per_step", T, "tokens", "Tokens trained in a step."),
)

PERF = (
    _observed(
        "perf/step_s",
        T,
        "s",
        "End of the previous optimizer step to the end of this one; absent for the first.",
    ),
    _observed(
        "perf/rollout_wait_s",
        T,
        "s",
        "Of a step: blocked on an empty queue. A sample's wait is sample/time_in_queue_s.",
    ),
    _observed(
        "perf/straggler_wait_s",
        T,
        "s",
        "Of a step: waiting for a group that is about to become stale.",
    ),
    _observed("perf/fwd_s", T, "s", "Of fwd_bwd_s: forward."),
    _observed("perf/fwd_bwd_s", T, "s", "Of a step: forward and backward."),
    _observed("perf/optimizer_s", T, "s", "Of a step: the optimizer, of this very step."),
    _observed("perf/data_s", T, "s", "Of a step: planning, packing, moving to the device."),
    _observed("perf/checkpoint_s", T, "s", "Of a step: held by a checkpoint."),
    _observed("perf/eval_s", T, "s", "Of a step: held by an evaluation."),
    _observed(
        "perf/rank_fwd_bwd_s",
        T,
        "s",
        "Forward and backward of every rank: does one straggle?",
        default="max",
    ),
    _observed("perf/unaccounted_s", T, "s", "What the parts of a step leave unexplained."),
    _ratio(
        "perf/forwarded_tok_s_fwd_bwd",
        T,
        "Tokens forwarded over seconds of forward and backward.",
        unit="tokens/s",
    ),
    _ratio(
        "perf/forwarded_tok_s_wall_clock",
        T,
        "Tokens forwarded over seconds of the step.",
        unit="tokens/s",
    ),
    _ratio(
        "perf/trained_tok_s_wall_clock",
        T,
        "Tokens trained over seconds of the step.",
        unit="tokens/s",
    ),
    _ratio(
        "perf/mfu_fwd_bwd",
        T,
        "Model FLOPs over the device's peak, in forward and backward; absent for an unknown peak.",
    ),
    _ratio("perf/mfu_wall_clock", T, "The same over the whole step."),
    _observed("perf/weight_sync_s", T, "s", "Of a step: the trainer held by a publish."),
    _observed("perf/weight_sync_barrier_s", T, "s", "Of it: ranks gathering parameters."),
    _observed(
        "perf/weight_sync_transfer_s",
        G,
        "s",
        "Fetch of a version, while the engine still generates.",
    ),
    _observed("perf/weight_sync_pause_s", G, "s", "Engine paused for a version."),
    _count(
        "perf/weight_sync_reprefill_tokens",
        G,
        "tokens",
        "Tokens recomputed after a switch: the other cost to generation.",
    ),
    _ratio("perf/generator_paused_frac", G, "Paused seconds over seconds."),
    _observed(
        "perf/weight_sync_lag_s",
        T,
        "s",
        "From a publish until the slowest live replica serves it, by the trainer's clock.",
    ),
    _count("perf/empty_step_total", T, "steps", "Steps without a denominator."),
    _ratio("pace/outstanding_frac", T, "Groups outstanding over their bound."),
)

TRAINING = (
    _observed("loss", T, "1", "The optimised value of the whole step; one a step."),
    _ratio("entropy", T, "Of the policy at trained positions.", unit="nats"),
    _ratio("ratio", T, "Mean importance ratio over trained tokens."),
    _ratio("clip_ratio/low_mean", T, "Tokens clipped from below over trained tokens."),
    _ratio("clip_ratio/high_mean", T, "Tokens clipped from above over trained tokens."),
    _ratio("clip_ratio/region_mean", T, "Clipped tokens over trained tokens."),
    _observed(
        "clip_ratio/low_min",
        T,
        "1",
        "Smallest share of a sample clipped from below.",
        default="min",
    ),
    _observed(
        "clip_ratio/high_max",
        T,
        "1",
        "Largest share of a sample clipped from above.",
        default="max",
    ),
    _ratio(
        "policy/logprob_gap_mean/{lag}",
        T,
        "Mean |trainer - engine| log-probability, by lag 0, 1, 2, 3+: how disagreement is seen.",
        unit="nats",
    ),
    _observed("policy/logprob_gap_max/{lag}", T, "nats", "The largest such gap.", default="max"),
    _ratio("policy/signal_token_frac", T, "Trained tokens with an advantage over trained tokens."),
    _ratio("kl", T, "To the sampling policy (k3), over trained tokens.", unit="nats"),
    _ratio("kl/{lag}", T, "The same by lag 0, 1, 2, 3+.", unit="nats"),
    _observed("grad_norm", T, "1", "Norm of the gradient before clipping; one a step."),
    _observed("learning_rate", T, "1", "Of the step; one a step.", default="last"),
    _count(
        "nonfinite_total/{where}",
        ("trainer", "scorer"),
        "values",
        "Ratios, log-probabilities and gradients that were guarded.",
    ),
)

POLICY = (
    _observed(
        "policy/served_version", G, "version", "The version that a replica serves.", default="last"
    ),
    _count("policy/fetch_failed_total", G, "fetches", "Fetches of a version that failed."),
    _observed(
        "policy/canary_gap",
        G,
        "nats",
        "Mean |engine - trainer| log-probability on the canary, at each load.",
        default="max",
    ),
    _count("policy/canary_failed_total", G, "loads", "Loads that the canary refused."),
)

EVALUATION = (
    _observed("eval/reward", S, "reward", "Total reward of a greedy evaluation."),
    _observed("eval/rewards/{function}", S, "reward", "One function's rewards in evaluation."),
    _ratio("eval/mean_length", G, "Generated tokens over conversations.", unit="tokens"),
    _ratio("eval/clipped_ratio", G, "Conversations ended by length over conversations."),
    _count("eval/failed_total", G, "conversations", "Evaluation conversations that failed."),
)

MEASURING = (
    _count(
        "recorder/dropped_total",
        ALL,
        "partials",
        "Partials dropped because the recorder's buffer was full.",
    ),
    _count(
        "recorder/merged_total",
        ALL,
        "partials",
        "Partials merged because the recorder's buffer was full.",
    ),
    _count(
        "recorder/refused_total",
        ALL,
        "calls",
        "Recording calls refused: a numerator without denominator, one key by two instruments.",
    ),
    _count("ingest/deltas", A, "deltas", "Deltas added."),
    _count("ingest/duplicates", A, "batches", "Batches that came again and changed nothing."),
    _observed(
        "ingest/gaps",
        A,
        "batches",
        "Batches that are missing in the sequences so far; a late one closes its gap.",
        default="last",
    ),
    _count("ingest/rejected/{reason}", A, "deltas", "Deltas not taken, by reason."),
)

CATALOGUE = Catalogue(
    (
        *ROLLOUT,
        *COMPLETIONS,
        *REWARD,
        *QUEUE,
        *SAMPLE,
        *BATCH,
        *PERF,
        *TRAINING,
        *POLICY,
        *EVALUATION,
        *MEASURING,
    )
)
"""What is declared so far."""
