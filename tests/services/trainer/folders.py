"""A model folder as users have them, small enough for tests."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from tests.services.trainer.numerics import VOCABULARY, make_model


def make_folder(folder: Path, **changes: Any) -> Path:
    """Write a random Qwen3 with a tokenizer of numbered words; `changes` as make_model's."""
    make_model(**changes).save_pretrained(folder)
    words = {f"w{number}": number for number in range(VOCABULARY - 2)}
    tokenizer = Tokenizer(WordLevel({**words, "<unk>": 48, "<eos>": 49}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    )
    fast.save_pretrained(folder)
    return folder
