import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.common.errors import UserError
from services.launcher import tiny_model, tiny_training


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of torch wait for each other in busy loops: on a shared machine that is slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making ends at the first measurement: these tests look at folders, not at learning."""
    tasks = {name: replace(task, target=0.0) for name, task in tiny_model.TASKS.items()}
    monkeypatch.setattr(tiny_model, "TASKS", tasks)
    monkeypatch.setattr(tiny_training, "MEASURE_EVERY_STEPS", 1)


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("tied", [False, True])
def test_a_made_folder_is_a_model_that_transformers_loads(
    tmp_path: Path, quick: None, tied: bool
) -> None:
    said: list[tuple[float, str]] = []
    folder = tiny_model.make(
        tmp_path / "model", tied=tied, progress=lambda share, text: said.append((share, text))
    )
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    end = tokenizer.convert_tokens_to_ids("<end>")
    assert model.dtype == torch.float32
    assert model.config.tie_word_embeddings is tied
    assert model.config.max_position_embeddings == 2048
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [end]
    assert tokenizer.eos_token_id == end
    text = "State the answer:\n 3  -  4 ="
    assert tokenizer.decode(tokenizer.encode(text)) == text
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == f"<user>{text}<end><assistant>"
    assert said[0][0] == 0.0
    assert "of answers right" in said[-1][1]


def test_the_same_arguments_give_the_same_weights(tmp_path: Path, quick: None) -> None:
    torch.manual_seed(5)
    one, two, other = (
        tiny_model.make(tmp_path / name, seed=seed)
        for name, seed in (("one", 0), ("two", 0), ("other", 1))
    )
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.rand(1) == drawn, "making a model must not use up the caller's random numbers"
    assert weights(one) == weights(two) != weights(other)


def test_a_complete_folder_is_used_again_and_another_is_never_overwritten(
    tmp_path: Path, quick: None
) -> None:
    folder = tiny_model.make(tmp_path / "model")
    written = (folder / "config.json").stat().st_mtime_ns
    assert tiny_model.make(folder) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    with pytest.raises(UserError, match="holds something else"):
        tiny_model.make(folder, seed=1)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="holds something else"):
        tiny_model.make(folder)
    with pytest.raises(UserError, match="cannot be written"):
        tiny_model.make(folder / "config.json" / "below")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_making_that_breaks_leaves_nothing(tmp_path: Path, quick: None) -> None:
    def stop(share: float, text: str) -> None:
        if "step" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny_model.make(tmp_path / "model", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_one_that_was_made_meanwhile_is_used(tmp_path: Path, quick: None) -> None:
    def overtake(share: float, text: str) -> None:
        if not share:
            tiny_model.resolve("tiny:arithmetic", cache=tmp_path)

    folder = tiny_model.resolve("tiny:arithmetic", cache=tmp_path, progress=overtake)
    assert list(tmp_path.iterdir()) == [folder]
    assert (folder / "model.safetensors").is_file()


def test_names_become_folders_of_the_users_cache(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tiny_model.resolve("tiny:arithmetic-tied")
    assert folder.parent == tmp_path / "headrace"
    assert folder.name.startswith("tiny-arithmetic-tied-")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert tiny_model.resolve(str(folder)) == folder
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert tiny_model.default_cache() == tmp_path / "home" / ".cache" / "headrace"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "tiny:poetry",
            "model.path: no tiny model 'poetry'; there is arithmetic, calculator, guess",
        ),
        ("no/such/folder", "model.path: no such folder: no/such/folder"),
        (".", r"model.path: \. has no config.json"),
    ],
)
def test_models_that_are_not_there(
    path: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        tiny_model.resolve(path, cache=tmp_path)
    with pytest.raises(UserError, match="task: no tiny model"):
        tiny_model.make(tmp_path / "model", task="poetry")
