"""How many tokens to draft next, and from which source: the interface, and the fixed answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lspec.model import FloatRow
from lspec.round import Round


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a drafter could do next."""

    match: int = 0  # tokens at the end of the text that occurred before, so that a copy may follow
    pending: int = 0  # tokens that the draft model has to read before it can draft; 0: no model


@dataclass(frozen=True, slots=True)
class Plan:
    """What the next round should try: `copied` tokens by lookup, `gamma` in all at most."""

    gamma: int
    copied: int = 0


class Controller(Protocol):
    """Steers drafting. It may see rows of logits and past rounds, never a drawn token.

    Stopping after a draw because of what was drawn would bias the output.
    """

    def plan(self, limit: int, outlook: Outlook) -> Plan:
        """Decide on the next round; more than `limit` drafted tokens could not be used."""

    def afford(self, drafted: int) -> bool:
        """Say whether a pass of the draft model after `drafted` tokens is worth its cost."""

    def go_on(self, row: FloatRow, drafted: int) -> bool:
        """Say whether to draw a token from the draft's logits `row` after `drafted` ones."""

    def observe(self, round: Round) -> None:
        """Learn from a finished round."""


class FixedGamma:
    """Always `gamma` tokens, or as many as can be used; 0 is plain decoding.

    Copies where the last `min_match` tokens occurred before, and asks the draft model elsewhere.
    """

    def __init__(self, gamma: int, *, min_match: int = 2) -> None:
        self._gamma = gamma
        self._min_match = min_match

    def plan(self, limit: int, outlook: Outlook) -> Plan:
        """Plan min(gamma, limit) tokens."""
        gamma = min(self._gamma, limit)
        return Plan(gamma, copied=gamma if outlook.match >= self._min_match else 0)

    def afford(self, drafted: int) -> bool:
        """Say yes: the plan's length is the only bound."""
        return True

    def go_on(self, row: FloatRow, drafted: int) -> bool:
        """Say yes: the plan's length is the only bound."""
        return True

    def observe(self, round: Round) -> None:
        """Learn nothing."""
