"""The tiny models' tokenizers and chat templates: one token a character, and with tools a token for
each piece of a call that is always the same.

Needs transformers; imported only when a model has to be made.
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, UNKNOWN, END = "<pad>", "<unk>", "<end>"
ROLES = ("system", "user", "assistant", "tool")
ALPHABET = ("\n", *(chr(code) for code in range(32, 127)))
"""Newline and printable ASCII, one token each; any other character is UNKNOWN."""

MAX_POSITIONS_TOKENS = 2048

TOOLS = "<tools>"
"""Opens the list of tools."""

CALL_PIECES = (
    "<tool_call>",
    '{"name": "',
    '", "arguments": {"',
    '": ',
    ', "',
    "}}",
    "</tool_call>",
)
"""What calls have in common. Not special, as in Qwen's tokenizers: decoding keeps them. A model
may also write them letter by letter; rendered again, that text becomes other tokens."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role: ' ~ message['role']) }}"
    "{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] }}<end>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""One token opens a message and one ends it, so that prompts stay short."""

TOOLS_CHAT_TEMPLATE = (
    "{% if tools %}"
    "<tools>"
    "{% for tool in tools %}"
    "{{ '\\n' if not loop.first }}"
    "{{ tool['function']['name'] }}("
    "{% for name in tool['function']['parameters']['properties'] %}"
    "{{ ', ' if not loop.first }}{{ name }}"
    "{% endfor %}"
    ")"
    "{% endfor %}"
    "<end>"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role: ' ~ message['role']) }}"
    "{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] or '' }}"
    "{% if message['tool_calls'] and '<tool_call>' not in (message['content'] or '') %}"
    "{% for call in message['tool_calls'] %}"
    '<tool_call>{"name": "{{ call[\'function\'][\'name\'] }}", "arguments": '
    "{% if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}"
    "{% else %}{{ call['function']['arguments'] | tojson }}{% endif %}"
    "}</tool_call>"
    "{% endfor %}"
    "{% endif %}"
    "<end>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""The same with the tools first, as `multiply(a, b)` a line, and calls in the Hermes format.

An assistant's content stands as it was written, and nothing that comes later changes what stands
before it: a history begins with exactly the tokens of the history one turn shorter.
"""


def build_tokenizer(*, tools: bool = False) -> Any:
    """A tokenizer with one token a character; decoding gives back exactly the text that was
    encoded.

    With `tools` there is a token for each of CALL_PIECES too, and the template shows tools:
    `<tool_call>{"name": "add", "arguments": {"a": 4, "b": 7}}</tool_call>` is 15 tokens, not 65.
    """
    openings = [*(f"<{role}>" for role in ROLES), *([TOOLS] if tools else [])]
    tokens = [PAD, UNKNOWN, END, *openings, *ALPHABET]
    inner = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=UNKNOWN)
    )
    # "." would not match a newline, and a newline dropped here is dropped from every prompt.
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    # Without a decoder, words (here: characters) are joined by spaces.
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=openings,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS_TOKENS,
        chat_template=TOOLS_CHAT_TEMPLATE if tools else CHAT_TEMPLATE,
    )
    if tools:
        tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in CALL_PIECES])
    return tokenizer
