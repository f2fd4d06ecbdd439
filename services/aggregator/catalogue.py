"""The catalogue: the single declaration of every metric's key, instrument, unit, reductions,
producers, meaning and old names.

The rule of a key is declared here and never guessed from its name or from the first value seen. A
key with a placeholder, `rewards/{function}`, declares all keys that fit it; names that the policy
invents never become one. Keys under `custom/` need no declaration: they keep the instrument that
they first come with. A recipe's `[metrics]` table declares keys of its user's beside ours.

Reductions: the declared default first, then all others that the instrument allows. A key marked
with `since` is declared before anything records it.
"""

from collections.abc import Mapping

from services.aggregator.declared import measuring, reward, rollout, samples, training
from services.aggregator.metric import ALL, CUSTOM_PREFIX, Catalogue, Group, Metric
from services.common.custom_metrics import CustomMetric

GROUPS = (
    Group("rollout/", "One conversation, and the way to the queue.", rollout.ROLLOUT),
    Group("completions/", "What the engines generate.", rollout.COMPLETIONS),
    Group("tools/", "Tools that conversations call.", rollout.TOOLS),
    Group("env/", "Environments that conversations live in.", rollout.ENVIRONMENT),
    Group(
        "reward, reward/ and rewards/",
        "What reward functions say, before advantages are taken.",
        reward.REWARD,
    ),
    Group(
        "queue/",
        "The streams between the services, sampled every second also during long steps, and what "
        "happens to deliveries.",
        samples.QUEUE,
    ),
    Group("sample/ and group/", "Samples as they arrive at the trainer.", samples.SAMPLE),
    Group("batch/", "A micro-batch, or an optimizer step.", samples.BATCH),
    Group("perf/ and pace/", "Seconds and throughput.", training.PERF),
    Group(
        "The loss: loss, kl, ratio, clip_ratio/ and others",
        "Token-weighted: sums over trained tokens, over all micro-batches of a step.",
        training.TRAINING,
    ),
    Group(
        "policy/",
        "The policy that the engines serve, and whether the trainer agrees with them.",
        training.POLICY,
    ),
    Group(
        "eval/",
        "Evaluation on held-out rows; none of it is in the numbers of training.",
        reward.EVALUATION,
    ),
    Group(
        "recorder/ and ingest/",
        "The measuring itself: what was lost, repeated or refused on the way here.",
        measuring.MEASURING,
    ),
)
"""Everything that is declared, as a reader meets it."""

CATALOGUE = Catalogue(metric for group in GROUPS for metric in group.metrics)
"""The same, found by key."""


def with_custom(declared: Mapping[str, CustomMetric]) -> Catalogue:
    """Our catalogue, and what a recipe declares."""
    custom = (
        Metric(key, each.instrument, each.unit, each.default, ALL, each.meaning)
        for key, each in declared.items()
    )
    return Catalogue((*CATALOGUE.metrics, *custom))


def groups_of(catalogue: Catalogue) -> tuple[Group, ...]:
    """A catalogue as a reader meets it: our groups, and one of the recipe's own keys where it has
    some.
    """
    custom = tuple(each for each in catalogue.metrics if each.key.startswith(CUSTOM_PREFIX))
    if not custom:
        return GROUPS
    return (*GROUPS, Group(CUSTOM_PREFIX, "Declared in the recipe, under `[metrics]`.", custom))
