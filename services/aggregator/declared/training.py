"""Keys of a step's time, its loss, and the policy that comes of it."""

from services.aggregator.declared.making import G, T, count, observed, ratio

PERF = (
    observed(
        "perf/step_s",
        T,
        "s",
        "End of the previous optimizer step to the end of this one; absent for the first.",
        old_names=("iteration_time_s",),
    ),
    observed(
        "perf/rollout_wait_s",
        T,
        "s",
        "Of a step: blocked on an empty queue. A sample's wait is sample/time_in_queue_s.",
        old_names=("queue_wait_time_s",),
    ),
    observed(
        "perf/straggler_wait_s",
        T,
        "s",
        "Of a step: waiting for groups that are about to become stale, while others were there.",
    ),
    observed("perf/fwd_s", T, "s", "Of perf/fwd_bwd_s: forward.", old_names=("forward_time_s",)),
    observed(
        "perf/fwd_bwd_s", T, "s", "Of a step: forward and backward.", old_names=("step_time",)
    ),
    observed("perf/optimizer_s", T, "s", "Of a step: the optimizer, of this very step."),
    observed(
        "perf/data_s",
        T,
        "s",
        "Of a step: planning, packing, moving to the device, handing rows to the other ranks.",
    ),
    observed("perf/checkpoint_s", T, "s", "Of a step: held by a checkpoint."),
    observed("perf/eval_s", T, "s", "Of a step: held by an evaluation."),
    observed(
        "perf/rank_fwd_bwd_s",
        T,
        "s",
        "Forward and backward of every rank: does one straggle?",
        default="max",
    ),
    observed("perf/unaccounted_s", T, "s", "What the parts of a step leave unexplained."),
    ratio(
        "perf/forwarded_tok_s_fwd_bwd",
        T,
        "Tokens forwarded over seconds of forward and backward.",
        unit="tokens/s",
        old_names=("training_tok/s",),
    ),
    ratio(
        "perf/forwarded_tok_s_wall_clock",
        T,
        "Tokens forwarded over seconds of the step.",
        unit="tokens/s",
        old_names=("training_tok/s",),
    ),
    ratio(
        "perf/trained_tok_s_wall_clock",
        T,
        "Tokens trained over seconds of the step.",
        unit="tokens/s",
        old_names=("training_tok/s",),
    ),
    ratio(
        "perf/mfu_fwd_bwd",
        T,
        "Model FLOPs over the peak of all ranks' devices, in forward and backward.",
        only_when="the device's peak is known",
    ),
    ratio(
        "perf/mfu_wall_clock",
        T,
        "Model FLOPs over the peak of all ranks' devices, over the whole step.",
        only_when="the device's peak is known",
    ),
    observed(
        "perf/weight_sync_s",
        T,
        "s",
        "Of a step: the trainer held by a publish.",
        old_names=("weight_sync_time_s",),
    ),
    observed(
        "perf/weight_sync_barrier_s",
        T,
        "s",
        "Of perf/weight_sync_s: ranks gathering parameters.",
    ),
    observed(
        "perf/weight_sync_transfer_s",
        G,
        "s",
        "Fetch of a version, while the engine still generates.",
    ),
    observed("perf/weight_sync_pause_s", G, "s", "Engine paused for a version."),
    count(
        "perf/weight_sync_reprefill_tokens",
        G,
        "tokens",
        "Tokens recomputed after a switch: the other cost to generation.",
        only_when="weights changed under a conversation",
    ),
    ratio("perf/generator_paused_frac", G, "Paused seconds over seconds."),
    observed(
        "perf/weight_sync_lag_s",
        T,
        "s",
        "From a publish until the slowest live replica serves it, by the trainer's clock.",
    ),
    count(
        "perf/empty_step_total",
        T,
        "steps",
        "Steps without a denominator.",
        only_when="a step had nothing to train on",
    ),
    ratio("pace/outstanding_frac", T, "Groups outstanding over their bound."),
)

TRAINING = (
    observed("loss", T, "1", "The optimised value of the whole step; one a step."),
    ratio("entropy", T, "Entropy of the policy at trained positions.", unit="nats"),
    ratio("ratio", T, "Mean importance ratio over trained tokens."),
    ratio("clip_ratio/low_mean", T, "Tokens clipped from below over trained tokens."),
    ratio("clip_ratio/high_mean", T, "Tokens clipped from above over trained tokens."),
    ratio("clip_ratio/region_mean", T, "Clipped tokens over trained tokens."),
    observed(
        "clip_ratio/low_min",
        T,
        "1",
        "Smallest share of a sample clipped from below.",
        default="min",
    ),
    observed(
        "clip_ratio/high_max",
        T,
        "1",
        "Largest share of a sample clipped from above.",
        default="max",
    ),
    ratio("kl", T, "KL to the sampling policy (k3), over trained tokens.", unit="nats"),
    ratio("kl/{lag}", T, "KL to the sampling policy (k3), by lag 0, 1, 2, 3+.", unit="nats"),
    ratio(
        "kl_ref",
        T,
        "KL to the frozen reference model (k3, weighted by the importance ratio up to 2), over "
        "trained tokens.",
        unit="nats",
        only_when="there is a reference",
    ),
    observed(
        "aux_loss",
        T,
        "1",
        "Load-balancing loss of a mixture-of-experts router; one a step.",
        only_when="the model has routers",
    ),
    observed("grad_norm", T, "1", "Norm of the gradient before clipping; one a step."),
    observed("learning_rate", T, "1", "Learning rate of the step; one a step.", default="last"),
    count(
        "nonfinite_total/{where}",
        ("trainer", "scorer"),
        "values",
        "Ratios, log-probabilities and gradients that were guarded.",
        only_when="a value was not finite",
    ),
)

POLICY = (
    ratio(
        "policy/logprob_gap_mean/{lag}",
        T,
        "Mean |trainer - engine| log-probability, by lag 0, 1, 2, 3+: how disagreement is seen.",
        unit="nats",
    ),
    observed(
        "policy/logprob_gap_max/{lag}",
        T,
        "nats",
        "Largest |trainer - engine| log-probability, by lag 0, 1, 2, 3+.",
        default="max",
    ),
    ratio("policy/signal_token_frac", T, "Trained tokens with an advantage over trained tokens."),
    observed(
        "policy/served_version", G, "version", "The version that a replica serves.", default="last"
    ),
    count(
        "policy/fetch_failed_total",
        G,
        "fetches",
        "Fetches of a version that failed.",
        only_when="a fetch failed",
    ),
    observed(
        "policy/canary_gap",
        G,
        "nats",
        "Mean |engine - trainer| log-probability on the canary, at each load.",
        default="max",
    ),
    count(
        "policy/canary_failed_total",
        G,
        "loads",
        "Loads that the canary refused.",
        only_when="a load was refused",
    ),
)
