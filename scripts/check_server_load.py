#!/usr/bin/env python
"""Put a server of a tiny pair under load, and check that it answers as if it had one client.

Of 32 clients a third hang up at random and a tenth send garbage. Every other answer must be the one
that the same request gets alone (up to ties; with --exact always), nothing may answer 500, the
server's memory may not grow by more than 5 %, and the queue must be empty in the end. Then the
server is killed in the middle of an answer, started again, and asked.

    scripts/check_server_load.py [--seconds 120] [--clients 32] [--exact]
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx2

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import tiny
from serving import Server, serving

CHAT, TEXT = "/chat/completions", "/completions"
TIE = 1e-3  # between the log-probabilities of two tokens that may change places
GROWTH = 1.05
WARM_UP = 0.2  # of the time, before memory is looked at first

Body = dict[str, Any]
GARBAGE: tuple[tuple[str, bytes, int], ...] = (
    (CHAT, b'{"messages": [', 400),
    (CHAT, b'{"messages": "Hello"}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": 5}]}', 400),
    (TEXT, b'{"prompt": "Hello", "max_tokens": "many"}', 400),
    (TEXT, b'{"prompt": "Hello", "unheard_of": 1}', 400),
    (TEXT, b'{"prompt": "Hello", "model": "gpt-99"}', 404),
    (TEXT, b'{"prompt": "' + b"x" * 10_000_000 + b'"}', 413),
    ("/nowhere", b"{}", 404),
)


@dataclass(frozen=True)
class Case:
    """A request, its answer when it comes alone, and the gap behind each token of that."""

    path: str
    body: Body
    text: str
    tokens: list[tuple[str, float]]

    def right(self, text: str, *, exact: bool) -> bool:
        """Return whether `text` is the answer, or left it where two tokens were nearly equal."""
        if text == self.text or exact:
            return text == self.text
        at = next((i for i, (a, b) in enumerate(zip(text, self.text, strict=False)) if a != b), 0)
        seen = 0
        for token, gap in self.tokens:
            seen += len(token)
            if seen > at:
                return gap < TIE
        return False


@dataclass
class Tally:
    """What happened to all requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def check(self, name: str, holds: bool, detail: object = "") -> None:
        self.outcomes[name] += 1
        if not holds:
            self.faults.append(f"{name}: {detail}")


def bodies() -> list[tuple[str, Body]]:
    """Return well-formed requests of both kinds, with and without a common beginning."""
    words = ("quick", "lazy", "red", "old", "sly", "Zürich", "x = 1", "<|im_end|>")
    common: Body = {"temperature": 0, "max_tokens": 40}
    chats = [{"messages": [{"role": "user", "content": f"Say {w} twice."}]} for w in words]
    texts = [{"prompt": f"The {word} fox"} for word in words]
    return [(CHAT, {**c, **common}) for c in chats] + [(TEXT, {**t, **common}) for t in texts]


async def alone(client: httpx2.AsyncClient, path: str, body: Body) -> Case:
    """Ask while nobody else does."""
    wanted = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    reply = (await client.post(path, json={**body, **wanted})).json()["choices"][0]
    if path == CHAT:
        entries = reply["logprobs"]["content"]
        tops = [(e["token"], [t["logprob"] for t in e["top_logprobs"]]) for e in entries]
        text = reply["message"]["content"]
    else:
        names, likely = reply["logprobs"]["tokens"], reply["logprobs"]["top_logprobs"]
        tops = [(n, sorted(top.values())[::-1]) for n, top in zip(names, likely, strict=True)]
        text = reply["text"]
    gaps = [(name, top[0] - top[1] if len(top) > 1 else 0.0) for name, top in tops]
    return Case(path, body, text, gaps)


async def answer(client: httpx2.AsyncClient, case: Case, *, stream: bool) -> tuple[int, str]:
    """Return the status and the text of an answer."""

    if not stream:
        reply = await client.post(case.path, json=case.body)
        if reply.status_code != 200:
            return reply.status_code, reply.text
        choice = reply.json()["choices"][0]
        return 200, choice["text"] if case.path == TEXT else choice["message"]["content"]
    text, done = "", False
    async with client.stream("POST", case.path, json={**case.body, "stream": True}) as reply:
        async for line in reply.aiter_lines():
            done |= line == "data: [DONE]"
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return (reply.status_code if done else 0), text


async def run_client(
    number: int, url: str, cases: list[Case], deadline: float, tally: Tally, *, exact: bool
) -> None:
    """Ask until the deadline: as a client that stays, hangs up, or sends garbage."""
    dice = random.Random(number)
    async with httpx2.AsyncClient(base_url=url, timeout=120) as client:
        while time.monotonic() < deadline:
            if number % 10 == 9:
                path, body, status = dice.choice(GARBAGE)
                headers = {"Content-Type": "application/json"}
                reply = await client.post(path, content=body, headers=headers)
                tally.check("garbage", reply.status_code == status, reply.text[:200])
                await asyncio.sleep(dice.random() * 0.1)
                continue
            case, stream = dice.choice(cases), dice.random() < 0.5
            if number % 3 == 0 and dice.random() < 0.7:
                try:
                    async with asyncio.timeout(dice.random() * 0.3):
                        await answer(client, case, stream=stream)
                except TimeoutError:
                    pass
                tally.outcomes["hung up"] += 1
                continue
            status, text = await answer(client, case, stream=stream)
            right = status == 200 and case.right(text, exact=exact)
            tally.check("streamed" if stream else "whole", right, (status, text, case.text))
            tally.outcomes["ties"] += right and text != case.text


def memory(server: Server) -> int:
    """Return the resident memory of the server's process in KiB."""
    command = ["ps", "-o", "rss=", "-p", str(server.process.pid)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


async def load(server: Server, clients: int, seconds: float, *, exact: bool) -> Tally:
    """Let all clients ask; return what happened."""
    tally = Tally()
    async with httpx2.AsyncClient(base_url=server.url, timeout=120) as client:
        cases = [await alone(client, path, body) for path, body in bodies()]
    started = time.monotonic()
    tasks = [
        asyncio.create_task(run_client(i, server.url, cases, started + seconds, tally, exact=exact))
        for i in range(clients)
    ]
    await asyncio.sleep(WARM_UP * seconds)
    before = memory(server)
    await asyncio.gather(*tasks)
    after = memory(server)
    click.echo(f"memory {before} KiB, in the end {after} KiB")
    tally.check("memory", after <= before * GROWTH, (before, after))
    return tally


def check_end(server: Server, tally: Tally) -> None:
    """Check that nothing waits or runs any more, and that the server ends as it should."""
    server.wait_until("running_requests", 0)
    tally.check("queue", server.metric("queue_requests") == 0)
    metrics = httpx2.get(server.url.removesuffix("/v1") + "/metrics").text
    tally.check("no 500", 'status="500"' not in metrics, metrics)
    tally.check("exit", server.end() == 0 and "Traceback" not in server.said, server.said)


def check_restart(pair: tuple[Path, Path], options: list[str], tally: Tally) -> None:
    """Kill a server in the middle of an answer; the next on its port must serve at once."""
    with serving(*pair, *options) as server, server.client() as client:
        next(client.completions.create(model=pair[0].stem, prompt="Once", stream=True))
        port = str(httpx2.URL(server.url).port)
        server.process.kill()
        server.process.wait()
    with serving(*pair, *options, "--port", port) as server, server.client() as client:
        reply = client.completions.create(model=pair[0].stem, prompt="Once", max_tokens=3)
        tally.check("restart", bool(reply.choices[0].text), reply)


@click.command()
@click.option("--seconds", default=120.0, show_default=True)
@click.option("--clients", default=32, show_default=True)
@click.option("--exact", is_flag=True, help="Serve in exact mode, and allow no ties.")
def main(seconds: float, clients: int, exact: bool) -> None:
    """Run all checks; exit with 1 if one fails."""
    options = ["--queue", str(2 * clients), *(["--exact"] if exact else [])]
    with tempfile.TemporaryDirectory() as folder:
        pair = (
            tiny.write_chat_model(Path(folder) / "target.gguf", seed=3),
            tiny.write_chat_model(Path(folder) / "draft.gguf", seed=3, blur=0.1),
        )
        with serving(*pair, *options) as server:
            tally = asyncio.run(load(server, clients, seconds, exact=exact))
            check_end(server, tally)
        check_restart(pair, options, tally)
    click.echo(", ".join(f"{count} {name}" for name, count in tally.outcomes.items()))
    for fault in tally.faults[:20]:
        click.echo(f"WRONG {fault}")
    raise SystemExit(1 if tally.faults else 0)


if __name__ == "__main__":
    main()
