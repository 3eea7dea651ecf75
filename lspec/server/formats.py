"""How the model families of the catalogue write calls of functions."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lspec.thinking import overlap


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function; `arguments` is a JSON object in a text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Format:
    """A text with calls: start, then for each call head, name, body, arguments, tail, then end.

    `markers` are control tokens or other texts that belong to the format alone; the first of them
    opens a call. `between` is None where the family makes one call a turn.
    """

    family: str
    sign: str  # stands in the chat templates of this family and of no other
    markers: tuple[str, ...]
    head: str
    body: str
    tail: str = ""
    start: str = ""
    end: str = ""
    between: str | None = None

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Return the text of calls, each a name and its arguments."""
        texts = (
            f"{self.head}{name}{self.body}{json.dumps(arguments, ensure_ascii=False)}{self.tail}"
            for name, arguments in calls
        )
        return f"{self.start}{(self.between or '').join(texts)}{self.end}"


# The first whose sign is in a template is the template's.
FORMATS = (
    Format(
        family="Ministral 3",
        sign="[ARGS]",
        markers=("[TOOL_CALLS]", "[ARGS]"),
        head="[TOOL_CALLS]",
        body="[ARGS]",
        between="",
    ),
    Format(
        family="Qwen2.5, Qwen2.5-Coder, Qwen3",
        sign="<tool_call>",
        markers=("<tool_call>", "</tool_call>"),
        head='<tool_call>\n{"name": "',
        body='", "arguments": ',
        tail="}\n</tool_call>",
        between="\n",
    ),
    Format(
        family="Granite 3.3",
        sign="<|tool_call|>",
        markers=("<|tool_call|>",),
        start="<|tool_call|>[",
        head='{"name": "',
        body='", "arguments": ',
        tail="}",
        between=", ",
        end="]",
    ),
    Format(
        family="Llama 3.1, 3.2, 3.3",
        sign="<|python_tag|>",
        markers=("<|python_tag|>",),
        head='{"name": "',
        body='", "parameters": ',
        tail="}",
    ),
)


def format_of(template: str | None) -> Format | None:
    """Return the format of a chat template; None where it shows no tools to the model."""
    if not template or "tools" not in template:
        return None
    return next((format for format in FORMATS if format.sign in template), None)


# Small models often leave the markers out, and put a bare call into a block of code.
_BARE = ('{"name":', '```{"name":', '```json{"name":')
_LOOK = 60  # characters from the start of a line that tell a bare call
_LINE = re.compile(r"^", re.MULTILINE)
_BETWEEN = re.compile(
    r"(?:</?tool_call>|<\|tool_call\|>|<\|python_tag\|>|\[TOOL_CALLS\]|```(?:json)?|[\s;,\[\]])*"
)
_NAMED = re.compile(r"([\w.-]+)\[ARGS\]")


def begin_of_calls(text: str, format: Format, *, since: int = 0, whole: bool = True) -> int:
    """Return where the first call begins; the length of `text` where there is none.

    The end of a text that is not `whole` counts as well if it may become the beginning of a call.
    There is none before `since`.
    """
    begin = text.rfind("\n", 0, since) + 1
    at = text.find(format.markers[0], begin)
    if at < 0:
        at = len(text) - (0 if whole else overlap(text, format.markers[0]))
    for line in _LINE.finditer(text, begin, at):
        shown = "".join(text[line.start() :][:_LOOK].split())
        if any(shown.startswith(b) or (not whole and b.startswith(shown)) for b in _BARE):
            at = line.start()
            break
    return at if text[:at].strip() else 0


def read_calls(
    text: str, format: Format, names: Collection[str], *, strict: bool = False
) -> tuple[str, list[Call]]:
    """Return the text before the calls, and the calls.

    Without a marker a call must be of a function in `names`, anything else is an answer in JSON;
    and where `strict`, it must be all there is.
    """
    begin = begin_of_calls(text, format)
    calls = list(_calls(text, begin))
    named = all(call.name in names for call in calls) and not (strict and begin)
    if calls and (named or format.markers[0] in text):
        return text[:begin], calls
    return text, []


def _calls(text: str, at: int) -> Iterator[Call]:
    """Yield the calls from `at` on, whatever family they are of."""
    while True:
        between = _BETWEEN.match(text, at)
        at = between.end() if between else at
        named = _NAMED.match(text, at)
        try:
            value, at = _DECODER.raw_decode(text, named.end() if named else at)
        except (ValueError, RecursionError):
            return
        call = _call({"name": named[1], "arguments": value} if named else value)
        if call is None:
            return
        yield call


def _call(value: Any) -> Call | None:
    match value:
        case {"name": str(name), "arguments": dict(arguments)}:
            pass
        case {"name": str(name), "parameters": dict(arguments)}:
            pass
        case _:
            return None
    return Call(name, json.dumps(arguments, ensure_ascii=False))


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)
