"""What a request says about sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from operator import index

from lspec.errors import RequestError

Bias = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a row of logits becomes a distribution, in llama.cpp's order and with its defaults.

    First logit bias and penalties change the logits: `logit_bias` is added (-inf bans a token);
    what the last `penalty_last_n` tokens (-1: all), the prompt's included, contain is divided by
    `repeat_penalty` (multiplied where the logit is negative) and lowered by `presence_penalty` and,
    for each time, by `frequency_penalty`. Then tokens are left out: top-n-sigma, top-k, typical,
    top-p of what is left, min-p. Then comes the temperature.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0, `typical_p` 1, `top_n_sigma` 0,
    `repeat_penalty` 1 and the other penalties 0 switch a step off. Raises RequestError.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    logit_bias: Mapping[int, float] | Bias = ()  # kept as Bias

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        for field in fields(self):
            if field.name != "logit_bias":
                self._check(field.name, getattr(self, field.name))

    def _check(self, name: str, value: float) -> None:
        meaning, holds = _MEANING[name]
        whole = name in ("top_k", "penalty_last_n")
        if not isinstance(value, Real):
            raise RequestError(f"{name} must be a number, not {value!r}")
        if not (math.isfinite(value) and holds(value) and (not whole or value == int(value))):
            raise RequestError(f"{name} must be {meaning}, not {value}")

    @property
    def looks_back(self) -> bool:
        """Whether the distribution depends on earlier tokens beyond the row itself."""
        return self.penalty_last_n != 0 and (
            self.repeat_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        )


_MOST = 1e6  # that is added to a logit: no float32 overflows

_MEANING: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("0 or more", lambda x: x >= 0),
    "top_k": ("0 (off) or more", lambda x: x >= 0),
    "top_p": ("above 0 and at most 1 (off)", lambda x: 0 < x <= 1),
    "min_p": ("between 0 (off) and 1", lambda x: 0 <= x <= 1),
    "typical_p": ("above 0 and at most 1 (off)", lambda x: 0 < x <= 1),
    "top_n_sigma": ("0 (off) or more", lambda x: x >= 0),
    "repeat_penalty": ("between 0.001 and 1000; 1 is off", lambda x: 1e-3 <= x <= 1e3),
    "frequency_penalty": ("between -1e6 and 1e6; 0 is off", lambda x: abs(x) <= _MOST),
    "presence_penalty": ("between -1e6 and 1e6; 0 is off", lambda x: abs(x) <= _MOST),
    "penalty_last_n": ("0 (off) or more, or -1 (all)", lambda x: x >= -1),
}


def _bias(bias: Mapping[int, float] | Bias) -> Bias:
    """Return a logit bias as pairs in ascending order of ids. Raises RequestError."""
    try:
        ids = {k: int(k) if isinstance(k, str) else index(k) for k in dict(bias)}
        pairs = sorted((ids[k], float(v)) for k, v in dict(bias).items())
    except (TypeError, ValueError):
        raise RequestError(f"logit_bias maps token ids to numbers, {bias!r} does not") from None
    if not all(i >= 0 and (abs(value) <= _MOST or value == -math.inf) for i, value in pairs):
        raise RequestError("logit_bias maps token ids (0 or more) to -1e6 to 1e6, or to -inf")
    return tuple(pairs)
