"""The vocabulary of a loaded model: text to token ids and back."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import llama_cpp as lib

from lspec.compat import Vocabulary
from lspec.errors import RequestError
from lspec.llama import native
from lspec.llama.portions import portions, turns
from lspec.thinking import MARKERS

_KINDS = {0: "none", 1: "SPM", 2: "BPE", 3: "WPM", 4: "UGM", 5: "RWKV", 6: "PLaMo-2"}
_LIKE_LLAMA_TOKENIZE = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32),  # vocabulary, text and its length
    *(ctypes.c_void_p, ctypes.c_int32),  # where the ids go, and for how many there is room
    *(ctypes.c_bool, ctypes.c_bool),
)
# Bits of llama_token_attr.
_UNKNOWN, _UNUSED, _CONTROL, _USER_DEFINED, _STRIPS_NEXT = 1 << 0, 1 << 1, 1 << 3, 1 << 4, 1 << 8


def read_vocabulary(path: Path) -> Vocabulary:
    """Read only the vocabulary of a GGUF file. Raises ModelLoadError."""
    with native.open_header(path) as model:
        return Vocab(lib.llama_model_get_vocab(model)).vocabulary


class Vocab:
    """Text to token ids and back."""

    def __init__(
        self,
        pointer: Any,
        is_alive: Callable[[], bool] = lambda: True,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        """`is_alive` says whether the model is still there that the vocabulary is a part of.

        It does not go away while `lock` is held.
        """
        self._vocab = pointer
        self._is_alive = is_alive
        self._lock = lock or nullcontext()
        self._process = os.getpid()
        self._failure: BaseException | None = None  # of a call that came from C
        self.kind = _KINDS.get(lib.llama_vocab_type(pointer), "unknown")
        self.size: int = lib.llama_vocab_n_tokens(pointer)
        self.n_tokens = self.size - self._padding()

    def _padding(self) -> int:
        """Count the unused ids at the end, which only round the output matrix up."""
        padding = 0
        while self.kind != "none" and self._attr(self.size - 1 - padding) & _UNUSED:
            padding += 1
        return padding

    def _attr(self, token: int) -> int:
        return int(lib.llama_vocab_get_attr(self._vocab, token))

    def _ids(self) -> range:
        """Return all ids that have a text; none for a model without a vocabulary."""
        return range(0 if self.kind == "none" else self.n_tokens)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What must agree between target and draft."""
        v, get_text = self._vocab, lib.llama_vocab_get_text
        return Vocabulary(
            kind=self.kind,
            size=self.size,
            bos=lib.llama_vocab_bos(v) if lib.llama_vocab_get_add_bos(v) else -1,
            eos=lib.llama_vocab_eos(v) if lib.llama_vocab_get_add_eos(v) else -1,
            texts=[get_text(v, i) for i in self._ids()],
        )

    @cached_property
    def ends(self) -> frozenset[int]:
        """The end-of-generation set."""
        return frozenset(i for i in self._ids() if lib.llama_vocab_is_eog(self._vocab, i))

    @cached_property
    def control_texts(self) -> tuple[str, ...]:
        """The texts that `tokenize(..., special=True)` turns into control tokens."""
        marked = (i for i in self._ids() if self._attr(i) & (_CONTROL | _UNKNOWN))
        return tuple(filter(None, map(self.text, marked)))

    @cached_property
    def _marked(self) -> tuple[str, ...]:
        """The texts that `tokenize` reads as one token wherever they stand."""
        kinds = _CONTROL | _UNKNOWN | _USER_DEFINED
        return tuple(filter(None, (self.text(i) for i in self._ids() if self._attr(i) & kinds)))

    @cached_property
    def _borders(self) -> tuple[str, ...]:
        """The control tokens' texts behind which a text can be cut."""
        borders = (i for i in self._ids() if self._attr(i) & (_CONTROL | _STRIPS_NEXT) == _CONTROL)
        return tuple(filter(None, map(self.text, borders)))

    @cached_property
    def named(self) -> frozenset[int]:
        """The tokens that stand for no text: control tokens, and what else looks like `<name>`."""
        return frozenset(filter(self._is_named, self._ids()))

    def _is_named(self, token: int) -> bool:
        attributes, text = self._attr(token), self.text(token)
        looks_so = text.startswith("<") and text.endswith(">")
        return bool(attributes & _CONTROL or (attributes & _USER_DEFINED and looks_so))

    @property
    def c_tokenizer(self) -> tuple[int, int]:
        """The addresses of the vocabulary and of its tokenizer, for a library that calls it.

        The function has the arguments of llama_tokenize and takes any text that `tokenize` takes.
        They are worth nothing once the model is closed; `require_open` tells.
        """
        function = ctypes.cast(self._c_function, ctypes.c_void_p)
        return int(self._vocab), int(function.value or 0)

    @cached_property
    def _c_function(self) -> Any:
        def tokenize(
            _: int, text: int, length: int, found: int, room: int, bos: bool, special: bool
        ) -> int:
            try:
                ids = self.tokenize(ctypes.string_at(text, length), bos=bos, special=special)
                if len(ids) > room:
                    return -len(ids)
                array = (lib.llama_token * len(ids))(*ids)
                ctypes.memmove(found, array, ctypes.sizeof(array))
                return len(ids)
            except BaseException as error:  # C cannot take it: see require_open
                self._failure = error
                return 0

        return _LIKE_LLAMA_TOKENIZE(tokenize)

    def require_open(self) -> None:
        """Raise RequestError once the model is closed, or in a forked process.

        Also what `c_tokenizer` could not raise.
        """
        if not self._is_alive():
            raise RequestError("this engine has been closed", hint="Load it again.")
        if os.getpid() != self._process:  # where llama.cpp's threads are missing
            raise RequestError("this engine was loaded by another process", hint="Load it here.")
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    @property
    def bos(self) -> int:
        """The beginning-of-sequence token; -1 where there is none."""
        return int(lib.llama_vocab_bos(self._vocab))

    @property
    def eos(self) -> int:
        """The end-of-sequence token, one of `ends`; -1 where there is none."""
        return int(lib.llama_vocab_eos(self._vocab))

    @property
    def newline(self) -> int:
        """The token of a line feed; -1 where there is none."""
        return int(lib.llama_vocab_nl(self._vocab))

    @property
    def fim(self) -> tuple[int, int, int]:
        """The tokens before prefix, suffix and middle of a text to fill in; -1: there is none."""
        functions = (lib.llama_vocab_fim_pre, lib.llama_vocab_fim_suf, lib.llama_vocab_fim_mid)
        prefix, suffix, middle = (int(function(self._vocab)) for function in functions)
        return prefix, suffix, middle

    @property
    def adds_bos(self) -> bool:
        """Whether a text begins with the beginning-of-sequence token."""
        return self.kind != "none" and bool(lib.llama_vocab_get_add_bos(self._vocab))

    @property
    def bos_text(self) -> str:
        """The text of the beginning-of-sequence token; empty where there is none."""
        return self.text(lib.llama_vocab_bos(self._vocab))

    @property
    def eos_text(self) -> str:
        """The text of the end-of-sequence token; empty where there is none."""
        return self.text(lib.llama_vocab_eos(self._vocab))

    def text(self, token: int) -> str:
        """Return the text by which the vocabulary names `token`, control tokens included."""
        if token < 0 or self.kind == "none":
            return ""
        raw: bytes = lib.llama_vocab_get_text(self._vocab, token)
        return raw.decode("utf-8", errors="replace")

    def spoken(self, texts: Iterable[str]) -> tuple[str, ...]:
        """Return those of `texts` that are a token each and a part of what a model writes.

        These are user-defined tokens, and control tokens that begin or end a thought.
        """
        found = []
        for text in texts:
            token = self._named(text)
            if token is not None and (text in MARKERS or not self._attr(token) & _CONTROL):
                found.append(text)
        return tuple(found)

    def _named(self, text: str) -> int | None:
        """Return the control or user-defined token of that text; None if there is none."""
        if self.kind == "none":
            return None
        ids = self.tokenize(text, bos=False, special=True)
        named = len(ids) == 1 and self._attr(ids[0]) & (_CONTROL | _USER_DEFINED)
        return ids[0] if named else None

    @cached_property
    def _shown(self) -> frozenset[int]:
        """The control tokens that belong to the text: those that begin or end a thought."""
        return frozenset(token for token in map(self._named, MARKERS) if token is not None)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes that `token` adds to a text.

        A control token adds none, unless it begins or ends a thought, or `special` asks for its
        own text.
        """
        if self.kind == "none":
            return b""
        length = 64
        special = special or token in self._shown
        while True:
            buffer = ctypes.create_string_buffer(length)
            with self._lock:
                self.require_open()
                n = lib.llama_token_to_piece(self._vocab, token, buffer, length, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            length = -n

    def tokenize(self, text: str | bytes, *, bos: bool, special: bool) -> list[int]:
        """Return the ids of `text`, which may be given as UTF-8 bytes.

        `bos` puts the beginning-of-sequence token first where the model wants one; `special` reads
        the text of a control token as that token. Raises RequestError for half a character.
        """
        if self.kind == "none":
            raise RequestError("this model has no vocabulary: give token ids, not text")
        errors = "strict"
        if isinstance(text, bytes):
            text, errors = text.decode("utf-8", "surrogateescape"), "surrogateescape"
        try:
            text.encode("utf-8", errors)
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text is not Unicode: it has a lone surrogate, U+{ord(text[error.start]):04X}"
            ) from None
        ends = bos and lib.llama_vocab_get_add_eos(self._vocab)  # once, and not after a portion
        parts = iter([text]) if ends else self._portions(text, special=special)
        ids = self._tokenize(next(parts).encode("utf-8", errors), bos=bos, special=special)
        for part in parts:
            ids += self._tokenize(part.encode("utf-8", errors), bos=False, special=special)
        return ids

    def _portions(self, text: str, *, special: bool) -> Iterator[str]:
        """Yield a text in portions that have the same tokens together."""
        cut = special and self.kind in ("BPE", "SPM")
        marked = lambda: self._marked  # noqa: E731
        for turn in turns(text, lambda: self._borders, marked) if cut else (text,):
            yield from portions(turn, marked) if self.kind == "BPE" else (turn,)

    def _tokenize(self, data: bytes, *, bos: bool, special: bool) -> list[int]:
        room = len(data) + 2
        while True:
            ids = (lib.llama_token * room)()
            with self._lock:
                self.require_open()
                n = lib.llama_tokenize(self._vocab, data, len(data), ids, room, bos, special)
            if n >= 0:
                return list(ids[:n])
            room = -n
