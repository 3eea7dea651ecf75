"""Do two vocabularies match, so that one model may draft for the other; and if not, why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lspec.errors import IncompatiblePairError

MAX_PADDING = 128  # ids by which files of one family differ (Qwen2.5: 151,936 and 152,064)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What must agree. `texts[i]` is the text of token i, padding at the end left out."""

    kind: str  # llama.cpp's vocabulary type: "bpe", "spm", ...
    size: int  # rows of the output matrix, padding included
    bos: int  # the id put before a text; -1 where none is
    eos: int  # the id put behind a text; -1 where none is
    texts: Sequence[bytes]


def require_match(target: Vocabulary, draft: Vocabulary) -> None:
    """Return if ids mean the same in both. Raises IncompatiblePairError, which says what differs.

    Sizes may differ by padding; ids that only one side has are never drafted.
    """
    if target.kind != draft.kind:
        raise _mismatch(f"the target's vocabulary is {target.kind}, the draft's {draft.kind}")
    for i, (a, b) in enumerate(zip(target.texts, draft.texts, strict=False)):
        if a != b:
            raise _mismatch(f"token {i} is {_show(a)} in the target and {_show(b)} in the draft")
    if abs(target.size - draft.size) > MAX_PADDING:
        raise _mismatch(f"the target has {target.size} tokens, the draft {draft.size}")
    for name, a_id, b_id in (("BOS", target.bos, draft.bos), ("EOS", target.eos, draft.eos)):
        if a_id != b_id:
            raise _mismatch(f"the target adds {_id(a_id)} as {name} token, the draft {_id(b_id)}")


def _mismatch(difference: str) -> IncompatiblePairError:
    return IncompatiblePairError(f"target and draft do not match: {difference}")


def _show(text: bytes) -> str:
    return repr(text.decode("utf-8", errors="replace"))


def _id(token: int) -> str:
    return "none" if token < 0 else f"id {token}"
