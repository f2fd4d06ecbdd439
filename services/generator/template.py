"""The model's chat template and tokenizer: messages to prompt ids, sampled ids to text, and the
tokens that end a turn."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from services.common.errors import UserError
from services.generator.types import Message, TemplateFailed


class ChatTemplate:
    """Rendering for one model folder. Raises UserError when the folder has no tokenizer or no
    chat template."""

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise UserError(f"model.path: no usable tokenizer in {folder}: {error}") from error
        if not self._tokenizer.chat_template:
            raise UserError(f"model.path: the tokenizer in {folder} has no chat template")
        self.end_tokens = self._find_end_tokens(folder)

    @property
    def tokenizer(self) -> Any:
        """Hugging Face's, for vLLM's parsers."""
        return self._tokenizer

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Prompt ids of the whole message list, ready for the assistant's next turn.

        Always of the whole list: messages rendered one by one and joined are another text (two
        tool results in a row stand in one turn of most templates). `tools` are JSON schemas.
        Raises TemplateFailed for messages that the template refuses.
        """
        try:
            ids = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise TemplateFailed(
                f"the chat template refuses the messages: {type(error).__name__}: {error}"
            ) from error
        return [int(token) for token in ids]

    def text(self, token_ids: Sequence[int]) -> str:
        """Sampled ids as text: special tokens too, since some formats write calls with them, but
        not the token that ended the turn."""
        ids = list(token_ids)
        if ids and ids[-1] in self.end_tokens:
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def spell(self, token_ids: Sequence[int]) -> str:
        """All tokens as text, for people."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _find_end_tokens(self, folder: Path) -> tuple[int, ...]:
        """generation_config's list, the tokenizer's own, and what the template puts after an
        assistant's turn."""
        found: set[int] = set()
        path = folder / "generation_config.json"
        if path.exists():
            listed = json.loads(path.read_text()).get("eos_token_id")
            found.update([listed] if isinstance(listed, int) else listed or [])
        if self._tokenizer.eos_token_id is not None:
            found.add(int(self._tokenizer.eos_token_id))
        user: Message = {"role": "user", "content": "a"}
        prompt = self.render([user])
        whole = self._tokenizer.apply_chat_template(
            [user, {"role": "assistant", "content": "b"}], tokenize=True, return_dict=False
        )
        special = set(self._tokenizer.all_special_ids) | set(
            self._tokenizer.get_added_vocab().values()
        )
        if whole[: len(prompt)] == prompt:
            after = next((token for token in whole[len(prompt) :] if token in special), None)
            if after is not None:
                found.add(int(after))
        if not found:
            raise UserError(f"model.path: {folder} names no token that ends a turn")
        return tuple(sorted(found))
