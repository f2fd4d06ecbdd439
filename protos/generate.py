"""Generate protos/python from protos/headrace: `make protos`, or with --check compare without
writing.

The code comes from grpc_tools' protoc and mypy-protobuf, both from the lock file; buf lints.
"""

import filecmp
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def generate(target: Path) -> None:
    """Write `headrace/v1/*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` under `target`; raises when
    protoc fails."""
    files = sorted(str(path.relative_to(HERE)) for path in HERE.glob("headrace/v1/*.proto"))
    flags = [f"--{kind}_out={target}" for kind in ("python", "mypy", "grpc_python")]
    flags[1] = f"--mypy_out=quiet:{target}"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *flags, *files]
    # mypy-protobuf's plugin lies beside the interpreter, which may not be on the PATH.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    subprocess.run(command, check=True, cwd=HERE, env=os.environ | {"PATH": path})


def files_of(folder: Path) -> set[str]:
    """Names of the generated files, relative to `folder`."""
    return {
        str(p.relative_to(folder)) for p in folder.rglob("*_pb2*") if "__pycache__" not in p.parts
    }


def main() -> None:
    """Write the files, or exit 1 with the names of those that are not current."""
    current = HERE / "python"
    if "--check" not in sys.argv:
        current.mkdir(exist_ok=True)
        for name in files_of(current):
            (current / name).unlink()
        generate(current)
        return
    with tempfile.TemporaryDirectory() as name:
        fresh = Path(name)
        generate(fresh)
        names = files_of(fresh) | files_of(current)
        stale = sorted(n for n in names if n not in filecmp.cmpfiles(fresh, current, [n], False)[0])
    if stale:
        sys.exit(f"protos/python is not current (run `make protos`): {', '.join(stale)}")


if __name__ == "__main__":
    main()
