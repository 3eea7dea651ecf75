"""A decoder put together for a test, and the texts and samples that come out of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from lspec.controller import Controller, FixedGamma
from lspec.decoder import Decoder
from lspec.drafters import Drafter, ModelDrafter, NoDrafter
from lspec.model import LanguageModel, TokenCache
from lspec.params import SamplingParams
from lspec.round import Round
from lspec.sampling import ChainSampler, Sampler
from lspec.verify import Noise, RejectionRule, Rule

PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
GREEDY = SamplingParams(temperature=0.0)

MakeRule = Callable[[Noise], Rule]
MakeDrafter = Callable[[TokenCache, Sampler], Drafter]


def never() -> bool:
    return False


@dataclass
class Loop:
    """Target and draft with their caches, and how to sample from them; requests share the caches.

    `make_rule` and `make_drafter` put a wrong variant in the place of the real one.
    """

    target: LanguageModel
    draft: LanguageModel | None = None
    gamma: int = 4
    params: SamplingParams = PLAIN
    draft_params: SamplingParams | None = None  # None: the target's
    ends: frozenset[int] = frozenset()
    make_rule: MakeRule = RejectionRule
    make_drafter: MakeDrafter | None = None
    make_controller: Callable[[int], Controller] = FixedGamma
    target_cache: TokenCache = field(init=False)
    draft_cache: TokenCache = field(init=False)

    def __post_init__(self) -> None:
        self.target_cache = TokenCache(self.target)
        self.draft_cache = TokenCache(self.draft or self.target)

    def decoder(self, seed: int, *, sampler: Sampler | None = None) -> Decoder:
        own = ChainSampler(self.params, n_vocab=self.target.n_vocab)
        return Decoder(
            target=self.target_cache,
            drafter=self._drafter(own),
            sampler=sampler or own,
            rule=self.make_rule(Noise(seed)),
            controller=self.make_controller(self.gamma),
            ends=self.ends,
        )

    def _drafter(self, own: ChainSampler) -> Drafter:
        if self.draft is None and self.make_drafter is None:
            return NoDrafter()
        shared = min(self.target.n_vocab, self.draft_cache.model.n_vocab)
        sampler = own.for_draft(shared)
        if self.draft_params is not None:
            sampler = ChainSampler(self.draft_params, n_vocab=shared)
        if self.make_drafter is not None:
            return self.make_drafter(self.draft_cache, sampler)
        return ModelDrafter(self.draft_cache, sampler, ends=self.ends)

    def rounds(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        seed: int = 0,
        should_stop: Callable[[], bool] = never,
        sampler: Sampler | None = None,
    ) -> list[Round]:
        decoder = self.decoder(seed, sampler=sampler)
        if not decoder.prefill(prompt, should_stop):
            return []
        return list(decoder.rounds(prompt, max_tokens=max_tokens, should_stop=should_stop))

    def text(self, prompt: Sequence[int], *, max_tokens: int, seed: int = 0) -> tuple[int, ...]:
        """Return the emitted tokens."""
        return joined(self.rounds(prompt, max_tokens=max_tokens, seed=seed))

    def sample(
        self,
        prompt: Sequence[int],
        *,
        n: int,
        samples: int,
        sampler: Callable[[], Sampler] | None = None,
    ) -> Counter[Hashable]:
        """Count the first `n` emitted tokens of `samples` requests with seeds 0, 1, ...

        The requests ask for more tokens than `n`, so that no round is shortened before it counts.
        """
        counts: Counter[Hashable] = Counter()
        for seed in range(samples):
            decoder = self.decoder(seed, sampler=sampler() if sampler else None)
            decoder.prefill(prompt, never)
            tokens: tuple[int, ...] = ()
            rounds = decoder.rounds(prompt, max_tokens=n + self.gamma + 1, should_stop=never)
            for round in islice(rounds, n):
                tokens += round.tokens
                if len(tokens) >= n:
                    break
            counts[tokens[:n]] += 1
        return counts


def joined(rounds: Sequence[Round]) -> tuple[int, ...]:
    return tuple(token for round in rounds for token in round.tokens)
