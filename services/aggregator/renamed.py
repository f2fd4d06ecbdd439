"""Keys of the ancestor (TRL's async GRPO trainer) under their new names."""

RENAMED: dict[str, tuple[str, ...]] = {
    "training_tok/s": (
        "perf/forwarded_tok_s_fwd_bwd",
        "perf/forwarded_tok_s_wall_clock",
        "perf/trained_tok_s_wall_clock",
    ),
    "step_time": ("perf/fwd_bwd_s",),
    "iteration_time_s": ("perf/step_s",),
    "forward_time_s": ("perf/fwd_s",),
    "weight_sync_time_s": ("perf/weight_sync_s",),
    "queue_wait_time_s": ("perf/rollout_wait_s", "sample/time_in_queue_s"),
    "generation_tok_per_s": ("rollout/generated_tok_s",),
    "scoring_time_ms": ("rollout/score_s",),
    "wait_scoring_ms": ("rollout/score_wait_s",),
    "buffer_qsize": ("sample/rollout_queue_size",),
    "train_seq_len": ("sample/forwarded_tokens_mean", "batch/row_tokens_mean"),
}
"""A query for an old key is answered with the new ones."""
