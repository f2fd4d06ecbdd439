"""Keys of the streams, samples as they arrive, and the batches made of them."""

from services.aggregator.declared.making import T, count, observed, ratio
from services.aggregator.metric import ALL

QUEUE = (
    observed("queue/waiting/{stream}", T, "groups", "Groups waiting in a stream.", default="last"),
    observed("queue/held/{stream}", T, "groups", "Groups held by consumers.", default="last"),
    observed(
        "queue/oldest_wait_s/{stream}",
        T,
        "s",
        "Age of the oldest waiting group.",
        default="last",
        only_when="a group waits at the moment of sampling",
    ),
    ratio("queue/fill_frac/{stream}", T, "Groups waiting over the stream's capacity."),
    count(
        "queue/takeover_total",
        ALL,
        "groups",
        "Entries claimed from a worker that fell silent.",
        only_when="a worker fell silent",
    ),
    count(
        "queue/lost_total",
        ALL,
        "groups",
        "Hand-offs refused because the claim was lost.",
        only_when="a claim was lost",
    ),
    count(
        "queue/redelivered_total",
        ALL,
        "groups",
        "Entries delivered again.",
        only_when="an entry was delivered again",
    ),
    count(
        "queue/dead_total",
        ALL,
        "groups",
        "Entries moved to the dead letters.",
        only_when="an entry could not be processed",
    ),
    count(
        "queue/bad_wait_total",
        ALL,
        "waits",
        "Waits left out because the queue server's clock was stepped.",
        only_when="the queue server's clock was stepped",
    ),
    count(
        "queue/unavailable_s",
        ALL,
        "s",
        "Time without the queue server.",
        only_when="the queue server was away",
    ),
)

SAMPLE = (
    observed(
        "sample/rollout_queue_size",
        T,
        "groups",
        "Groups waiting in the samples stream.",
        default="last",
        old_names=("buffer_qsize",),
    ),
    observed(
        "sample/time_in_queue_s",
        T,
        "s",
        "A sample's wait in the rollout queue, by the queue server's clock; the trainer's wait is "
        "perf/rollout_wait_s.",
        old_names=("queue_wait_time_s",),
    ),
    observed("sample/staleness_mean", T, "versions", "Versions behind, when admitted."),
    observed(
        "sample/staleness_max", T, "versions", "Most versions behind, when admitted.", default="max"
    ),
    count(
        "sample/dropped_stale_total",
        T,
        "samples",
        "Samples dropped as stale.",
        only_when="a group was dropped as stale",
    ),
    count(
        "sample/dropped/{reason}",
        T,
        "samples",
        "Samples dropped, by reason.",
        only_when="samples were dropped",
    ),
    count(
        "group/dropped/{reason}",
        T,
        "groups",
        "Groups dropped, by reason.",
        only_when="a group was dropped",
    ),
    count(
        "group/given_up_total",
        T,
        "groups",
        "Groups whose prompt will not be tried again.",
        only_when="a prompt failed too often",
    ),
    ratio(
        "sample/dropped_tokens_mean",
        T,
        "Tokens over samples of what was dropped: shows whether dropping favours short ones.",
        unit="tokens",
        only_when="samples were dropped",
    ),
    observed(
        "sample/forwarded_tokens_mean",
        T,
        "tokens",
        "All tokens of a sample.",
        old_names=("train_seq_len",),
    ),
    observed("sample/forwarded_tokens_max", T, "tokens", "Longest sample.", default="max"),
    observed(
        "sample/trained_tokens_mean", T, "tokens", "Tokens of a sample that the loss is taken over."
    ),
)

BATCH = (
    ratio("batch/masked_token_frac", T, "Tokens forwarded but not trained, over forwarded."),
    observed("batch/samples_per_row", T, "samples", "Samples in a packed row."),
    observed(
        "batch/row_tokens_mean",
        T,
        "tokens",
        "Tokens of a packed row.",
        old_names=("train_seq_len",),
    ),
    observed("batch/row_tokens_max", T, "tokens", "Longest packed row.", default="max"),
    observed(
        "batch/row_imbalance",
        T,
        "1",
        "Of a micro-batch: the largest row's attention load (sum of squared sample lengths) over "
        "the mean of its rows; what ranks wait for one another.",
    ),
    ratio(
        "batch/row_fill_frac",
        T,
        "Tokens in rows over token budget times rows. Rows are not padded: each rank gets its own "
        "samples, and forwards these only.",
        old_names=("batch/pad_frac",),
    ),
    ratio(
        "batch/duplication",
        T,
        "Tokens forwarded over the step's unique tokens; fill alone rewards duplicated prompts.",
    ),
    ratio("batch/packing_ratio", T, "Raw tokens over unique tokens forwarded."),
    observed("batch/microbatches_per_step", T, "microbatches", "Micro-batches of a step."),
    observed(
        "batch/samples_per_step",
        T,
        "samples",
        "Samples that a step trained on; not those of groups that were skipped for want of signal.",
    ),
    observed("batch/groups_per_step", T, "groups", "Groups of a step, with or without signal."),
    observed("batch/forwarded_tokens_per_step", T, "tokens", "Tokens forwarded in a step."),
    observed("batch/trained_tokens_per_step", T, "tokens", "Tokens trained in a step."),
)
