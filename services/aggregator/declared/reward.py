"""Keys of rewards, in training and in evaluation."""

from services.aggregator.declared.making import S, T, count, observed, ratio

REWARD = (
    observed("reward", S, "reward", "Total reward of a scored conversation."),
    observed("reward_std", S, "reward", "Standard deviation of the rewards within a group."),
    observed(
        "rewards/{function}",
        S,
        "reward",
        "One function's rewards; where it abstained there is no observation.",
    ),
    observed(
        "reward/function_s/{function}",
        S,
        "s",
        "One function's call for one group, without its wait for a free worker.",
    ),
    count("reward/unscored_total", S, "conversations", "Conversations that no function scored."),
    count(
        "reward/failed_calls_total",
        S,
        "calls",
        "Calls of a reward function that raised, timed out or answered nonsense.",
        only_when="a call failed",
    ),
    ratio("reward/zero_std_frac", S, "Groups without signal over groups."),
)

EVALUATION = (
    observed("eval/reward", T, "reward", "Total reward of a greedy evaluation."),
    observed("eval/rewards/{function}", T, "reward", "One function's rewards in evaluation."),
    ratio("eval/mean_length", T, "Generated tokens over conversations.", unit="tokens"),
    ratio("eval/clipped_ratio", T, "Conversations ended by length over conversations."),
    count("eval/failed_total", T, "rows", "Rows of evaluation that have no reward."),
    observed(
        "eval/version",
        T,
        "version",
        "The version that was evaluated.",
        default="last",
    ),
)
