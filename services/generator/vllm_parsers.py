"""vLLM's tool and reasoning parsers, in process and by name.

vLLM is the reader of every format but the one in parsing.py. Its parsers were made to serve one
answer each and keep state, so each turn gets a new one. They are silent about what they cannot
read: a text in which a call begins, and from which no call comes out, is one malformed call here.

This module imports vLLM; whoever needs it imports it then.
"""

import difflib
import logging
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionToolsParam,
)
from vllm.parser.engine.parser_engine_config import ParserState
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from services.common.errors import UserError
from services.generator.parsing import NAME, Parser, with_arguments
from services.generator.types import Parsed, ToolCall

FORMAT_KEY, REASONING_KEY = "tools.format", "generation.reasoning_parser"

MARKER_NAME = re.compile(
    r"_?(tool_?(calls?)?|tools|bot|tc)_(start|start_token|begin|open|prefix|token|string)",
    re.IGNORECASE,
)
"""How parsers name the text that begins a call, as an attribute or in their module: bot_token,
tool_call_start_token, TOOL_CALLS_BEGIN, tools_open, tc_start, ..."""

UNNAMED_MARKERS = {
    "gigachat3": r"function call<\|role_sep\|>|<\|function_call\|>",
    "internlm": r"<\|action_start\|>",
    "llama3_json": r'^\s*\{\s*"(name|type|function)"',
    "llama4_json": r'^\s*\{\s*"(name|type|function)"',
    "llama4_pythonic": r"<\|python_start\|>|^\s*\[\s*[A-Za-z_]\w*\(",
    "muse_glimmer": r"<atem:(function_calls|invoke)",
    "olmo3": r"<function_calls>",
    "pythonic": r"^\s*\[\s*[A-Za-z_]\w*\(",
    "xlam": r'\[\s*\{\s*"name"',
}
"""What begins a call in formats whose parsers do not name it."""

# Malformed calls are counted and told to the model; a traceback of each would be the whole log.
for _name in ("vllm.tool_parsers", "vllm.parser"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)


class Calls:
    """One of vLLM's tool parsers."""

    def __init__(
        self,
        format: str,  # noqa: A002 - as the recipe calls it
        *,
        tokenizer: Any,
        tools: list[dict[str, Any]],
        reasoning_is_taken: bool,
    ) -> None:
        """Raises UserError for a name that vLLM does not have, and for a parser that cannot be
        used with this tokenizer."""
        known = sorted({*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers})
        chosen = _chosen(FORMAT_KEY, format, ["hermes", *known], ToolParserManager.get_tool_parser)
        params = [ChatCompletionToolsParam.model_validate(tool) for tool in tools]

        def make() -> Any:
            parser = chosen(tokenizer, params)
            if not reasoning_is_taken and hasattr(parser, "skip_reasoning_parsing"):
                # Else it takes reasoning out of the text by itself, and loses it.
                parser.skip_reasoning_parsing = True
            return parser

        self._make = make
        self._request = _request(tools)
        first = _tried(FORMAT_KEY, format, make)
        _tried(FORMAT_KEY, format, lambda: first.extract_tool_calls("", self._request))
        self._begins = re.compile("|".join(_markers(first, format)) or r"(?!)", re.MULTILINE)

    def parse(self, text: str) -> Parsed:
        """The calls, and what the parser leaves as the content."""
        try:
            found = self._make().extract_tool_calls(text, self._request)
        except Exception as error:
            what = f"the call cannot be read: {type(error).__name__}"
            return Parsed(content=text, calls=(ToolCall(text=text, mistake=what),))
        if not found.tool_calls and self._begins.search(text):
            mistake = "the call cannot be read: its form is not the one that tools are called by"
            return Parsed(content=text, calls=(ToolCall(text=text, mistake=mistake),))
        return Parsed(
            content=found.content or "",
            calls=tuple(_read(call.function) for call in found.tool_calls),
            calls_in_content=False,
        )


@dataclass(frozen=True)
class Reasoning:
    """One of vLLM's reasoning parsers, and who reads what it leaves."""

    name: str
    tokenizer: Any
    rest: Parser

    def __post_init__(self) -> None:
        """Raises UserError as Calls does."""
        known = ReasoningParserManager.list_registered()
        get = ReasoningParserManager.get_reasoning_parser
        _chosen(REASONING_KEY, self.name, known, get)
        first = _tried(REASONING_KEY, self.name, self._make)
        _tried(REASONING_KEY, self.name, lambda: first.extract_reasoning("", _request([])))

    def parse(self, text: str) -> Parsed:
        """The reasoning, and what the rest says. A text that the parser cannot read is all
        rest."""
        try:
            reasoning, content = self._make().extract_reasoning(text, _request([]))
        except Exception:
            return self.rest.parse(text)
        return replace(self.rest.parse(content or ""), reasoning=reasoning)

    def _make(self) -> Any:
        return ReasoningParserManager.get_reasoning_parser(self.name)(self.tokenizer)


def _chosen(key: str, name: str, known: list[str], get: Callable[[str], Any]) -> Any:
    """The class behind a name. Raises UserError."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(known)}"
        raise UserError(f"{key}: vLLM has no parser {name!r}; {hint}")
    return _tried(key, name, lambda: get(name))


def _tried(key: str, name: str, step: Callable[[], Any]) -> Any:
    """What `step` gives; what it raises is the user's to change."""
    try:
        return step()
    except Exception as error:
        # They raise what they like: RuntimeError and KeyError for tokens that the vocabulary lacks,
        # ValueError, ImportError, NotImplementedError.
        raise UserError(
            f"{key}: vLLM's parser {name!r} cannot be used with this model: "
            f"{type(error).__name__}: {error}"
        ) from error


def _request(tools: list[dict[str, Any]]) -> Any:
    """The part of a server's request that parsers look at."""
    return ChatCompletionRequest.model_validate(
        {"messages": [{"role": "user", "content": ""}]}
        | ({"tools": tools, "tool_choice": "auto"} if tools else {})
    )


def _markers(parser: Any, format: str) -> Iterator[str]:  # noqa: A002 - as above
    """Patterns of what begins a call in the text that this parser reads."""
    module = vars(sys.modules[type(parser).__module__])
    named = {name: getattr(parser, name, None) for name in dir(parser)} | module
    for name, value in named.items():
        if isinstance(value, str) and value and MARKER_NAME.fullmatch(name):
            yield re.escape(value)
    engine = getattr(parser, "_parser_engine", None)
    if engine is not None:
        # A state machine: what leads from content into any state of a tool.
        config = engine.parser_engine_config
        for (state, terminal), transition in config.transitions.items():
            if state is ParserState.CONTENT and transition.next_state.name.startswith("TOOL"):
                spelled = config.terminals[terminal]
                for text in (spelled,) if isinstance(spelled, str) else spelled:
                    yield re.escape(text)
    if format in UNNAMED_MARKERS:
        yield UNNAMED_MARKERS[format]


def _read(function: Any) -> ToolCall:
    """A call as vLLM has it: a name, and arguments as text."""
    text = f"{function.name}({function.arguments})"
    if not NAME.fullmatch(function.name or ""):
        return ToolCall(text=text, mistake="the call names no tool")
    return with_arguments(function.name, function.arguments, text=text)
