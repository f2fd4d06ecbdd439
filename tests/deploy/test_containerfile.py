"""The Containerfile: a target a service, its own lock file each, none as root or in a shell. What
images weigh is measured on real ones, by tests.deploy.containers."""

import json
import re
import tomllib

import pytest

from tests.deploy.manifests import ROOT, SERVICES, containers, render

TARGETS = {
    **{service: service for service in SERVICES},
    "generator-gpu": "generator",
    "trainer-gpu": "trainer",
}
"""Services by target."""

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


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_starts_its_service_itself(target: str) -> None:
    final = stages()[target]
    (entrypoint,) = (line for line in final if line.startswith("ENTRYPOINT"))
    # The exec form: a shell in between would keep SIGTERM from the service.
    assert json.loads(entrypoint.removeprefix("ENTRYPOINT ")) == ["headrace", TARGETS[target]]
    (user,) = (line for line in final if line.startswith("USER"))
    assert re.fullmatch(r"USER [1-9]\d*:[1-9]\d*", user)
    assert final[-2:] == [user, entrypoint]


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_installs_its_own_lock_file_and_nothing_else(target: str) -> None:
    assert f"COPY --from=build-{target} /opt/headrace /opt/headrace" in stages()[target]
    build = stages()[f"build-{target}"]
    assert f"COPY requirements/{target}.txt ." in build
    (install,) = (line for line in build if " install " in line)
    assert "--no-deps" in install
    assert f"-r {target}.txt" in install


@pytest.mark.parametrize("target", TARGETS)
def test_our_code_is_in_a_target_after_its_packages(target: str) -> None:
    code = "COPY --from=code /opt/headrace /opt/headrace"
    lines = [*stages()[f"build-{target}"], *stages()[target]]
    (packages,) = (n for n, line in enumerate(lines) if " install " in line and " -r " in line)
    assert lines.index(code) > packages
    assert lines.count(code) == 1


@pytest.mark.parametrize("target", TARGETS)
def test_torch_is_the_build_that_the_target_is_for(target: str) -> None:
    lock = (ROOT / "requirements" / f"{target}.txt").read_text()
    (trim,) = (line for line in stages()[f"build-{target}"] if "trim.py /opt" in line)
    wanted = re.search(r"--torch (\w+)", trim)
    if not re.search(r"^torch==", lock, re.MULTILINE):
        assert wanted is None
        return
    assert wanted is not None
    cuda = re.search(r"^nvidia-", lock, re.MULTILINE) is not None
    assert wanted[1] == ("cuda" if cuda else "cpu")
    assert target.endswith("-gpu") == cuda


def test_nothing_that_builds_is_in_what_runs() -> None:
    """But for GPUs, where kernels are compiled while they run."""
    held = stages()
    for target in ("runtime", *SERVICES):
        for line in held[target]:
            installs = line.partition(" install ")[2]
            assert not re.search(r"\b(gcc|g\+\+|binutils|\w+-dev)\b", installs), target
    # The base's own; on real images the deploy test looks.
    (removed,) = (line for line in held["runtime"] if line.startswith("RUN rm -rf"))
    assert "'pip'" in removed


@pytest.mark.parametrize("service", ["scorer", "aggregator"])
def test_light_images_have_no_torch(service: str) -> None:
    lock = (ROOT / "requirements" / f"{service}.txt").read_text()
    assert not re.search(r"^(torch|vllm|transformers|triton|nvidia)", lock, re.MULTILINE)


def test_the_base_and_the_index_are_arguments() -> None:
    assert re.search(r"^ARG BASE_IMAGE=python:3\.11-slim", TEXT, re.MULTILINE)
    for argument in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        assert f"ARG {argument}=" in stages()["build"]
    assert "://" not in TEXT, "no host is named"
    assert all(line[0].startswith(("FROM ${BASE_IMAGE}", "FROM build", "FROM runtime"))
               for line in stages().values())  # fmt: skip


def test_images_say_what_they_are() -> None:
    (labels,) = (line for line in stages()["runtime"] if line.startswith("LABEL"))
    found = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', labels))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert found["version"] == project["version"]
    assert found["licenses"] == project["license"]
    assert (found["revision"], found["source"]) == ("${REVISION}", "${SOURCE}")
    assert found["title"]
    assert found["description"]


def test_the_users_of_image_and_manifest_agree() -> None:
    (made,) = re.findall(r"useradd .*?--uid (\d+) --gid (\d+)", TEXT)
    for container in containers(render(ROOT / "deploy" / "k8s" / "overlays" / "cpu")):
        context = container.pod["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"]) == tuple(map(int, made))


def test_the_context_holds_what_is_copied() -> None:
    kept = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    for line in TEXT.splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert any(
                    source == pattern or re.fullmatch(pattern.replace("*", "[^/]*"), source)
                    for pattern in kept
                ), f"{source} is not in .dockerignore"
