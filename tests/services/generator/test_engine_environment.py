"""What workers find in their environment, and when torch.compile is turned off."""

from pathlib import Path

import pytest

from services.generator import engine_environment
from services.generator.engine_environment import SMALL_VOCABULARY


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A driver's device file, not there yet."""
    path = tmp_path / "gpu"
    monkeypatch.setattr(engine_environment, "GPU_DRIVERS", (path,))
    return path


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    path = tmp_path / "bin" / engine_environment.CXX
    path.parent.mkdir()
    path.touch(0o755)
    return path


def prepared(vocab_size: int | None, *, enforce_eager: bool = True, **environ: str) -> str | None:
    engine_environment.prepare(enforce_eager=enforce_eager, vocab_size=vocab_size, environ=environ)
    return environ.get("TORCHDYNAMO_DISABLE")


def test_it_is_off_where_it_is_not_worth_its_time(gpu: Path, compiler: Path) -> None:
    path = str(compiler.parent)
    assert prepared(SMALL_VOCABULARY, PATH=path) == "1"
    assert prepared(SMALL_VOCABULARY + 1, PATH=path) is None
    assert prepared(None, PATH=path) is None
    assert prepared(100, enforce_eager=False, PATH=path) is None


def test_it_is_off_where_no_compiler_is(gpu: Path, compiler: Path) -> None:
    assert prepared(150_000, PATH=str(gpu.parent)) == "1"
    # torch takes $CXX at its word, whatever else is there.
    assert prepared(150_000, PATH=str(compiler.parent), CXX="no-such-compiler") == "1"
    assert prepared(150_000, PATH=str(gpu.parent), CXX=str(compiler)) is None


def test_gpus_and_what_the_user_set_are_left_alone(gpu: Path) -> None:
    assert prepared(100, PATH="", TORCHDYNAMO_DISABLE="0") == "0"
    gpu.touch()
    assert prepared(100, PATH="") is None


@pytest.mark.parametrize(
    ("name", "value", "own"),
    [
        ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1", "glibc.malloc.tcache_count=0"),
        ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128", "4096"),
    ],
)
def test_the_memory_of_workers_on_cpus(gpu: Path, name: str, value: str, own: str) -> None:
    def found(**environ: str) -> str | None:
        engine_environment.prepare(enforce_eager=True, vocab_size=100, environ=environ)
        return environ.get(name)

    assert found() == value
    assert found(TORCHDYNAMO_DISABLE="1") == value
    assert found(**{name: own}) == own, "what the user set"
    gpu.touch()
    assert found() is None


def test_the_vocabulary_is_that_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 103}')
    assert engine_environment.vocab_size(tmp_path) == 103
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 103}}')
    assert engine_environment.vocab_size(tmp_path) is None
