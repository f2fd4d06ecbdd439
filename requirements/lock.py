"""Write the lock files of this folder: `python requirements/lock.py` (or `make lock`).

pip resolves each extra of pyproject.toml together with all others, so that one version of a package
serves every service; the lists are then installed with `--no-deps`. Three packages that vLLM
declares are left out: their wheels are built for another torch and break `import transformers`
("operator torchvision::nms does not exist"); nothing on the text path imports them.

`openenv.txt` is no service's: it is what an environment server of the tests needs beside `all.txt`,
for a folder of its own (`pip install --target`), since openenv needs mcp < 2 where vLLM needs
mcp >= 2. Its gradio is left out: servers show no page unless they are told to.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
SERVER = "openenv==0.10.*"
"""What environment servers of the tests are made with."""
NOT_SERVED = {"gradio"}
OTHERWISE = {"mcp"}
"""Packages that SERVER needs in another version than `all.txt` has."""
HEADER = "# Written by requirements/lock.py; install with `pip install --no-deps -r`.\n"


def normalise(name: str) -> str:
    """The form in which package names are compared (PEP 503)."""
    return name.lower().replace("_", "-").replace(".", "-")


def resolve(requirements: list[str]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Pinned versions by name, and what each package requires, for all `requirements` together."""
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
        subprocess.run([*command, "--report", report.name, *requirements], check=True)
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
    everything = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
    versions, needs = resolve(everything)
    lists = {name: [*project["dependencies"], *lines] for name, lines in extras.items()}
    lists["all"] = everything
    for name, roots in lists.items():
        write(name, closure(roots, versions, needs), versions)
    write_server(versions)


def write(name: str, packages: set[str], versions: dict[str, str]) -> None:
    """Write one list."""
    pins = sorted(f"{package}=={versions[package]}" for package in packages)
    (HERE / f"{name}.txt").write_text(HEADER + "\n".join(pins) + "\n")


def write_server(locked: dict[str, str]) -> None:
    """Write `openenv.txt`: what SERVER needs that is not `locked`, or is in another version."""
    versions, needs = resolve([SERVER])
    packages = closure([SERVER], versions, needs, left_out=NOT_SERVED)
    write("openenv", (packages - locked.keys()) | (packages & OTHERWISE), versions)


if __name__ == "__main__":
    main()
