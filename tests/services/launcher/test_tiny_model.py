import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.common.errors import UserError
from services.launcher import tiny_model, tiny_training

PAIRS = [
    (f"{first} + {second} =", str(first + second)) for first in range(4) for second in range(3)
]
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
TOKENIZER = tiny_training.build_tokenizer()


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
    tasks = {"arithmetic": tiny_model.Task("chain_sum", SUMS, num_questions=200, target=0.0)}
    monkeypatch.setattr(tiny_model, "TASKS", tasks)
    monkeypatch.setattr(tiny_training, "MEASURE_EVERY_STEPS", 1)


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@given(st.text(st.sampled_from(tiny_training.ALPHABET)))
def test_the_tokenizer_gives_back_what_it_was_given(text: str) -> None:
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(token_ids) == text
    if not any(token in text for token in TOKENIZER.all_special_tokens):
        assert len(token_ids) == len(text)


def test_the_chat_template_spends_one_token_on_a_role_and_one_on_its_end() -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "1 + 2\n"}]
    text = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<system>a<end><user>1 + 2\n<end><assistant>"
    assert len(TOKENIZER.encode(text, add_special_tokens=False)) == 3 + 8 + 1
    with pytest.raises(Exception, match="unknown role: robot"):
        TOKENIZER.apply_chat_template([{"role": "robot", "content": ""}], tokenize=False)


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
        ("tiny:poetry", r"model.path: no tiny model 'poetry'; there is arithmetic"),
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


def small_model() -> tuple[Any, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = tiny_training.build_model(TOKENIZER, tied=False)
    return model, *tiny_training.encode(TOKENIZER, PAIRS)


def test_accuracy_is_that_of_real_greedy_decoding_and_sampling() -> None:
    model, token_ids, labels = small_model()
    accuracy = tiny_training.warm_start(model, token_ids, labels, target=0.3, seed=0)
    assert accuracy.greedy >= 0.3
    right, probability = 0, 0.0
    for question, answer in PAIRS:
        messages = [{"role": "user", "content": question}]
        prompt = TOKENIZER.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        wanted = TOKENIZER.encode(answer + "<end>", add_special_tokens=False)
        said = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=len(wanted),
        )[0, prompt.shape[1] :].tolist()
        right += said == wanted
        whole = torch.cat([prompt, torch.tensor([wanted])], dim=1)
        with torch.no_grad():
            logprobs = model(input_ids=whole, use_cache=False).logits[0].log_softmax(-1)
        places = range(prompt.shape[1] - 1, whole.shape[1] - 1)
        probability += logprobs[list(places), wanted].sum().exp().item()
    assert accuracy.greedy == pytest.approx(right / len(PAIRS))
    assert accuracy.sampled == pytest.approx(probability / len(PAIRS), rel=1e-4)


def test_the_shared_prefix_changes_neither_the_loss_nor_the_gradient() -> None:
    model, token_ids, labels = small_model()

    def gradients(logits: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=tiny_training.IGNORED
        )
        return list(torch.autograd.grad(loss, list(model.parameters())))

    shared = gradients(*tiny_training.forward(model, token_ids, labels))
    plain = gradients(model(input_ids=token_ids, use_cache=False).logits[:, :-1], labels[:, 1:])
    for one, other in zip(shared, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_a_warm_start_that_gets_nowhere_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_training, "MAX_STEPS", 5)
    model, token_ids, labels = small_model()
    with pytest.raises(RuntimeError, match=r"not 1\.0, in 5 steps"):
        tiny_training.warm_start(model, token_ids, labels, target=1.0, seed=0)
