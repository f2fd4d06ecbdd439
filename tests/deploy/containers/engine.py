"""podman and buildah with a storage of their own, so that the machine owner's is not touched.

Everything lies in one folder; files of running containers in RUN. Needs root and Debian's packages
(PACKAGES), nothing of which runs as a service. `why_not()` says what is missing.
"""

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUN = Path("/run/headrace-deploy")
"""Short, since sockets lie in it: their paths have a limit."""

NETWORK = "headrace"
"""Of all pods."""

PACKAGES = {
    "podman": "podman",
    "buildah": "buildah",
    "runc": "runc",
    "conmon": "conmon",
    "iptables": "iptables",
    "debootstrap": "debootstrap",
    "kubectl": "kubernetes-client",
    "gcc": "gcc",
    "/usr/lib/podman/netavark": "netavark",
    "/usr/lib/podman/aardvark-dns": "aardvark-dns",
    "/usr/bin/catatonit": "catatonit",
}
"""What is needed, and which Debian package has it."""

CONF = """\
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
[network]
network_backend = "netavark"
network_config_dir = "{folder}/networks"
"""
"""Limits that this process may give; no systemd is asked for anything."""


class ToolFailed(Exception):
    """A command ended otherwise than with 0."""


@dataclass(frozen=True)
class Engine:
    """Both tools over one folder."""

    folder: Path

    def prepare(self) -> None:
        """Make the folder and its configuration."""
        self.folder.mkdir(parents=True, exist_ok=True)
        RUN.mkdir(parents=True, exist_ok=True)
        self.conf.write_text(CONF.format(folder=self.folder))

    @property
    def conf(self) -> Path:
        """containers.conf."""
        return self.folder / "containers.conf"

    @property
    def environment(self) -> dict[str, str]:
        """For both tools."""
        return {**os.environ, "CONTAINERS_CONF": str(self.conf)}

    def _storage(self) -> list[str]:
        root, run = self.folder / "storage", RUN / "storage"
        return ["--root", str(root), "--runroot", str(run), "--storage-driver", "overlay"]

    def podman(self, *arguments: str, given: str | None = None) -> str:
        """Run podman; what it printed. ToolFailed."""
        own = [*self._storage(), "--tmpdir", str(RUN / "libpod")]
        return self._run(["podman", *own, *arguments], given)

    def buildah(self, *arguments: str, log: Path) -> None:
        """Run buildah, what it prints to `log`. ToolFailed, with the log's end."""
        with log.open("a") as out:
            command = ["buildah", *self._storage(), *arguments]
            done = subprocess.run(command, stdout=out, stderr=out, env=self.environment)
        if done.returncode != 0:
            tail = "\n".join(log.read_text().splitlines()[-20:])
            raise ToolFailed(f"buildah {' '.join(arguments)}\n{tail}\nThe whole log: {log}")

    async def asked(self, *arguments: str, given: str | None = None) -> str:
        """`podman()` on a thread."""
        return await asyncio.to_thread(self.podman, *arguments, given=given)

    async def inspected(self, container: str) -> dict[str, Any]:
        """What podman knows of a container. ToolFailed when it is gone."""
        (found,) = json.loads(await self.asked("container", "inspect", container))
        return dict(found)

    def _run(self, command: list[str], given: str | None) -> str:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, env=self.environment
        )
        if done.returncode != 0:
            raise ToolFailed(f"{' '.join(command)}: status {done.returncode}\n{done.stderr}")
        return done.stdout


def missing(needed: Mapping[str, str] = PACKAGES) -> list[str]:
    """Debian packages of PACKAGES that are not installed."""
    return sorted(package for program, package in needed.items() if not shutil.which(program))


def why_not(engine: Engine) -> str | None:
    """Why podman does not work here, once what it needs is installed; None when it does. Makes the
    network."""
    if os.geteuid() != 0:
        return "needs root: containers with a network and limits of their own"
    if absent := missing():
        if not shutil.which("apt-get"):
            return f"not installed, and no apt-get to install them: {' '.join(absent)}"
        if problem := _install(absent):
            return problem
    engine.prepare()
    try:
        engine.podman("info")
        if NETWORK not in engine.podman("network", "ls", "--format", "{{.Name}}").split():
            engine.podman("network", "create", NETWORK)
    except ToolFailed as error:
        return f"podman does not work here: {error}"
    return None


def _install(packages: list[str]) -> str | None:
    print(f"installing {' '.join(packages)}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *packages],
    ):
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode != 0:
            return f"{' '.join(command)}: {done.stderr.strip()}"
    return None
