"""The document of the metrics, as Markdown and as the page /docs/metrics."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

from services.aggregator.catalogue import CATALOGUE, GROUPS
from services.aggregator.documentation import CONDITIONAL, PLANNED, READING, anchor, markdown
from services.aggregator.metric import Group, Metric
from services.aggregator.rules import RULES
from services.common.config import Recipe

ROOT = Path(__file__).parents[3]


def rows(document: str) -> dict[str, list[str]]:
    """The other cells of each key's row, by key."""
    found = {}
    for line in document.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 6 and re.fullmatch(r"`[^`]+`", cells[0]):
            found[cells[0].strip("`")] = cells[1:]
    return found


def test_generated_documents_are_current() -> None:
    command = [sys.executable, "docs/generate.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_declared_key_has_its_row() -> None:
    found = rows(markdown())
    assert list(found) == [metric.key for metric in CATALOGUE.metrics]
    assert len(CATALOGUE.metrics) == sum(len(group.metrics) for group in GROUPS)
    assert found["reward"] == [
        "scorer",
        "observation",
        "reward",
        "**mean**, min, max, p50, p95, p99, last, sum_last",
        "Total reward of a scored conversation.",
    ]
    assert found["rollout/generated_tok_s"][1:4] == ["count", "tokens/s", "**rate**, sum"]
    assert "Old name: `generation_tok_per_s`." in found["rollout/generated_tok_s"][4]
    assert "Mean \\|trainer - engine\\|" in found["policy/logprob_gap_mean/{lag}"][4]


def test_a_planned_key_says_that_nothing_records_it() -> None:
    found = rows(markdown())
    for metric in CATALOGUE.metrics:
        assert (PLANNED in found[metric.key][4]) == (metric.since is not None), metric.key
    assert PLANNED not in found["perf/step_s"][4]


def test_a_conditional_key_says_on_what() -> None:
    found = rows(markdown())
    conditional = [metric for metric in CATALOGUE.metrics if metric.only_when is not None]
    for metric in conditional:
        assert found[metric.key][4].endswith(f"*{CONDITIONAL} {metric.only_when}.*")
    assert markdown().count(f"*{CONDITIONAL} ") == len(conditional)
    assert "*Only when a group was dropped.*" in found["group/dropped/{reason}"][4]


def test_a_group_is_a_section() -> None:
    metric = Metric(
        "custom/a",
        "count",
        "s",
        "rate",
        ("trainer",),
        "A|B.",
        since="4 of 8",
        only_when="c is",
        old_names=("b", "c"),
    )
    document = markdown([Group("custom/ and more", "Made up.", (metric,))])
    assert "- [custom/ and more](#custom-and-more)" in document
    assert document.endswith(
        "## custom/ and more\n\nMade up.\n\n"
        "| key | by | instrument | unit | reductions | meaning |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| `custom/a` | trainer | count | s/s | **rate**, sum "
        "| A\\|B. Old name: `b`, `c`. *Only when c is.* *Planned: not recorded yet.* |\n"
    )


def test_what_the_text_names_exists() -> None:
    """Keys are declared (or a service's setting in the recipe): a text must not outlive them."""
    text = READING.read_text()
    inside = re.findall(r"(?<!`)`([^`\s]+)`(?!`)", text) + re.findall(r"\bperf/\w+", text)
    for name in inside:
        if re.fullmatch(r"\w+\.\w+", name):
            section, field = name.split(".")
            model = Recipe.model_fields[section].annotation
            assert field in getattr(model, "model_fields", {}), name
        elif name not in {"null", '"skip"', '"drop"', "group_by=producer"}:
            exact = {metric.key for metric in CATALOGUE.metrics}
            assert name in exact or CATALOGUE.find(name) is not None, name


def test_the_time_budget_is_the_one_that_the_trainer_keeps() -> None:
    """The sum in the text has the parts that `perf/unaccounted_s` is what is left of."""
    block = READING.read_text().split("```")[1]
    parts = re.findall(r"^(?:perf/step_s =|\s+\+) (perf/\w+)", block, re.MULTILINE)
    declared = [
        metric.key
        for metric in CATALOGUE.metrics
        if metric.meaning.startswith("Of a step:") or metric.key == "perf/unaccounted_s"
    ]
    assert sorted(parts) == sorted(declared)


def test_the_text_s_thresholds_are_those_of_the_rules() -> None:
    """Each row of the table says of each of its rule's conditions the limit that the rule has."""
    text = READING.read_text()
    for rule in RULES:
        [when] = re.findall(rf"^\| {rule.name} \| ([^|]*) \|", text, re.MULTILINE)
        clauses = rule.clauses[-1:] if when.startswith("the same, and") else rule.clauses
        for condition in (each for clause in clauses for each in clause):
            key = condition.key.replace(" + ", "` + `")
            [said] = re.findall(rf"`{re.escape(key)}`([^;]*?)(?:, or `|;|$)", when)
            if condition.limit is None:
                wanted = "less than a step" if condition.compare == "<" else "a step or more"
                assert wanted in said or f"hold {wanted}" in when, (rule.name, key)
                continue
            [number] = re.findall(r"\d+ %|\d\.\d+|\b0\b|\bhalf\b", said)
            limit = {"half": 0.5}.get(number) or float(number.removesuffix(" %"))
            assert limit / (100 if "%" in number else 1) == condition.limit, (rule.name, key)
            words = {">=": "or more", "<": "less than", ">": "above"}
            assert words[condition.compare] in said, (rule.name, key)


class Page(HTMLParser):
    """What the page links to, names, and would run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.add(name)
            if name in ("href", "src"):
                self.addresses.append(value or "")
            elif name == "id":
                self.ids.append(value or "")


async def test_the_page_is_the_whole_document(client: httpx.AsyncClient) -> None:
    response = await client.get("/docs/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    page = Page(response.text)
    assert {metric.key for metric in CATALOGUE.metrics} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert response.text.count(PLANNED) == sum(m.since is not None for m in CATALOGUE.metrics)
    assert "prefers-color-scheme: dark" in response.text


async def test_the_page_needs_nothing_from_outside(client: httpx.AsyncClient) -> None:
    response = await client.get("/docs/metrics")
    page = Page(response.text)
    assert "//" not in response.text
    assert not page.tags & {"script", "link", "img", "iframe", "form"}
    assert "style" not in page.attributes
    inside = {address for address in page.addresses if address.startswith("#")}
    assert set(page.addresses) - inside == {"../docs"}
    assert {httpx.URL(address).fragment for address in inside} <= set(page.ids)
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


async def test_a_key_in_the_text_leads_to_its_row(client: httpx.AsyncClient) -> None:
    text = (await client.get("/docs/metrics")).text
    assert '<a href="#perf/rollout_wait_s"><code>perf/rollout_wait_s</code></a>' in text
    link = '<a href="#policy/logprob_gap_mean/%7Blag%7D"><code>policy/logprob_gap_mean/0</code></a>'
    assert link in text
    assert '<td><code id="policy/logprob_gap_mean/{lag}">' in text


async def test_the_rest_documentation_leads_to_it(client: httpx.AsyncClient) -> None:
    described = (await client.get("/openapi.json")).json()["info"]["description"]
    assert "(docs/metrics)" in described


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("sample/ and group/", "sample-and-group"),
        ("What does zero_std_frac say?", "what-does-zero_std_frac-say"),
        ("reward, reward/ and rewards/", "reward-reward-and-rewards"),
    ],
)
def test_headings_are_linked_to_as_on_github(title: str, name: str) -> None:
    assert anchor(title) == name
