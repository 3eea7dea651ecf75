#!/usr/bin/env python
"""Check that every answer under a JSON schema is valid, and compare the speed with plain decoding.

Chats about many topics are answered at temperature 1 under one bounded schema, with and without
speculation in turn. Every answer must be whole, parse and fit the schema.

    scripts/check_json_schema.py [--count 200] [--gamma auto] [--pair NAME | --target F --draft F]
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import click

import lspec
from lspec.engine import Engine
from lspec.request import Gamma
from lspec.round import Source

NAME = {"type": "string", "minLength": 1, "maxLength": 30}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": NAME,
        "kind": {"enum": ["person", "place", "event", "thing", "idea"]},
        "year": {"type": "integer", "minimum": -3000, "maximum": 2100},
        "famous": {"type": "boolean"},
        "tags": {"type": "array", "items": NAME, "minItems": 1, "maxItems": 4},
        "summary": {"type": "string", "maxLength": 160},
        "parts": {
            "type": "array",
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "name": NAME,
                    "share": {"type": "integer", "minimum": 0, "maximum": 100},
                    "origin": {
                        "type": "object",
                        "properties": {"country": NAME, "century": {"enum": [None, 18, 19, 20]}},
                        "required": ["country", "century"],
                        "additionalProperties": False,
                    },
                },
                "required": ["name", "share", "origin"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["name", "kind", "year", "famous", "tags", "summary", "parts"],
    "additionalProperties": False,
}

TOPICS = (
    "the bicycle",
    "a lighthouse",
    "Ada Lovelace",
    "the moon landing",
    "sourdough bread",
    "the river Danube",
    "chess",
    "the violin",
    "the theory of evolution",
    "Kyoto",
    "quicksort",
    "a thunderstorm",
    "the printing press",
    "Marie Curie",
    "coffee",
    "the Olympic Games",
    "a steam engine",
    "the number zero",
    "penguins",
    "the Silk Road",
)
ASKED = "Describe {} as a JSON object with the keys name, kind, year, famous, tags, summary, parts."

TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Say whether `value` is valid under `schema`, as far as SCHEMA goes."""
    if "enum" in schema:
        return value in schema["enum"]
    if type(value) is not TYPES[schema["type"]]:
        return False
    if isinstance(value, dict):
        members = schema["properties"]
        whole = set(schema["required"]) <= value.keys() <= members.keys()
        return whole and all(fits(value[key], members[key]) for key in value)
    if isinstance(value, list):
        few = schema.get("minItems", 0) <= len(value) <= schema["maxItems"]
        return few and all(fits(item, schema["items"]) for item in value)
    if isinstance(value, str):
        return bool(schema.get("minLength", 0) <= len(value) <= schema["maxLength"])
    return isinstance(value, bool) or bool(schema["minimum"] <= value <= schema["maximum"])


def is_valid(text: str) -> bool:
    """Say whether an answer parses and fits."""
    try:
        return fits(json.loads(text), SCHEMA)
    except ValueError:
        return False


@dataclass
class Side:
    """The answers with one gamma."""

    gamma: Gamma
    seconds: float = 0.0
    invalid: int = 0
    tokens: Counter[Source] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        """Tokens per second of decoding."""
        return self.tokens.total() / self.seconds

    def answer(self, engine: Engine, topic: str, seed: int) -> None:
        """Answer one chat and check the answer."""
        *chunks, last = engine.stream_chat(
            [{"role": "user", "content": ASKED.format(topic)}],
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=seed,
            gamma=self.gamma,
            response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        )
        done = last.completion
        assert done is not None
        self.seconds += done.stats.total_s
        for chunk in chunks:
            self.tokens.update(chunk.round.source if chunk.round else ())
        if done.finish_reason != "stop" or not is_valid(done.text):
            self.invalid += 1
            click.echo(f"INVALID: {topic}, seed {seed}, gamma {self.gamma}: {done.text!r}")


def report(sides: Sequence[Side], count: int) -> None:
    """Print both speeds, their ratio and where the tokens came from."""
    plain, fast = sides
    for side in sides:
        click.echo(
            f"gamma {side.gamma}: {count - side.invalid} of {count} answers are valid, "
            f"{side.tokens.total()} tokens, {side.rate:.2f} tok/s"
        )
    total = fast.tokens.total()
    shares = (f"{source.value} {n / total:.1%}" for source, n in fast.tokens.most_common())
    click.echo(f"ratio {fast.rate / plain.rate:.3f}; tokens come from: {', '.join(shares)}")


@click.command()
@click.option("--count", type=click.IntRange(1), default=200)
@click.option("--gamma", default="auto", help="Of the speculative side: a number, or auto.")
@click.option("--pair", help="A pulled pair (default: the catalogue's default).")
@click.option("--target", type=click.Path())
@click.option("--draft", type=click.Path())
def main(count: int, gamma: str, pair: str | None, target: str | None, draft: str | None) -> None:
    """Answer and exit with 1 if any answer is invalid."""
    sides = [Side(0), Side("auto" if gamma == "auto" else int(gamma))]
    with lspec.load(pair, target=target, draft=draft) as engine:
        for i in range(count):
            topic = TOPICS[i % len(TOPICS)]
            for side in sides if i % 2 else reversed(sides):
                side.answer(engine, topic, seed=i)
            rates = " and ".join(f"{side.rate:.2f}" for side in sides)
            click.echo(f"{i + 1} of {count}, {topic}: {rates} tok/s so far")
    report(sides, count)
    raise SystemExit(1 if any(side.invalid for side in sides) else 0)


if __name__ == "__main__":
    main()
