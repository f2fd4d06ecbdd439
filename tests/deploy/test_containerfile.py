"""The Containerfile: a target a service, its own lock file each, none as root or in a shell."""

import json
import re

import pytest

from tests.deploy.manifests import ROOT, SERVICES, containers, render

TEXT = (ROOT / "deploy" / "Containerfile").read_text().replace("\\\n", " ")


def stages() -> dict[str, list[str]]:
    """Instructions by stage, without comments."""
    found: dict[str, list[str]] = {}
    for line in TEXT.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        start = re.fullmatch(r"FROM (\S+) AS (\S+)", line)
        if start is not None:
            found[start[2]] = [line]
        elif found:
            next(reversed(found.values())).append(line)
    return found


@pytest.mark.parametrize("service", SERVICES)
def test_a_target_starts_its_service_itself(service: str) -> None:
    final = stages()[service]
    (entrypoint,) = (line for line in final if line.startswith("ENTRYPOINT"))
    # The exec form: a shell in between would keep SIGTERM from the service.
    assert json.loads(entrypoint.removeprefix("ENTRYPOINT ")) == ["headrace", service]
    (user,) = (line for line in final if line.startswith("USER"))
    assert re.fullmatch(r"USER [1-9]\d*:[1-9]\d*", user)


@pytest.mark.parametrize("service", SERVICES)
def test_a_target_installs_its_own_lock_file_and_nothing_else(service: str) -> None:
    assert f"COPY --from=build-{service} /opt/headrace /opt/headrace" in stages()[service]
    build = stages()[f"build-{service}"]
    assert f"COPY requirements/{service}.txt ." in build
    installs = [line for line in build if " install " in line]
    assert len(installs) == 2
    assert all("--no-deps" in line for line in installs)
    assert f"-r {service}.txt" in installs[0]


@pytest.mark.parametrize("service", ["scorer", "aggregator"])
def test_light_images_have_no_torch(service: str) -> None:
    lock = (ROOT / "requirements" / f"{service}.txt").read_text()
    assert not re.search(r"^(torch|vllm|transformers|triton|nvidia)", lock, re.MULTILINE)


def test_the_base_and_the_index_are_arguments() -> None:
    assert re.search(r"^ARG BASE_IMAGE=python:3\.11-slim", TEXT, re.MULTILINE)
    assert "ARG PIP_INDEX_URL=" in stages()["build"]
    assert "://" not in TEXT, "no host is named"
    assert all(line[0].startswith(("FROM ${BASE_IMAGE}", "FROM build", "FROM runtime"))
               for line in stages().values())  # fmt: skip


def test_the_users_of_image_and_manifest_agree() -> None:
    (made,) = re.findall(r"useradd .*?--uid (\d+)", TEXT)
    for container in containers(render(ROOT / "deploy" / "k8s" / "overlays" / "cpu")):
        assert container.pod["securityContext"]["runAsUser"] == int(made), str(container)


def test_the_context_holds_what_is_copied() -> None:
    kept = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    for line in TEXT.splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert any(
                    source == pattern or re.fullmatch(pattern.replace("*", "[^/]*"), source)
                    for pattern in kept
                ), f"{source} is not in .dockerignore"
