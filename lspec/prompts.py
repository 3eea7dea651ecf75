"""The prompts of a benchmark: the built-in set, or a file of the user's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lspec.errors import RequestError
from lspec.paths import reason
from lspec.template import Message

BUILT_IN = Path(__file__).with_name("prompts.jsonl")
NO_CATEGORY = "other"

_SHAPE = 'A line is {"prompt": "…"} or {"messages": […]}, with "id" and "category" if you like.'


@dataclass(frozen=True, slots=True)
class Prompt:
    """One chat to answer; `id` is unique within its file."""

    id: str
    category: str
    messages: tuple[Message, ...]


def read(path: Path) -> list[Prompt]:
    """Read a JSON Lines file of objects with `prompt`, a text, or `messages`, a chat.

    `id` is "line N" and `category` "other" where they are missing; empty lines are skipped.
    Raises RequestError, which names the file and the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {path}: {reason(error)}") from None
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = _parse(line, number)
            if prompt.id in prompts:
                raise ValueError(f"the id {prompt.id!r} is there already")
        except ValueError as error:
            raise RequestError(f"{path}, line {number}: {error}", hint=_SHAPE) from None
        prompts[prompt.id] = prompt
    if not prompts:
        raise RequestError(f"{path} has no prompts", hint=_SHAPE)
    return list(prompts.values())


def select(
    prompts: Sequence[Prompt], *, categories: Sequence[str] = (), limit: int | None = None
) -> list[Prompt]:
    """Return the prompts of `categories` (none named: of all), at most `limit` of each.

    Raises RequestError for a category that there is not.
    """
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    for category in categories:
        if category not in by_category:
            hint = f"There are: {', '.join(by_category)}."
            raise RequestError(f"no prompt has the category {category!r}", hint=hint)
    chosen = {p.id for c in categories or by_category for p in by_category[c][:limit]}
    return [prompt for prompt in prompts if prompt.id in chosen]


def _parse(line: str, number: int) -> Prompt:
    """Return the prompt of one line. Raises ValueError."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    given = [key for key in ("prompt", "messages") if key in fields]
    if len(given) != 1:
        raise ValueError(f"needs 'prompt' or 'messages', has {' and '.join(given) or 'neither'}")
    id, category = fields.get("id", f"line {number}"), fields.get("category", NO_CATEGORY)
    if not (isinstance(id, str) and isinstance(category, str)):
        raise ValueError("'id' and 'category' are texts")
    return Prompt(id, category, _messages(fields, given[0]))


def _messages(fields: dict[str, Any], key: str) -> tuple[Message, ...]:
    """Return the chat under `key`. Raises ValueError."""
    value = fields[key]
    if key == "prompt":
        if not isinstance(value, str):
            raise ValueError("'prompt' is not a text")
        return ({"role": "user", "content": value},)
    if not isinstance(value, list) or not value:
        raise ValueError("'messages' is not a list of messages")
    for message in value:
        fits = isinstance(message, dict) and all(
            isinstance(message.get(part), str) for part in ("role", "content")
        )
        if not fits:
            raise ValueError("a message has 'role' and 'content', both texts")
    return tuple(value)
