"""A turn's text to the calls in it.

Two levels: `Hermes` here reads the commonest format (Nous Hermes, Qwen) block by block, so that one
that is broken costs no other; every other format is read by vLLM's parsers, by name
(vllm_parsers.py). Whatever a model writes, reading it ends no rollout: what is no call is a
ToolCall with a `mistake`, in words for the model.
"""

import inspect
import json
import re
from dataclasses import dataclass
from typing import Any, Protocol

from services.generator.types import Parsed, ToolCall

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What a tool may be called, and the model may ask for."""

HERMES = "hermes"
"""The format that is read by ourselves."""

OPEN, CLOSE = "<tool_call>", "</tool_call>"

MAX_DEPTH = 64
"""Of nested lists and objects in arguments: far below where Python's json module, a chat template
or a worker would end with a RecursionError."""

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")
_BEGINS_WITH_NAME = re.compile(rf'\{{\s*"name"\s*:\s*"({NAME.pattern})"')


class Parser(Protocol):
    """Reads one format."""

    def parse(self, text: str) -> Parsed:
        """What the text of one turn says. Never raises for what a model wrote."""
        ...


def make_parser(
    format: str,  # noqa: A002 - as the recipe calls it
    reasoning_parser: str | None,
    *,
    tokenizer: Any,
    tools: list[dict[str, Any]],
) -> Parser:
    """The parser for `tools.format` and `generation.reasoning_parser`. Imports vLLM only where one
    of its parsers is named.

    `tools` are the schemas of what can be called; without any there are no calls, whatever the text
    looks like. Raises UserError for a name that nobody knows and for a parser that this tokenizer
    does not serve.
    """
    calls: Parser = Hermes() if tools else Plain()
    if reasoning_parser is None and (format == HERMES or not tools):
        return calls
    from services.generator import vllm_parsers

    if tools and format != HERMES:
        calls = vllm_parsers.Calls(
            format,
            tokenizer=tokenizer,
            tools=tools,
            reasoning_is_taken=reasoning_parser is not None,
        )
    if reasoning_parser is None:
        return calls
    return vllm_parsers.Reasoning(reasoning_parser, tokenizer=tokenizer, rest=calls)


@dataclass(frozen=True)
class Plain:
    """No calls: all text is content."""

    def parse(self, text: str) -> Parsed:
        """The text as it is."""
        return Parsed(content=text)


@dataclass(frozen=True)
class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one block a call."""

    def parse(self, text: str) -> Parsed:
        """A call, or a mistake, for each block, in order; the content is the whole text, so that
        it goes back into the prompt as it was sampled."""
        calls: list[ToolCall] = []
        end = 0
        while (start := text.find(OPEN, end)) >= 0:
            call, end = _block(text, start)
            calls.append(call)
        return Parsed(content=text, calls=tuple(calls))


def _block(text: str, start: int) -> tuple[ToolCall, int]:
    """The block whose opening tag is at `start`, and where it ends."""
    body = _skip_space(text, start + len(OPEN))
    try:
        # Not up to the next closing tag: it may stand inside of a JSON string.
        value, end = _DECODER.raw_decode(text, body)
    except (ValueError, RecursionError) as error:
        end = _end_of_broken(text, body)
        named = _BEGINS_WITH_NAME.match(text, body, end)
        name = None if named is None else named[1]
        what = f"the call is not valid JSON: {_why(error)}"
        return ToolCall(text=text[start:end], name=name, mistake=what), end
    close = _skip_space(text, end)
    if not text.startswith(CLOSE, close):
        end = _end_of_broken(text, end)
        closed = text.endswith(CLOSE, start, end)
        what = f"text follows the JSON object before {CLOSE}" if closed else f"{CLOSE} is missing"
        return ToolCall(text=text[start:end], name=_name_in(value), mistake=what), end
    end = close + len(CLOSE)
    return read_call(value, text=text[start:end]), end


def _end_of_broken(text: str, start: int) -> int:
    """Where a block that cannot be read ends: with its closing tag, before the next opening one, or
    with the text."""
    opening = text.find(OPEN, start)
    stop = len(text) if opening < 0 else opening
    close = text.find(CLOSE, start, stop)
    return stop if close < 0 else close + len(CLOSE)


def _skip_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    assert match is not None
    return match.end()


def _name_in(value: Any) -> str | None:
    """The name that a block's value gives, where it is one that a tool could have."""
    name = value.get("name") if isinstance(value, dict) else None
    return name if isinstance(name, str) and NAME.fullmatch(name) else None


def read_call(value: Any, *, text: str) -> ToolCall:
    """The call that `{"name": ..., "arguments": ...}` asks for; `text` is what the model wrote.

    `arguments` are an object, or a text that holds one (as OpenAI's interface has them); missing,
    null and an empty text are the empty object.
    """
    if not isinstance(value, dict):
        return ToolCall(text=text, mistake="the call must be a JSON object with name and arguments")
    name = _name_in(value)
    if name is None:
        what = "name must be a tool's name" if "name" in value else "name is missing"
        return ToolCall(text=text, mistake=f"the call names no tool: {what}")
    return with_arguments(name, value.get("arguments"), text=text)


def with_arguments(name: str, arguments: Any, *, text: str) -> ToolCall:
    """A call of `name`, or what is wrong with its arguments, which are as in `read_call`."""
    if isinstance(arguments, str) and not arguments.strip():
        arguments = None
    elif isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            what = f"arguments are not valid JSON: {_why(error)}"
            return ToolCall(text=text, name=name, mistake=what)
    if arguments is None:
        arguments = {}
    mistake = _mistake_in(arguments)
    if mistake is not None:
        return ToolCall(text=text, name=name, mistake=mistake)
    return ToolCall(text=text, name=name, arguments=arguments)


def _mistake_in(arguments: Any) -> str | None:
    """Why arguments cannot be used: no object, or nothing that can be written as JSON again."""
    if not isinstance(arguments, dict):
        return "arguments must be a JSON object"
    if _is_deeper(arguments, MAX_DEPTH):
        return f"arguments are nested more than {MAX_DEPTH} deep"
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return "a text in arguments holds half of a surrogate pair"
    except ValueError:
        return "NaN and Infinity are no JSON numbers"
    return None


def _is_deeper(value: Any, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(_is_deeper(each, depth - 1) for each in inner)


def _why(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    return "it is nested too deep" if isinstance(error, RecursionError) else "a number is too long"


def validate(call: ToolCall, signature: inspect.Signature) -> str | None:
    """Why the call's arguments do not fit the function, in words for the model; None if they do.

    Example: {"a": 1, "zz": 2} for (a, b, c=0) -> "b is missing; there is no argument zz (the
    arguments are a, b, c)".
    """
    assert call.arguments is not None, "a call with a mistake is not to be run"
    parameters = signature.parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    known = [p.name for p in named]
    missing = [p.name for p in named if p.default is p.empty and p.name not in call.arguments]
    unknown = [] if takes_any else [name for name in call.arguments if name not in known]
    wrong = [f"{name} is missing" for name in missing]
    wrong += [f"there is no argument {name}" for name in unknown]
    if not wrong:
        return None
    takes = f"the arguments are {', '.join(known)}" if known else "it takes no arguments"
    return f"{'; '.join(wrong)} ({takes})"
