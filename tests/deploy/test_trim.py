"""Environments of images are made smaller, and nothing that is needed goes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.manifests import ROOT

SCRIPT = ROOT / "deploy" / "trim.py"


def files(folder: Path, **contents: bytes | str) -> None:
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    made = tmp_path / "lib" / "python3.11" / "site-packages"
    files(
        made,
        **{
            "numpy/__init__.py": "",
            "numpy/testing/__init__.py": "",
            "numpy/tests/test_numpy.py": "",
            "numpy/_core/include/numpy/arrayobject.h": "",
            "numpy/_core/_simd.cpython-311-x86_64-linux-gnu.so": "",
            "numpy/__init__.pyi": "",
            "pyarrow/lib.cpython-311-x86_64-linux-gnu.so": "",
            "pyarrow/libarrow_flight.so.2600": "",
            "pyarrow/_flight.cpython-311-x86_64-linux-gnu.so": "",
            "pyarrow/fs.py": "",
            "swagger/bundle.js": "",
            "swagger/bundle.js.map": "",
        },
    )
    return made


def trim(packages: Path, *options: str) -> subprocess.CompletedProcess[str]:
    prefix = packages.parents[2]
    return subprocess.run(
        [sys.executable, SCRIPT, prefix, *options], capture_output=True, text=True
    )


def held(packages: Path) -> set[str]:
    return {str(path.relative_to(packages)) for path in packages.rglob("*") if path.is_file()}


LEFT = {
    "numpy/__init__.py",
    "numpy/testing/__init__.py",
    "pyarrow/lib.cpython-311-x86_64-linux-gnu.so",
    "pyarrow/fs.py",
    "swagger/bundle.js",
}


def test_tests_headers_stubs_and_maps_go(packages: Path) -> None:
    before = held(packages)
    assert trim(packages).returncode == 0
    assert before - held(packages) == {
        "numpy/tests/test_numpy.py",
        "numpy/_core/include/numpy/arrayobject.h",
        "numpy/__init__.pyi",
        "swagger/bundle.js.map",
    }


def test_headers_stay_for_who_compiles(packages: Path) -> None:
    assert trim(packages, "--keep-sources").returncode == 0
    assert "numpy/_core/include/numpy/arrayobject.h" in held(packages)
    assert "numpy/tests/test_numpy.py" not in held(packages)


def test_light_images_talk_to_no_other_servers(packages: Path) -> None:
    assert trim(packages, "--light").returncode == 0
    assert held(packages) == LEFT


def test_one_library_under_three_names_is_one_file(packages: Path) -> None:
    names = ("libarrow_python.so", "libarrow_python.so.2600", "libarrow_python.so.2600.1.0")
    library = b"\x7fELF" + b"x" * 100
    files(packages / "pyarrow", **dict.fromkeys(names, library))
    files(packages / "pyarrow", **{"libother.so": b"\x7fELF" + b"y" * 100})
    assert trim(packages).returncode == 0
    paths = [packages / "pyarrow" / name for name in names]
    assert sum(not path.is_symlink() for path in paths) == 1
    assert all(path.read_bytes() == library for path in paths)
    assert not (packages / "pyarrow" / "libother.so").is_symlink()


@pytest.mark.skipif(shutil.which("strip") is None, reason="needs binutils")
def test_a_library_still_loads_without_its_symbols(packages: Path) -> None:
    import _ctypes

    source = Path(_ctypes.__file__)
    files(packages / "one", **{source.name: source.read_bytes()})
    files(packages / "one.libs", **{source.name: source.read_bytes()})
    assert trim(packages, "--light").returncode == 0
    assert (packages / "one.libs" / source.name).read_bytes() == source.read_bytes()
    stripped = packages / "one" / source.name
    assert stripped.stat().st_size <= source.stat().st_size
    load = f"import importlib.machinery as m; m.ExtensionFileLoader('_ctypes', {str(stripped)!r})"
    code = f"{load}.create_module(m.ModuleSpec('_ctypes', None, origin={str(stripped)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("found", "wanted", "said"),
    [
        ("None", "cpu", None),
        ("'13.0'", "cuda", None),
        ("'13.0'", "cpu", "torch 2.13.0 is the build for CUDA 13.0, without its libraries"),
        ("None", "cuda", "torch 2.13.0 is the build for CPUs"),
    ],
)
def test_a_torch_of_the_other_kind_is_refused(
    packages: Path, found: str, wanted: str, said: str | None
) -> None:
    version = f"__version__ = '2.13.0'\ncuda = {found}\n"
    files(packages, **{"torch/version.py": version})
    done = trim(packages, "--torch", wanted)
    assert (done.returncode != 0) == (said is not None)
    if said is not None:
        assert said in done.stderr
        assert "PIP_EXTRA_INDEX_URL" in done.stderr
