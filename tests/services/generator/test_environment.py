"""What is set before vLLM is imported."""

from pathlib import Path

import pytest

from services.generator import environment


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A driver's device file, not there yet."""
    path = tmp_path / "gpu"
    monkeypatch.setattr(environment, "GPU_DRIVERS", (path,))
    return path


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    path = tmp_path / "bin" / environment.CXX
    path.parent.mkdir()
    path.touch(0o755)
    return path


def prepared(enforce_eager: bool, **environ: str) -> str | None:
    environment.prepare(enforce_eager=enforce_eager, environ=environ)
    return environ.get("TORCHDYNAMO_DISABLE")


def test_an_eager_engine_on_cpus_compiles_nothing(gpu: Path, compiler: Path) -> None:
    assert prepared(True, PATH=str(compiler.parent)) == "1"


def test_another_engine_compiles_where_a_compiler_is(gpu: Path, compiler: Path) -> None:
    assert prepared(False, PATH=str(compiler.parent)) is None
    assert prepared(False, PATH="", CXX=str(compiler)) is None


def test_without_a_compiler_nothing_is_compiled(gpu: Path, compiler: Path) -> None:
    assert prepared(False, PATH=str(gpu.parent)) == "1"
    # torch takes $CXX at its word, whatever else is there.
    assert prepared(False, PATH=str(compiler.parent), CXX="no-such-compiler") == "1"


def test_gpus_and_what_the_user_set_are_left_alone(gpu: Path) -> None:
    assert prepared(True, PATH="", TORCHDYNAMO_DISABLE="0") == "0"
    gpu.touch()
    assert prepared(True, PATH="") is None
