"""The round loop: draft, verify in one pass of the target, keep what stands, roll back the rest.

Plain decoding is the same loop with a drafter that proposes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from lspec.controller import Controller, Plan
from lspec.drafters import Drafter
from lspec.errors import RollbackError
from lspec.logprobs import token_logprob
from lspec.model import FloatRows, TokenCache
from lspec.round import MAX_GAMMA, Plain, Proposal, Round, Source, TokenLogprob
from lspec.sampling import Sampler
from lspec.verify import Rule


@dataclass(frozen=True, slots=True)
class Decoder:
    """Everything that takes part in a request; `ends` is the end-of-generation set."""

    target: TokenCache
    drafter: Drafter
    sampler: Sampler
    rule: Rule
    controller: Controller
    ends: frozenset[int]
    max_drafted: int = MAX_GAMMA  # per round; 0: plain decoding, and nothing is forced either
    top_logprobs: int | None = None  # how many of the likeliest to report for each token

    def prefill(self, prompt: Sequence[int], should_stop: Callable[[], bool]) -> bool:
        """Bring both caches to `prompt` but its last token; False if stopped before that.

        The last token is evaluated by the first round, which needs its logits.
        """
        self.target.reuse(prompt[:-1])
        if not self.target.catch_up(prompt[:-1], should_stop):
            return False
        self.drafter.start(prompt, should_stop)
        return not should_stop()

    def rounds(
        self, prompt: Sequence[int], *, max_tokens: int, should_stop: Callable[[], bool]
    ) -> Iterator[Round]:
        """Yield rounds after a prefill until an end token, `max_tokens`, the window or a stop.

        Whenever the caller has control, the target's cache holds the whole text but its last token.
        """
        text = list(prompt)
        left = min(max_tokens, self.target.model.n_ctx - len(text))
        while left > 0 and not should_stop():
            try:
                round = self._round(text, left, should_stop)
            except BaseException:
                # A cache that cannot go back is emptied by the next request instead.
                with suppress(RollbackError):
                    self.target.truncate(len(text) - 1)
                    self.drafter.commit(())
                raise
            if round is None:
                return
            text.extend(round.tokens)
            left -= len(round.tokens)
            yield round
            if round.ended:
                return

    def _round(self, text: list[int], left: int, should_stop: Callable[[], bool]) -> Round | None:
        """Play one round after `text`, emitting 1 to `left` tokens; None if it was stopped."""
        draft_s, draft_passes, target_s = self._costs()
        limit = min(left - 1, self.max_drafted)
        forced = Proposal.chosen(self.sampler.forced()[:limit] if limit else (), Source.GRAMMAR)
        outlook = replace(self.drafter.outlook, match=0) if forced.tokens else self.drafter.outlook
        plan = self.controller.plan(limit, outlook)
        proposal = self.drafter.propose(forced, plan, self.controller, self.rule)
        if should_stop():
            self.drafter.commit(())
            return None
        drafted, _ = _up_to_end(proposal.tokens, self.ends)
        n = len(drafted)
        proposal = Proposal(drafted, proposal.q[:n], proposal.source[:n])
        rows = self.target.eval((text[-1], *drafted), rows=1 + len(drafted))
        verdict = self.rule.verify(
            proposal, lambda i: self.sampler.distribution(rows[i], drafted[:i]), len(text)
        )
        tokens, ended = _up_to_end((*drafted[: verdict.accepted], verdict.token), self.ends)
        self.target.truncate(len(text) - 1 + len(tokens))
        self.sampler.accept(tokens)
        self.drafter.commit(tokens)
        draft_s_after, draft_passes_after, target_s_after = self._costs()
        round = Round(
            tokens=tokens,
            source=(*proposal.source[: verdict.accepted], Source.TARGET)[: len(tokens)],
            proposed=proposal.source,
            accepted=verdict.accepted,
            rejected=verdict.accepted < len(drafted),
            ended=ended,
            width=1 + len(drafted),
            draft_steps=draft_passes_after - draft_passes,
            draft_s=draft_s_after - draft_s,
            target_s=target_s_after - target_s,
            plain=None if drafted else self._why_plain(limit, plan),
            logprobs=self._logprobs(rows, tokens),
        )
        self.controller.observe(round)
        return round

    def _why_plain(self, limit: int, plan: Plan) -> Plain:
        if not self.max_drafted:
            return Plain.OFF
        if not limit:
            return Plain.LAST
        return Plain.SOURCE if plan.gamma else Plain.COST

    def _logprobs(self, rows: FloatRows, tokens: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
        if self.top_logprobs is None:
            return ()
        return tuple(
            token_logprob(row, token, self.top_logprobs)
            for row, token in zip(rows, tokens, strict=False)
        )

    def _costs(self) -> tuple[float, int, float]:
        return self.drafter.seconds, self.drafter.passes, self.target.seconds


def _up_to_end(tokens: tuple[int, ...], ends: frozenset[int]) -> tuple[tuple[int, ...], bool]:
    """Cut `tokens` behind the first end-of-generation token; say whether there is one."""
    for i, token in enumerate(tokens):
        if token in ends:
            return tokens[: i + 1], True
    return tokens, False
