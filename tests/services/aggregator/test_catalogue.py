import re

import pytest

from services.aggregator.catalogue import CATALOGUE
from services.aggregator.ingest import Ingest
from services.aggregator.metric import Catalogue, Metric
from services.aggregator.reduce import REDUCTIONS
from services.aggregator.store import Store
from tests.services.aggregator.making import Producer, count, ratio


def test_declarations_are_whole() -> None:
    for metric in CATALOGUE.metrics:
        assert metric.reductions[0] == metric.default, metric.key
        assert set(metric.reductions) == set(REDUCTIONS[metric.instrument]), metric.key
        assert metric.unit, metric.key
        assert metric.meaning.endswith((".", "?")), metric.key
        assert metric.producers, metric.key


def test_a_unit_says_seconds_where_the_key_does() -> None:
    for metric in CATALOGUE.metrics:
        if metric.key.endswith(("_s", "_s/{stream}")) and "tok_s" not in metric.key:
            assert metric.unit == "s", metric.key


@pytest.mark.parametrize(
    ("key", "declared", "value"),
    [
        ("reward", "reward", None),
        ("rewards/exact_match", "rewards/{function}", "exact_match"),
        ("rewards/my.module:reward", "rewards/{function}", "my.module:reward"),
        ("kl/3+", "kl/{lag}", "3+"),
        ("kl", "kl", None),
        ("queue/waiting/samples", "queue/waiting/{stream}", "samples"),
        ("eval/rewards/sums", "eval/rewards/{function}", "sums"),
        ("tools/latency_s", "tools/latency_s", None),
        ("tools/calculator/latency_s", "tools/{tool}/latency_s", "calculator"),
    ],
)
def test_a_key_finds_its_declaration(key: str, declared: str, value: str | None) -> None:
    found = CATALOGUE.find(key)
    assert found is not None
    assert (found.metric.key, found.value) == (declared, value)


@pytest.mark.parametrize(
    "key", ["", "rewards/", "rewards/a/b", "rewards/{function}", "reward ", "tools/x", "custom/x"]
)
def test_other_keys_find_none(key: str) -> None:
    assert CATALOGUE.find(key) is None


def test_the_rule_comes_from_the_declaration_not_from_words_in_the_key() -> None:
    """C26: `perf/maximum` is a mean where it is declared so."""
    metric = Metric("perf/maximum", "observation", "s", "mean", ("trainer",), "A mean.")
    assert Catalogue([metric]).metric("perf/maximum", instrument="observation").default == "mean"


def test_a_custom_key_is_what_it_comes_as() -> None:
    assert CATALOGUE.metric("custom/min_max", instrument="ratio").default == "ratio"


def test_a_key_that_was_declared_otherwise_stays_what_it_came_as() -> None:
    """Of a recipe that does not declare it any more, or by another instrument."""
    assert CATALOGUE.metric("undeclared", instrument="count").default == "sum"
    assert CATALOGUE.metric("loss", instrument="observation").unit == "1"
    other = CATALOGUE.metric("loss", instrument="count")
    assert (other.default, other.meaning) == ("sum", "Not declared.")


def test_a_key_is_declared_once() -> None:
    metric = Metric("a", "count", "1", "sum", ("trainer",), "A.")
    with pytest.raises(ValueError, match="a is declared twice"):
        Catalogue([metric, metric])


def test_renamed_keys_lead_to_declared_ones() -> None:
    assert CATALOGUE.renamed["iteration_time_s"] == ("perf/step_s",)
    assert set(CATALOGUE.renamed["queue_wait_time_s"]) == {
        "perf/rollout_wait_s",
        "sample/time_in_queue_s",
    }
    for old, new in CATALOGUE.renamed.items():
        assert CATALOGUE.find(old) is None
        assert all(CATALOGUE.find(key) is not None for key in new)


def test_a_planned_key_names_the_part_that_records_it() -> None:
    for metric in CATALOGUE.metrics:
        assert metric.since is None or re.fullmatch(r"[4-8] of 8", metric.since), metric.key


def test_a_planned_key_is_taken_all_the_same(store: Store) -> None:
    planned = Metric("new/key", "ratio", "1", "ratio", ("trainer",), "New.", since="8 of 8")
    ingest = Ingest(store, catalogue=Catalogue((*CATALOGUE.metrics, planned)))
    receipt = Producer("trainer-0", service="trainer").send(
        ingest, [(planned.key, ratio(1, 3)), ("no/such_key", count(1))]
    )
    assert (receipt.accepted, [each.key for each in receipt.rejected]) == (1, ["no/such_key"])


def test_a_rate_has_its_own_unit() -> None:
    tokens = CATALOGUE.metric("rollout/generated_tok_s", instrument="count")
    assert tokens.default == "rate"
    assert (tokens.unit_of("rate"), tokens.unit_of("sum")) == ("tokens/s", "tokens")
