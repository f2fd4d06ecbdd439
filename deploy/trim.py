"""Makes an installed environment smaller and checks its torch: `python3 trim.py PREFIX [options]`.

For images, where nothing is compiled or tested. Removed are packages' tests, headers and other
sources for compilers, type stubs, and source maps; one library under several names becomes one
file and links. `--light` also removes what UNUSED names (55 MB), and strips symbols from libraries
(needs binutils). `--keep-sources` leaves headers, for images that compile kernels while they run.

`--torch cpu` or `cuda` refuses a torch that was built for the other. Exit status 1, and a line
that says what to do, when that is so.
"""

import argparse
import filecmp
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = {".a", ".cc", ".cu", ".cuh", ".h", ".hpp", ".map", ".pxd", ".pxi", ".pyi", ".pyx"}
"""Of no use without a compiler, a type checker or a browser's debugger."""

UNUSED = (
    # Clients of Arrow Flight and of storage by network; pyarrow imports without them.
    *(f"pyarrow/{name}" for name in ("libarrow_flight*", "libarrow_python_flight*", "_flight.*")),
    *(f"pyarrow/{name}" for name in ("libarrow_s3*", "_s3fs.*", "_gcsfs.*", "_azurefs.*")),
    # Databases other than the aggregator's two.
    *(f"sqlalchemy/dialects/{name}" for name in ("mssql", "mysql", "oracle")),
    # For building and testing other packages; nothing imports them by itself.
    *("numpy/distutils", "numpy/f2py", "numpy/_core/_simd.*", "sqlalchemy/testing"),
    "swagger_ui_bundle/vendor/*/*-es-bundle*",
)
"""What no service uses of packages that are big, as patterns."""

PATCHED = ".libs"
"""Folders that end so hold libraries whose headers a tool has rewritten: strip may break them."""


def remove_sources(packages: Path) -> None:
    """Remove files that SOURCES names."""
    for path in packages.rglob("*"):
        if path.suffix in SOURCES and path.is_file():
            path.unlink()


def remove_tests(packages: Path) -> None:
    """Remove folders called `tests`: packages' own tests."""
    for path in sorted(packages.rglob("tests")):
        if path.is_dir():
            shutil.rmtree(path)


def remove_unused(packages: Path) -> None:
    """Remove what UNUSED names."""
    for path in (path for pattern in UNUSED for path in packages.glob(pattern)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def libraries(packages: Path) -> list[Path]:
    """All shared libraries, each file once."""
    found = (path for path in packages.rglob("*.so*") if path.is_file() and not path.is_symlink())
    return sorted(path for path in found if path.read_bytes()[:4] == b"\x7fELF")


def link_copies(packages: Path) -> None:
    """Replace copies of one library beside each other by links: wheels cannot hold links."""
    kept: dict[tuple[Path, int], list[Path]] = {}
    for path in libraries(packages):
        others = kept.setdefault((path.parent, path.stat().st_size), [])
        same = next((other for other in others if filecmp.cmp(other, path, shallow=False)), None)
        if same is None:
            others.append(path)
        else:
            path.unlink()
            path.symlink_to(same.name)


def strip_symbols(packages: Path) -> None:
    """Take symbols that no linker needs out of libraries."""
    for path in libraries(packages):
        if not path.parent.name.endswith(PATCHED):
            subprocess.run(["strip", "--strip-unneeded", str(path)], check=True)


def wrong_torch(packages: Path, wanted: str) -> str | None:
    """What is wrong with the torch in `packages`, which shall be built for "cpu" or "cuda"."""
    version = runpy.run_path(str(packages / "torch" / "version.py"))
    found = "cpu" if version["cuda"] is None else "cuda"
    if found == wanted:
        return None
    if wanted == "cpu":
        return (
            f"torch {version['__version__']} is the build for CUDA {version['cuda']}, without its "
            "libraries. Give an index that has torch's build for CPUs: "
            "--build-arg PIP_EXTRA_INDEX_URL=..., or build the target for GPUs."
        )
    return (
        f"torch {version['__version__']} is the build for CPUs. Leave the index with such builds "
        "out (PIP_EXTRA_INDEX_URL), or build the target for CPUs."
    )


def main() -> None:
    """Parse, check, trim."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prefix", type=Path)
    parser.add_argument("--torch", choices=("cpu", "cuda"))
    parser.add_argument("--light", action="store_true")
    parser.add_argument("--keep-sources", action="store_true")
    given = parser.parse_args()
    (packages,) = given.prefix.glob("lib/python3*/site-packages")
    if given.torch and (wrong := wrong_torch(packages, given.torch)):
        sys.exit(wrong)
    remove_tests(packages)
    if not given.keep_sources:
        remove_sources(packages)
    if given.light:
        remove_unused(packages)
        strip_symbols(packages)
    link_copies(packages)


if __name__ == "__main__":
    main()
