"""Grammars that an answer must follow; the only module that imports llguidance.

A response format is one of

    {"type": "text"}                                          any text
    {"type": "json_object"}                                   any JSON object
    {"type": "json_schema", "json_schema": {"schema": {…}}}   JSON of this schema
    {"type": "regex", "regex": "…"}                           what the whole expression matches
    {"type": "choice", "choices": ["…", "…"]}                 one of these texts
    {"type": "grammar", "grammar": "…"}                       a text of this grammar, GBNF or Lark

JSON comes on one line, with one space behind each comma and colon and no other: models write it so
themselves, there is no white space to go round in for ever, and keys leave no choice at all, so
that they need no draft. "x-guidance" in a schema (llguidance's JSON options) may say otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from lspec.distribution import IdArray
from lspec.errors import DecodeError, RequestError
from lspec.llama import Vocab
from lspec.model import common_prefix
from lspec.sampling import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_NO_TEXT = b"\xff"  # before the name of a token that stands for no text
_LONGEST = 300  # characters of a reason

_SHAPES = {
    "text": '{"type": "text"}',
    "json_object": '{"type": "json_object"}',
    "json_schema": '{"type": "json_schema", "json_schema": {"schema": {…}}}',
    "regex": '{"type": "regex", "regex": "…"}',
    "choice": '{"type": "choice", "choices": ["…", "…"]}',
    "grammar": '{"type": "grammar", "grammar": "…"}',
}


class Grammars:
    """Compiles response formats for one vocabulary, which is converted once (about a second)."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab

    def constraint(self, response_format: Mapping[str, Any]) -> Constraint | None:
        """Return a fresh constraint; None for any text.

        Raises RequestError, with llguidance's reason, for what is broken or cannot be followed.
        """
        self._vocab.require_open()
        grammar = check_format(response_format)
        if grammar is None:
            return None
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        try:
            return GrammarConstraint(matcher, self._vocab)
        except DecodeError as error:
            raise _impossible(response_format, str(error)) from None

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        vocab = self._vocab
        if not vocab.ends:
            raise RequestError("this model has no end-of-generation token, so no text is whole")
        no_text = vocab.named | vocab.ends
        tokens = [
            _NO_TEXT + vocab.text(i).encode() if i in no_text else vocab.piece(i)
            for i in range(vocab.n_tokens)
        ]
        pointer, tokenize = vocab.c_tokenizer
        try:
            tokenizer: LLTokenizer = LLTokenizer.from_llamacpp(  # type: ignore[attr-defined]
                tokens=tokens, vocab_ptr=pointer, tokenize_fptr=tokenize, eos_token=_end(vocab)
            )
        except ValueError as error:
            raise RequestError(f"this vocabulary cannot follow a grammar: {error}") from None
        return tokenizer


class GrammarConstraint:
    """One answer's way through a grammar: a Constraint (see lspec.sampling).

    The matcher stands behind the accepted text and some drafted tokens, and goes back and forth to
    where it is asked. End tokens are not given to it.
    """

    def __init__(self, matcher: LLMatcher, vocab: Vocab) -> None:
        """Raise DecodeError where nothing follows the grammar, or it cannot go back."""
        self._matcher = matcher
        self._vocab = vocab
        self._end = _end(vocab)
        self._ends = np.array(sorted(vocab.ends), np.int32)
        self._drafted: list[int] = []  # what the matcher holds behind the accepted text
        self._asked: dict[tuple[int, ...], IdArray | None] = {}  # in this round
        self._try_out()

    def allowed(self, drafted: Sequence[int]) -> IdArray | None:
        """Return what may follow `drafted`; None where `drafted` itself has left the grammar."""
        key = tuple(drafted)
        if key not in self._asked:
            self._asked[key] = self._mask() if self._go_to(key) else None
        return self._asked[key]

    def forced(self, drafted: Sequence[int]) -> tuple[int, ...]:
        """Return the usual tokens of the text that must follow, or an end behind a whole text."""
        if not self._go_to(drafted):
            return ()
        if self._matcher.is_stopped():
            return (self._end,)
        tokens = self._matcher.compute_ff_tokens()
        return tuple(tokens[: self._matcher.validate_tokens(tokens)])

    def accept(self, tokens: Sequence[int]) -> None:
        """Move on behind `tokens`; an end token can only be the last."""
        text = tokens[:-1] if tokens and tokens[-1] in self._vocab.ends else tokens
        if not self._go_to(text):
            raise DecodeError("the text has left its grammar")
        self._drafted.clear()
        self._asked.clear()

    def _go_to(self, drafted: Sequence[int]) -> bool:
        """Bring the matcher behind `drafted`; False, as far as it gets, where that is no text."""
        self._vocab.require_open()
        shared = common_prefix(self._drafted, drafted)
        if shared < len(self._drafted):
            self._matcher.rollback(len(self._drafted) - shared)
            del self._drafted[shared:]
        for token in drafted[shared:]:
            if token in self._vocab.ends or not self._matcher.try_consume_tokens([token]):
                break
            self._drafted.append(token)
        self._require_sound()
        return len(self._drafted) == len(drafted)

    def _mask(self) -> IdArray:
        """Return the ids that may come next, ascending; all end tokens, or none of them."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._require_sound()
        flags = np.unpackbits(bits, count=self._vocab.n_tokens, bitorder="little")
        flags[self._ends] = flags[self._end]
        return np.flatnonzero(flags.view(np.bool_)).astype(np.int32)

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            raise DecodeError(_reason(self._matcher.get_error()))

    def _try_out(self) -> None:
        """Take a first token, and take it back."""
        self._require_sound()
        self._go_to(np.setdiff1d(self._mask(), self._ends)[:1].tolist())
        self._go_to(())


def check_format(response_format: Mapping[str, Any]) -> str | None:
    """Return a response format in llguidance's own language; None for any text.

    No model is needed. Raises RequestError, with llguidance's reason, for what is broken.
    """
    try:
        grammar = _translate(response_format)
        if grammar is None:
            return None
        from llguidance import LLMatcher

        grammar.encode()  # llguidance reads something else into what is no Unicode
    except ModuleNotFoundError:
        hint = "pip install 'lspec[grammar]', or in a clone: scripts/install grammar"
        raise RequestError(
            "to follow a grammar or a schema needs llguidance, which is not installed", hint=hint
        ) from None
    except UnicodeEncodeError:
        raise RequestError("the response_format has half a character (a surrogate)") from None
    if wrong := LLMatcher.validate_grammar(grammar):
        raise _impossible(response_format, _reason(wrong))
    return grammar


def _impossible(response_format: Mapping[str, Any], reason: str) -> RequestError:
    return RequestError(f"this {response_format['type']} cannot be followed: {reason}")


def _translate(response_format: Mapping[str, Any]) -> str | None:
    """Return a response format in llguidance's own language; None for any text."""
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return _from_schema({"type": "object"})
        case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema}}:
            return _from_schema(schema)
        case {"type": "regex", "regex": str(regex)}:
            return _from_regex(regex)
        case {"type": "choice", "choices": [str(), *_] as choices} if _are_texts(choices):
            return _from_regex("|".join(map(_literally, choices)))
        case {"type": "grammar", "grammar": str(grammar)}:
            return _from_grammar(grammar)
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if isinstance(kind, str) and kind in _SHAPES:
        raise RequestError(f"a response_format of type {kind} looks like {_SHAPES[kind]}")
    raise RequestError(
        f"the response_format has no type that is known: {str(response_format)[:_LONGEST]}",
        hint=f"Types are {', '.join(_SHAPES)}.",
    )


def _from_schema(schema: Mapping[str, Any]) -> str:
    from llguidance import LLMatcher

    try:
        text = json.dumps(dict(schema), allow_nan=False)
        return LLMatcher.grammar_from_json_schema(
            text,
            defaults={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is no JSON: {_reason(str(error))}") from None


def _from_regex(regex: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(regex)


def _from_grammar(grammar: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except Exception as error:  # the converter raises whatever comes
        raise RequestError(f"the grammar is broken: {_reason(str(error))}") from None


def _literally(text: str) -> str:
    """Return a regular expression that matches `text` alone."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _are_texts(choices: Sequence[Any]) -> bool:
    return all(isinstance(choice, str) and choice for choice in choices)


def _end(vocab: Vocab) -> int:
    """Return the end token that the model is most used to."""
    return vocab.eos if vocab.eos in vocab.ends else min(vocab.ends)


def _reason(text: str) -> str:
    """Return the sentence in what llguidance says, which may go on with the place or its state."""
    first, *rest = text.strip().split("\n")
    causes = [line.removeprefix("error: ") for line in rest if line.startswith("error: ")]
    if first == "NoExtensionBias":
        first = "there is a place where no token can follow"
    return ": ".join([first.rstrip(": "), *causes[:1]])[:_LONGEST]
