"""How many tokens to draft next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lspec.round import Round
from lspec.sampling import Distribution


@dataclass(frozen=True, slots=True)
class Plan:
    """What the next round should try: at most `gamma` drafted tokens."""

    gamma: int


class Controller(Protocol):
    """Steers drafting. It may see distributions and past rounds, never a drawn token."""

    def plan(self, limit: int) -> Plan:
        """Decide on the next round; more than `limit` drafted tokens could not be used."""

    def go_on(self, q: Distribution | None, drafted: int) -> bool:
        """Say whether to draft one more token from `q` after `drafted` ones of this round.

        Asked before the token is drawn: stopping afterwards because of what was drawn would bias
        the output. `q` is None where the token is chosen, not drawn.
        """

    def observe(self, round: Round) -> None:
        """Learn from a finished round."""


class FixedGamma:
    """Always `gamma` tokens, or as many as can be used; 0 is plain decoding."""

    def __init__(self, gamma: int) -> None:
        self._gamma = gamma

    def plan(self, limit: int) -> Plan:
        """Plan min(gamma, limit) tokens."""
        return Plan(min(self._gamma, limit))

    def go_on(self, q: Distribution | None, drafted: int) -> bool:
        """Go on: the plan's length is the only bound."""
        return True

    def observe(self, round: Round) -> None:
        """Learn nothing."""
