"""The words of a pipeline's prompts, and what some of them do.

Torch-free: reward functions read it in processes that start often.
"""

NUM_WORDS = 48
"""Of the tests' tiny tokenizer: w0 to w47."""

FAILS, KILLS_GENERATOR = "w46", "w47"
"""In a prompt: all its conversations fail; the generator that takes it dies."""

NUM_PLAIN = 40
"""Words that prompts are numbered with, and completions made of: w0 to w39."""


def token_of(word: str) -> int:
    """Its token."""
    return int(word.removeprefix("w"))


def prompt(number: int, trap: str = "") -> str:
    """The prompt of row `number`, with a word that does something or without.

    Example: `prompt(83)` is "w2 w3".
    """
    words = [f"w{number // NUM_PLAIN}", f"w{number % NUM_PLAIN}"]
    return " ".join([*words, trap] if trap else words)
