"""What a generation cost and yielded."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lspec.round import Round, Source

_MOSTLY = 0.75  # of the rounds, that an answer is called mostly plain


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts and seconds of one generation; ratios are None where they are undefined."""

    prompt_tokens: int
    reused_tokens: int  # of the prompt, found in the target's cache
    generated_tokens: int  # end-of-generation token excluded
    rounds: int  # passes of the target after the prompt
    drafted: int
    accepted: int
    acceptance_rate: float | None  # alpha: accepted / (accepted + rejections)
    accepted_fraction: float | None  # accepted / drafted
    block_efficiency: float | None  # tau: tokens per target pass, an end token counted
    prompt_s: float
    draft_s: float  # inside the draft's passes, prompt excluded
    target_s: float  # inside the target's passes, prompt excluded
    total_s: float  # decoding inside the engine, prompt and consumer excluded
    tokens_per_s: float | None  # generated_tokens / total_s
    exact: bool  # passes of one width class only
    rule: str  # of verification
    gamma: int | str  # as asked for
    plain_rounds: dict[str, int]  # without drafted tokens, by reason (lspec.round.Plain)
    forced: int  # of the drafted tokens, those that a grammar left no choice about

    def line(self) -> str:
        """Return the one line that is shown after an answer."""
        parts = [f"{self.generated_tokens} token{'' if self.generated_tokens == 1 else 's'}"]
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tok/s")
        if self.block_efficiency is not None:
            parts.append(f"{self.block_efficiency:.2f} per round")
        cost = self.plain_rounds.get("cost", 0)
        if self.rounds and (not self.drafted or cost > _MOSTLY * self.rounds):
            plain = "mostly plain" if self.drafted else "plain"
            why = " (drafting did not pay)" if cost > self.rounds / 2 else ""
            parts.append(plain + why)
        elif self.acceptance_rate is not None:
            parts.append(f"alpha {self.acceptance_rate:.2f}")
        return ", ".join(parts)


@dataclass(slots=True)
class Tally:
    """Adds up rounds while they happen."""

    exact: bool = False
    rule: str = "block"
    gamma: int | str = "auto"
    rounds: int = 0
    emitted: int = 0  # tokens, an end-of-generation token included
    drafted: int = 0
    accepted: int = 0
    rejections: int = 0
    draft_s: float = 0.0
    target_s: float = 0.0
    total_s: float = 0.0
    prompt_s: float = 0.0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    plain_rounds: Counter[str] = field(default_factory=Counter)
    forced: int = 0

    def add(self, round: Round) -> None:
        """Count one round."""
        self.rounds += 1
        self.emitted += len(round.tokens)
        self.drafted += round.drafted
        self.accepted += round.accepted
        self.rejections += round.rejected
        self.draft_s += round.draft_s
        self.target_s += round.target_s
        self.forced += round.proposed.count(Source.GRAMMAR)
        if round.plain is not None:
            self.plain_rounds[round.plain.value] += 1

    def stats(self, *, generated_tokens: int) -> Stats:
        """Return the sums with their ratios."""
        return Stats(
            prompt_tokens=self.prompt_tokens,
            reused_tokens=self.reused_tokens,
            generated_tokens=generated_tokens,
            rounds=self.rounds,
            drafted=self.drafted,
            accepted=self.accepted,
            acceptance_rate=_ratio(self.accepted, self.accepted + self.rejections),
            accepted_fraction=_ratio(self.accepted, self.drafted),
            block_efficiency=_ratio(self.emitted, self.rounds),
            prompt_s=self.prompt_s,
            draft_s=self.draft_s,
            target_s=self.target_s,
            total_s=self.total_s,
            tokens_per_s=_ratio(generated_tokens, self.total_s),
            exact=self.exact,
            rule=self.rule,
            gamma=self.gamma,
            plain_rounds=dict(self.plain_rounds),
            forced=self.forced,
        )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
