"""The settings of a conversation: what `/set` shows and changes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from typing import Any

from lspec.errors import RequestError
from lspec.params import SamplingParams
from lspec.request import Gamma, check_gamma

_LIMITS = ("max_tokens", "seed")  # None: no limit, another seed each time
_SAMPLING = tuple(f.name for f in fields(SamplingParams) if f.name != "logit_bias")
_WHOLE = ("top_k", "penalty_last_n")
_SHORT = re.compile(r"-?\d{1,18}")


class Settings:
    """What an answer is asked for with, beside the messages."""

    def __init__(self, options: dict[str, Any], *, gamma: Gamma) -> None:
        """Begin with the keyword arguments of a request; `gamma` is the engine's own."""
        self._options = {"gamma": gamma, **options}
        self._sampling: SamplingParams = self._options.pop("sampling", SamplingParams())

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of a request."""
        return {**self._options, "sampling": self._sampling}

    @property
    def max_tokens(self) -> int | None:
        """The most tokens of an answer; None: the window."""
        return self._options.get("max_tokens")

    def lines(self) -> Iterator[str]:
        """Yield each setting that can be changed, with its value."""
        for name in (*_SAMPLING, "gamma", *_LIMITS):
            yield self.line(name)

    def line(self, name: str) -> str:
        """Return the setting `name`, written with - or _, with its value. Raises RequestError."""
        name = _known(name)
        value = {**dict.fromkeys(_LIMITS), **asdict(self._sampling), **self._options}[name]
        return f"{_written(name)} {'none' if value is None else value}"

    def change(self, name: str, value: str) -> None:
        """Give the setting `name` the value written as `value`. Raises RequestError."""
        name = _known(name)
        if name in _SAMPLING:
            number = _number(name, value, int if name in _WHOLE else float)
            try:
                self._sampling = replace(self._sampling, **{name: number})
            except RequestError as error:
                raise RequestError(str(error).replace(name, _written(name))) from None
        elif name == "gamma":
            self._options[name] = check_gamma(int(value) if _SHORT.fullmatch(value) else value)
        elif value == "none":
            self._options.pop(name, None)
        else:
            self._options[name] = _limit(name, value)


def _known(name: str) -> str:
    """Return the name of a setting as Python writes it. Raises RequestError."""
    names = (*_SAMPLING, "gamma", *_LIMITS)
    if (known := name.lower().replace("-", "_")) in names:
        return known
    close = get_close_matches(known, names, n=1)
    hint = f"Did you mean {_written(close[0])}?" if close else "/set lists them."
    raise RequestError(f"there is no setting {name!r}", hint=hint)


def _limit(name: str, text: str) -> int:
    least, none = (1, "no limit") if name == "max_tokens" else (0, "another one each time")
    number = int(text) if _SHORT.fullmatch(text) else -1
    if number < least:
        raise RequestError(
            f"{_written(name)} must be a number of {least} or more, not {text}",
            hint=f"none: {none}.",
        )
    return number


def _written(name: str) -> str:
    return name.replace("_", "-")


def _number(name: str, text: str, kind: type[Any]) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise RequestError(f"{_written(name)}: {text!r} is not a number") from None
