"""One generation: what was asked for, and the answer while it grows."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from operator import index
from typing import Any, Literal, TypedDict

from lspec.errors import ContextOverflowError, RequestError
from lspec.params import SamplingParams
from lspec.round import MAX_GAMMA, Round, Source, TokenLogprob
from lspec.sampling import Constraint
from lspec.stats import Stats, Tally
from lspec.text import TextStream
from lspec.thinking import Split, ThoughtStream
from lspec.verify import RULES, RuleName

MAX_LOGPROBS = 100
RANDOM = -1  # a seed that stands for any, as in llama.cpp

Gamma = int | Literal["auto"]
FinishReason = Literal["stop", "length", "interrupted"]


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of `Engine.generate`, `stream`, `chat` and `stream_chat`.

    Defaults: SamplingParams; no limit but the window; no stop strings; a random seed; the engine's
    gamma and rule; reuse of what the caches hold; no log-probabilities; any text.
    """

    sampling: SamplingParams  # or its fields one by one:
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalty_last_n: int
    logit_bias: Mapping[int, float]
    max_tokens: int | None
    stop: str | Sequence[str] | None
    seed: int | None  # None or -1: a random one
    gamma: Gamma | None  # drafted tokens per round; 0 decodes plainly
    rule: RuleName | None  # how drafted tokens are verified
    logprobs: int | None  # report each token's log-probability and so many of the likeliest
    response_format: Mapping[str, Any] | None  # a grammar for the answer; see lspec.grammar
    reuse: bool  # False: evaluate the whole prompt, whatever the caches hold
    thoughts: bool  # tell what is thought from what is answered; so by default in chats alone
    should_stop: Callable[[], bool] | None  # read before every pass; True: "interrupted"


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request."""

    prompt: Sequence[int]
    sampling: SamplingParams
    max_tokens: int  # what the window leaves, at most
    stop: tuple[str, ...]
    seed: int
    gamma: Gamma
    rule: RuleName
    logprobs: int | None
    response_format: Mapping[str, Any] | None
    reuse: bool
    thoughts: bool
    should_stop: Callable[[], bool]
    constraint: Constraint | None = None  # what `response_format` means for this request


def check_request(
    prompt: Sequence[int],
    options: RequestOptions,
    *,
    n_ctx: int,
    n_vocab: int,
    gamma: Gamma,
    rule: RuleName,
) -> Request:
    """Fill in defaults and refuse what cannot be done. Raises RequestError, ContextOverflowError.

    `gamma` and `rule` are the engine's own, for a request that does not say.
    """
    if unknown := options.keys() - RequestOptions.__annotations__.keys():
        close = get_close_matches(min(unknown), RequestOptions.__annotations__, n=1)
        hint = f": did you mean {close[0]}?" if close else ""
        raise TypeError(f"unknown option {min(unknown)!r}{hint}")
    prompt = _token_ids(prompt)
    if not prompt:
        raise RequestError("the prompt is empty")
    if not all(0 <= token < n_vocab for token in prompt):
        raise RequestError("the prompt has a token id outside the vocabulary")
    if len(prompt) >= n_ctx:
        raise ContextOverflowError(
            f"the prompt has {len(prompt)} tokens and the window {n_ctx}: no room for an answer",
            hint="Shorten the prompt, or load with a larger window (n_ctx=N).",
        )
    sampling = _sampling(options)
    if any(token >= n_vocab for token in dict(sampling.logit_bias)):
        raise RequestError("logit_bias has a token id outside the vocabulary")
    max_tokens, seed = options.get("max_tokens"), options.get("seed")
    room = n_ctx - len(prompt)
    if max_tokens is not None:
        room = min(room, whole_number("max_tokens", max_tokens))
    asked = options.get("gamma")
    return Request(
        prompt=prompt,
        sampling=sampling,
        max_tokens=room,
        stop=_stops(options.get("stop")),
        seed=secrets.randbits(32) if seed in (None, RANDOM) else _whole("seed", seed),
        gamma=gamma if asked is None else check_gamma(asked),
        rule=check_rule(options.get("rule") or rule),
        logprobs=_logprobs(options.get("logprobs")),
        response_format=options.get("response_format"),
        reuse=options.get("reuse", True),
        thoughts=options.get("thoughts", False),
        should_stop=options.get("should_stop") or (lambda: False),
    )


def check_gamma(gamma: int | str) -> Gamma:
    """Return `gamma` if it can be used. Raises RequestError."""
    if gamma == "auto":
        return "auto"
    if isinstance(gamma, str) or not 0 <= _whole("gamma", gamma) <= MAX_GAMMA:
        raise RequestError(f"gamma must be 'auto' or between 0 and {MAX_GAMMA}, not {gamma!r}")
    return _whole("gamma", gamma)


def check_rule(rule: str) -> RuleName:
    """Return `rule` if there is one of that name. Raises RequestError."""
    for known in RULES:
        if rule == known:
            return known
    raise RequestError(f"rule must be block or rejection, not {rule!r}")


def _logprobs(count: int | None) -> int | None:
    if count is None:
        return None
    if not 0 <= _whole("logprobs", count) <= MAX_LOGPROBS:
        raise RequestError(f"logprobs must be between 0 and {MAX_LOGPROBS}, not {count}")
    return _whole("logprobs", count)


def whole_number(name: str, value: int) -> int:
    """Return `value` if it is a whole number of 0 or more. Raises RequestError."""
    if _whole(name, value) < 0:
        raise RequestError(f"{name} must be 0 or more, not {value}")
    return _whole(name, value)


def _whole(name: str, value: int) -> int:
    """Return a number of any integer type as an int."""
    try:
        return index(value)
    except TypeError:
        raise RequestError(f"{name} must be a whole number, not {value!r}") from None


def _token_ids(prompt: Sequence[int]) -> list[int]:
    if isinstance(prompt, bytes | str) or not isinstance(prompt, Iterable):
        raise RequestError(f"a prompt is a text or token ids, not {type(prompt).__name__}")
    return [_whole("a token id", token) for token in prompt]


def _stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop or ()
    if not isinstance(stops, Iterable):
        raise RequestError("stop is a text or several")
    stops = tuple(stops)
    if not all(isinstance(s, str) for s in stops):
        raise RequestError("a stop string is a text")
    return stops


def _sampling(options: RequestOptions) -> SamplingParams:
    """Return `options["sampling"]`, or what its fields say when they are given one by one."""
    fields = {k: v for k, v in options.items() if k in SamplingParams.__dataclass_fields__}
    if options.get("sampling") is None:
        return SamplingParams(**fields)  # type: ignore[arg-type]
    if fields:
        raise RequestError(f"give `sampling` or {', '.join(fields)}, not both")
    if not isinstance(options["sampling"], SamplingParams):
        raise RequestError("`sampling` is a SamplingParams")
    return options["sampling"]


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer. `tokens` are the ids of `text`, end-of-generation token excluded.

    `text` is all that the model wrote; of it, `reasoning` is what it thought and `answer` the rest.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
    seed: int
    logprobs: tuple[TokenLogprob, ...] = ()  # of `tokens`, where they were asked for
    split: Split | None = None  # None: no thoughts were looked for
    thought_tokens: int = 0  # how many of `tokens` are a thought and its markers

    @property
    def reasoning(self) -> str:
        """What was thought, without markers; empty where nothing was."""
        return self.split.reasoning if self.split else ""

    @property
    def answer(self) -> str:
        """The text behind the thought."""
        return self.split.answer if self.split else self.text


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one round added to a stream: pieces of text, each with the source of its token.

    The last chunk brings what had been held back and the whole `completion`; its `round` is None.
    """

    pieces: tuple[tuple[str, Source], ...]
    round: Round | None = None
    completion: Completion | None = None
    splits: tuple[Split, ...] = ()  # what became certain with each piece, if thoughts are told

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """The log-probabilities of the tokens of this chunk, one for each piece."""
        return () if self.round is None else self.round.logprobs[: len(self.pieces)]

    @property
    def text(self) -> str:
        """The text of all pieces; joined over a stream it is the completion's text."""
        return "".join(text for text, _ in self.pieces)

    @property
    def parts(self) -> tuple[tuple[Split, Source], ...]:
        """What was thought and answered with each piece, with the source of its token."""
        splits = self.splits or tuple(Split(answer=text) for text, _ in self.pieces)
        sources = (source for _, source in self.pieces)
        return tuple(zip(splits, sources, strict=True))

    @property
    def reasoning(self) -> str:
        """What this chunk adds to the completion's `reasoning`."""
        return "".join(split.reasoning for split, _ in self.parts)

    @property
    def answer(self) -> str:
        """What this chunk adds to the completion's `answer`."""
        return "".join(split.answer for split, _ in self.parts)


@dataclass(slots=True)
class Answer:
    """The tokens and the text of a request so far; `thoughts` tells thought from answer."""

    request: Request
    piece: Callable[[int], bytes]
    thoughts: ThoughtStream | None = None
    text: TextStream = field(init=False)
    tokens: list[int] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    splits: list[Split] = field(default_factory=list)
    thought_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ended: bool = False

    def __post_init__(self) -> None:
        """Raise RequestError for an empty stop string."""
        self.text = TextStream(self.request.stop)

    @property
    def complete(self) -> bool:
        """Whether an end token or a stop string has come."""
        return self.ended or self.text.stopped

    def add(self, round: Round) -> Chunk:
        """Take a round's tokens, as far as they lie before the end."""
        pieces: list[tuple[str, Source]] = []
        known = len(self.splits)
        for token, source in zip(round.tokens, round.source, strict=True):
            if self.text.stopped or (round.ended and len(pieces) == len(round.tokens) - 1):
                break
            self.tokens.append(token)
            pieces.append((self.text.push(self.piece(token)), source))
            self._split(pieces[-1][0])
        self.ended = round.ended
        self.logprobs += round.logprobs[: len(pieces)]
        self.parts += (text for text, _ in pieces)
        return Chunk(tuple(pieces), round, splits=tuple(self.splits[known:]))

    def finish(self, tally: Tally) -> Chunk:
        """Release what was held back and return the last chunk."""
        rest = self.text.finish()
        last = self.thoughts.finish(rest) if self.thoughts else Split(answer=rest)
        self.splits.append(last)
        tokens = tuple(self.tokens[: self.text.tokens_kept])
        reason: FinishReason = "interrupted"
        if self.complete:
            reason = "stop"
        elif len(self.tokens) >= self.request.max_tokens:
            reason = "length"
        completion = Completion(
            text="".join(self.parts) + rest,
            tokens=tokens,
            finish_reason=reason,
            stats=tally.stats(generated_tokens=len(tokens)),
            seed=self.request.seed,
            logprobs=tuple(self.logprobs[: len(tokens)]),
            split=Split(*map("".join, zip(*self.splits, strict=True))) if self.thoughts else None,
            thought_tokens=min(self.thought_tokens, len(tokens)),
        )
        if not (rest or any(last)):
            return Chunk((), completion=completion)
        return Chunk(((rest, Source.TARGET),), completion=completion, splits=(last,))

    def _split(self, text: str) -> None:
        """Tell what is thought and what is answered in the text of the last token."""
        if self.thoughts is None:
            return
        was_thinking = self.thoughts.thinking
        self.splits.append(self.thoughts.push(text))
        if was_thinking or self.thoughts.thinking:
            self.thought_tokens = len(self.tokens)
