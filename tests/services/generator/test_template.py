"""Chat templates and end tokens, with a real tokenizer."""

import json
from pathlib import Path

import pytest

from services.common.errors import UserError
from services.generator.template import ChatTemplate
from services.launcher import tiny_tokenizer

TOKENIZER = tiny_tokenizer.build_tokenizer()
PAD, END = TOKENIZER.pad_token_id, TOKENIZER.eos_token_id
USER, ASSISTANT = TOKENIZER.convert_tokens_to_ids(["<user>", "<assistant>"])


def folder_of(
    tmp_path: Path,
    *,
    eos: str | None = "<end>",
    template: str | None = tiny_tokenizer.CHAT_TEMPLATE,
    listed: int | list[int] | None = None,
) -> Path:
    tokenizer = tiny_tokenizer.build_tokenizer()
    tokenizer.eos_token = eos
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    if listed is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    return tmp_path


def test_messages_become_prompt_ids_and_ids_become_text(tmp_path: Path) -> None:
    template = ChatTemplate(folder_of(tmp_path))
    hi = TOKENIZER.convert_tokens_to_ids(["h", "i"])
    assert template.render([{"role": "user", "content": "hi"}]) == [USER, *hi, END, ASSISTANT]
    assert template.text([*hi, END]) == "hi"


def test_end_tokens_come_from_all_three_places(tmp_path: Path) -> None:
    """generation_config lists <unk>, the tokenizer's own is <pad>, the template ends with <end>."""
    folder = folder_of(tmp_path, eos="<pad>", listed=[TOKENIZER.unk_token_id])
    assert ChatTemplate(folder).end_tokens == tuple(sorted((PAD, TOKENIZER.unk_token_id, END)))


def test_one_listed_end_token_is_a_number(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, eos=None, listed=USER)
    assert ChatTemplate(folder).end_tokens == tuple(sorted((USER, END)))


def test_the_end_of_turn_is_found_where_the_tokenizer_names_another(tmp_path: Path) -> None:
    assert ChatTemplate(folder_of(tmp_path, eos="<pad>")).end_tokens == tuple(sorted((PAD, END)))


def test_a_folder_without_any_end_token_is_refused(tmp_path: Path) -> None:
    bare = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(UserError, match="names no token that ends a turn"):
        ChatTemplate(folder_of(tmp_path, eos=None, template=bare))


def test_a_tokenizer_without_chat_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no chat template"):
        ChatTemplate(folder_of(tmp_path, template=None))


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no usable tokenizer"):
        ChatTemplate(tmp_path)
