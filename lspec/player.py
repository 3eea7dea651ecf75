"""Playing requests on the caches of a pair: what drafts, what verifies, and what passes cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Literal

from lspec.adaptive import AdaptiveGamma
from lspec.controller import FixedGamma
from lspec.costs import Costs
from lspec.decoder import Decoder
from lspec.drafters import Drafter, HybridDrafter, LookupDrafter, ModelDrafter, NoDrafter
from lspec.exact import ChunkedCache, ExactModel
from lspec.llama import LlamaModel
from lspec.measured import costs_of
from lspec.model import TokenCache
from lspec.request import Answer, Chunk, Request
from lspec.round import MAX_GAMMA
from lspec.sampling import ChainSampler
from lspec.stats import Tally
from lspec.turn import Turn
from lspec.verify import RULES, Noise

DrafterName = Literal["auto", "model", "ngram", "none"]


class Player:
    """The caches of a target and maybe a draft. They play one request at a time.

    `widths` are those that exact mode keeps to; None: any.
    """

    def __init__(
        self,
        target: LlamaModel,
        draft: LlamaModel | None,
        *,
        drafter: DrafterName,
        widths: Sequence[int] | None,
    ) -> None:
        self.models = [target] if draft is None else [target, draft]
        if widths is None:
            self.target = TokenCache(target)
        else:
            self.target = ChunkedCache(ExactModel(target, widths))
        self.widths = widths
        self.max_width = MAX_GAMMA + 1 if widths is None else max(widths)
        self.draft = None if draft is None else TokenCache(draft)
        self.turn = Turn()
        self._vocab = target.vocab
        self._drafter = drafter
        self._lookup = LookupDrafter()
        self._adaptive: AdaptiveGamma | None = None

    def close(self) -> None:
        """Free both models, after the generation of another thread if there is one."""
        with nullcontext() if self.turn.mine else self.turn.take():
            for model in self.models:
                model.close()

    @property
    def costs(self) -> Costs:
        """What passes cost on this machine, measured now or remembered; empties the caches."""
        with self.turn.take():
            return self._learned().costs

    def _learned(self) -> AdaptiveGamma:
        """Return the controller of all requests whose gamma is "auto": it learns over the session.

        The first call times passes, and whoever calls has the turn.
        """
        if self._adaptive is None:
            self._forget()
            draft = None if self.draft is None else self.draft.model
            costs = costs_of(self.target.model, draft, self._identity, widest=self.max_width)
            self._adaptive = AdaptiveGamma(costs)
        return self._adaptive

    def _identity(self) -> object:
        return [self.widths, *(model.identity() for model in self.models)]

    def why_no_draft(self) -> str | None:
        """Return in numbers why gamma "auto" leaves the draft model alone; None if it does not."""
        with self.turn.take():
            adaptive = self._learned()
        costs, c = adaptive.costs, adaptive.costs.cost_coefficient
        if c is None or adaptive.pays_at_best():
            return None
        return (
            f"drafting with the model does not pay on this machine: a pass over 5 tokens costs "
            f"{costs.verify_cost(4):.1f} single steps, and a draft step {c:.2f}"
        )

    def forget(self) -> None:
        """Empty the caches: the next prompt is evaluated from its start."""
        with self.turn.take():
            self._forget()

    def play(self, request: Request, answer: Answer) -> Iterator[Chunk]:
        """Play `request`. The time between chunks is the consumer's and is not counted."""
        with self.turn.take(request.should_stop) as mine:
            tally = Tally(
                exact=self.widths is not None,
                rule=request.rule,
                gamma=request.gamma,
                prompt_tokens=len(request.prompt),
            )
            decoder = self._decoder(request) if mine else None
            if decoder and self._prefill(decoder, request, tally):
                started = perf_counter()
                for round in decoder.rounds(
                    request.prompt, max_tokens=request.max_tokens, should_stop=request.should_stop
                ):
                    tally.add(round)
                    chunk = answer.add(round)
                    tally.total_s += perf_counter() - started
                    yield chunk
                    if answer.complete:
                        break
                    started = perf_counter()
            yield answer.finish(tally)

    def _prefill(self, decoder: Decoder, request: Request, tally: Tally) -> bool:
        started = perf_counter()
        if not request.reuse:
            self._forget()
        tally.reused_tokens = self.target.reuse(request.prompt[:-1])
        finished = decoder.prefill(request.prompt, request.should_stop)
        tally.prompt_s = perf_counter() - started
        return finished

    def _forget(self) -> None:
        for cache in filter(None, (self.target, self.draft)):
            cache.truncate(0)

    def _decoder(self, request: Request) -> Decoder:
        gamma = request.gamma
        sampler = ChainSampler(
            request.sampling,
            n_vocab=self.target.model.n_vocab,
            text=request.prompt,
            constraint=request.constraint,
        )
        return Decoder(
            target=self.target,
            drafter=self._choose_drafter(request, sampler) if gamma else NoDrafter(),
            sampler=sampler,
            rule=RULES[request.rule](Noise(request.seed)),
            controller=self._learned() if gamma == "auto" else FixedGamma(gamma),
            ends=self._vocab.ends,
            max_drafted=self.max_width - 1 if gamma else 0,
            top_logprobs=request.logprobs,
        )

    def _choose_drafter(self, request: Request, sampler: ChainSampler) -> Drafter:
        """Choose by name; "auto" copies as well where the controller can tell when that pays."""
        if self._drafter == "ngram" or self.draft is None:
            return self._lookup
        shared = min(self.target.model.n_vocab, self.draft.model.n_vocab)
        model = ModelDrafter(self.draft, sampler.for_draft(shared), ends=self._vocab.ends)
        if self._drafter == "auto" and request.gamma == "auto":
            return HybridDrafter(self._lookup, model)
        return model
