#!/usr/bin/env python
"""Compare the replies of `lspec serve` with those of llama.cpp's own server, key by key.

Both serve the same files and get the same requests. What is compared is the shape: which keys there
are and of which types. Every difference is printed; docs/server.md says why each is there.

    scripts/compare_server.py --llama-server PATH [--target FILE --draft FILE]
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from lspec import catalogue, store

Shape = dict[str, set[str]]  # path of a value -> its types

ENTRY = {"id", "token", "bytes", "logprob"}  # keys of a likely token, elsewhere a key itself
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK: Any = {"messages": [{"role": "user", "content": "Count to five."}], "max_tokens": 24}
PROMPT: Any = {"prompt": "def add(a, b):\n", "max_tokens": 16}
COLD: Any = {"temperature": 0, "seed": 1}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
SCHEMA: Any = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}
TOOLS: Any = {
    "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
    "tools": [WEATHER],
    "tool_choice": "required",
    "max_tokens": 64,
}
CALLS: dict[str, tuple[str, Any]] = {
    "chat": (CHAT, ASK),
    "chat, streamed": (CHAT, {**ASK, "stream": True}),
    "chat, streamed with usage": (
        CHAT,
        {**ASK, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "chat with a stop": (CHAT, {**ASK, "stop": ["3"]}),
    "chat with logprobs": (CHAT, {**ASK, "logprobs": True, "top_logprobs": 2}),
    "chat with logprobs, streamed": (
        CHAT,
        {**ASK, "logprobs": True, "top_logprobs": 2, "stream": True},
    ),
    "chat, two choices": (CHAT, {**ASK, "n": 2}),
    "JSON schema": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "Add 2 and 3."}],
            "max_tokens": 32,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "sum", "schema": SCHEMA},
            },
        },
    ),
    "tool call": (CHAT, TOOLS),
    "tool call, streamed": (CHAT, {**TOOLS, "stream": True}),
    "text": (TEXT, PROMPT),
    "text, streamed": (TEXT, {**PROMPT, "stream": True}),
    "text with logprobs": (TEXT, {**PROMPT, "logprobs": 2}),
    "text with a suffix": (TEXT, {**PROMPT, "suffix": "\n\nprint(add(1, 2))\n"}),
    "bad JSON": (CHAT, b"{"),
    "wrong type": (CHAT, {**ASK, "messages": 5}),
    "too long a prompt": (TEXT, {"prompt": "word " * 9000}),
    "models": ("/v1/models", None),
    "health": ("/health", None),
}


def shape(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the type of every value in JSON data."""
    if isinstance(value, dict):
        for key, item in value.items():
            name = "TEXT" if path.endswith(".top_logprobs[]") and key not in ENTRY else key
            yield from shape(item, f"{path}.{name}")
    elif isinstance(value, list):
        yield path, "list"
        for item in value:
            yield from shape(item, f"{path}[]")
    else:
        names = {str: "text", bool: "truth value", int: "number", float: "number"}
        yield path, names.get(type(value), "null")


def merged(values: list[Any]) -> Shape:
    """Return the shape of values that belong together."""
    found: Shape = {}
    for value in values:
        for path, name in shape(value):
            found.setdefault(path.lstrip("."), set()).add(name)
    return found


def ask(base: str, path: str, body: Any) -> tuple[int, list[Any]]:
    """Return the status and the JSON of a reply, or of all events of a stream."""
    if isinstance(body, dict):
        body = json.dumps({**COLD, **body}).encode()
    request = urllib.request.Request(base + path, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            status, text = reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    if not text.startswith("data: "):
        return status, [json.loads(text)]
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events.pop() == "[DONE]"
    return status, [json.loads(event) for event in events]


def differences(ours: tuple[int, list[Any]], theirs: tuple[int, list[Any]]) -> Iterator[str]:
    """Yield how two replies differ."""
    if ours[0] != theirs[0]:
        yield f"status {ours[0]}; llama-server {theirs[0]}"
        return
    a, b = merged(ours[1]), merged(theirs[1])
    for path in dict.fromkeys([*a, *b]):
        mine, other = (", ".join(sorted(side.get(path, {"absent"}))) for side in (a, b))
        if mine != other:
            yield f"{path}: {mine}; llama-server {other}"


@contextmanager
def running(command: list[str], base: str) -> Iterator[None]:
    """Run a server until its health is asked for in vain no more."""
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            while not is_healthy(base):
                if process.poll() is not None:
                    log.seek(0)
                    raise click.ClickException(log.read().decode()[-2000:])
                time.sleep(0.2)
            yield
        finally:
            process.terminate()


def is_healthy(base: str) -> bool:
    """Return whether a server is ready."""
    try:
        return ask(base, "/health", None)[0] == 200
    except OSError:
        return False


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


@click.command()
@click.option("--llama-server", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--target", type=click.Path(exists=True, path_type=Path))
@click.option("--draft", type=click.Path(exists=True, path_type=Path))
def main(llama_server: Path, target: Path | None, draft: Path | None) -> None:
    """Ask both servers, one after the other, and print the differences."""
    if not (target and draft):
        files = store.locate_pair(catalogue.load().pair(None))
        if files is None:
            raise click.ClickException("the default pair is not here: lspec pull")
        target, draft = files.target[0], files.draft[0]
    replies = []
    for program in ("lspec", "llama-server"):
        port = str(free_port())
        if program == "lspec":
            command = [sys.executable, "-m", "lspec", "serve", "--target", str(target)]
            command += ["--draft", str(draft), "--gamma", "4", "--port", port]
        else:
            command = [str(llama_server), "-m", str(target), "-md", str(draft), "--port", port]
            command += ["-c", "4096", "-np", "2", "--jinja", "--no-webui"]
            command += ["--spec-type", "draft-simple", "--spec-draft-n-max", "4"]
        base = f"http://127.0.0.1:{port}"
        with running(command, base):
            replies.append({name: ask(base, *call) for name, call in CALLS.items()})
    ours, theirs = replies
    calls = defaultdict(list)
    for name in CALLS:
        for line in differences(ours[name], theirs[name]):
            calls[line].append(name)
    for line, names in calls.items():
        click.echo(f"{line}\n    in {'; '.join(names)}")


if __name__ == "__main__":
    main()
