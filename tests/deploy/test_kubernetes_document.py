"""docs/kubernetes.md: symptoms are what services say, manifests are those that are tested."""

import re

import pytest
import yaml

from services.common import config
from tests.deploy.manifests import K8S, ROOT

TEXT = (ROOT / "docs" / "kubernetes.md").read_text()
SAID = (
    *(
        "waiting for the trainer at",
        "waiting for the queue server at",
        "catching up with the policy",
    ),
    *("the queue server refuses the credentials", "queue server unavailable", "OOM", "MISCONF"),
    *("the trainer refuses this token", "a bearer token is needed", "has another recipe"),
    *("no such file", "there is no module", "generator.kv_cache_bytes: give it on CPUs"),
    *("fetch failed", "load failed", "replaced by a newer trainer", "CHECKPOINT FAILED"),
    *("metrics wait for the aggregator", "importing vLLM", "complete"),
)
"""Symptoms of the table that services say; a reader finds the page by them."""


def sources() -> str:
    """Of the services, with texts that go over several lines put together."""
    text = "\n".join(file.read_text() for file in sorted((ROOT / "services").rglob("*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_symptoms_are_what_services_say() -> None:
    source = sources()
    for symptom in SAID:
        assert symptom in TEXT, symptom
        assert symptom in source, symptom


def test_links_and_paths_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([\w./-]+\.md)(?:#[\w-]+)?\)", TEXT):
        assert (ROOT / "docs" / target).is_file(), target
    for path in re.findall(r"(?:deploy/k8s|tests/deploy)/[\w./-]*\w", TEXT):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`overlays/[\w./-]*\w", TEXT):
        assert (K8S / path.strip("`")).exists(), path


def test_every_component_is_listed() -> None:
    for component in (K8S / "components").iterdir():
        assert re.search(rf"^\| `{component.name}` \|", TEXT, re.MULTILINE), component.name


def blocks() -> list[str]:
    """The manifests in the text, without the indentation of lists."""
    found = re.findall(r"^( *)```yaml\n(.*?)^\1```", TEXT, re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) for indent, block in found]


def test_manifests_are_those_that_are_tested() -> None:
    tested = (ROOT / "tests/deploy/overlays/external/model.yaml").read_text()
    assert tested in blocks()
    assert len(blocks()) >= 4
    for block in blocks():
        assert yaml.safe_load(block)


@pytest.mark.parametrize("key", sorted(set(re.findall(r"HEADRACE_\w+__\w+[a-z]*", TEXT))))
def test_overrides_are_keys_of_a_recipe(key: str) -> None:
    if key == "HEADRACE_SECTION__KEY":
        return
    section, name = key.removeprefix("HEADRACE_").lower().split("__")
    assert name in config.Recipe.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
