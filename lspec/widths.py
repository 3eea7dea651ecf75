"""Width classes: sets of pass widths whose logits agree bit for bit, found by trying.

llama.cpp takes other kernels for a pass of more tokens or over a longer text, and these add in
another order. Which widths agree depends on the weights, the type of the cache, the build and the
machine. So the same positions are evaluated in passes of every width, at short and long context.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import cycle, islice

import numpy as np

from lspec.errors import RollbackError
from lspec.model import FloatRows, LanguageModel, TokenCache
from lspec.round import MAX_GAMMA

CONTEXTS = (40, 250, 700)  # the second one crosses 256, where llama.cpp's caches take a step
WIDTHS = tuple(range(1, MAX_GAMMA + 2))
_CONTEXT, _QUICK_ROWS = 40, 6  # for a quick look
ROWS = WIDTHS[-1] + 1  # positions: a pass that keeps one token and a widest one that keeps all


@dataclass(frozen=True, slots=True)
class Widths:
    """Which widths agree.

    Every width is in exactly one of `classes`. `difference[i]` is the largest difference of a logit
    from that of the narrowest width, for the i-th width in ascending order, and `contexts` are the
    lengths of text after which they were compared.
    """

    classes: tuple[tuple[int, ...], ...]
    difference: tuple[float, ...]
    contexts: tuple[int, ...]


def find(
    model: LanguageModel,
    text: Sequence[int],
    *,
    contexts: Sequence[int] = CONTEXTS,
    rows: int = ROWS,
    widths: Iterable[int] = WIDTHS,
    should_stop: Callable[[], bool] = lambda: False,
) -> Widths | None:
    """Compare passes of `widths` over the `rows` positions after each of `contexts` tokens.

    A context that `text` or the window has no room for is tried as near to its end as there is.
    A width that agrees with no other is not tried at longer contexts. Empties the cache before, and
    leaves tokens behind. None if `should_stop` ended it. Raises RollbackError.
    """
    widths = sorted(widths)
    room = min(len(text), model.n_ctx - widths[-1]) - rows
    contexts = sorted({min(context, room) for context in contexts if room > 0})
    cache = TokenCache(model)
    cache.truncate(0)
    digests: dict[int, list[bytes]] = {width: [] for width in widths}
    difference = dict.fromkeys(widths, 0.0)
    tried: Iterable[int] = widths
    for context in contexts:
        if not cache.catch_up(text[:context], should_stop):
            return None
        ahead = text[context : context + rows]
        reference = _rows(cache, ahead, widths[0])
        digests[widths[0]].append(_digest(reference))
        for width in tried:
            if width == widths[0]:
                continue
            if should_stop():
                return None
            found = _rows(cache, ahead, width)
            digests[width].append(_digest(found))
            difference[width] = max(difference[width], float(np.abs(found - reference).max()))
        tried = [width for group in _groups(digests) if len(group) > 1 for width in group]
    return Widths(_groups(digests), tuple(difference.values()), tuple(contexts))


def difference(
    model: LanguageModel, text: Sequence[int], *, widths: Iterable[int] = (1, 3, 5)
) -> float | None:
    """Return how far the width of a pass moves the logits of `model` on `text`; a quick look.

    None for a model that cannot take tokens back, or for a window without room. Empties the cache.
    """
    looked_at = list(islice(cycle(text), _CONTEXT + 2 * _QUICK_ROWS))
    try:
        found = find(model, looked_at, contexts=(_CONTEXT,), rows=_QUICK_ROWS, widths=widths)
    except RollbackError:
        return None
    finally:
        model.truncate(0)
    return max(found.difference) if found and found.contexts else None


def _rows(cache: TokenCache, ahead: Sequence[int], width: int) -> FloatRows:
    """Return the logits after each token of `ahead`, by passes of `width`; the cache is as before.

    Every other pass keeps one token and every other as many as it can: so each place in a pass is
    tried, and rolling back belongs to what is tried. The last layer of llama.cpp works on the
    wanted rows alone, therefore all of them are wanted.
    """
    start, kept = len(cache.tokens), 0
    found: list[FloatRows] = []
    while kept < len(ahead):
        tokens = ahead[kept : kept + (width if len(found) % 2 else 1)]
        n = len(tokens)
        thrown_away = [(tokens[-1] + i) % cache.model.n_vocab for i in range(1, width - n + 1)]
        found.append(cache.eval([*tokens, *thrown_away], rows=width)[:n].copy())
        kept += n
        cache.truncate(start + kept)
    cache.truncate(start)
    return np.concatenate(found)


def _digest(rows: FloatRows) -> bytes:
    return blake2b(rows.tobytes(), digest_size=16).digest()


def _groups(digests: dict[int, list[bytes]]) -> tuple[tuple[int, ...], ...]:
    """Return the widths in groups of equal digests; without any, nothing is known to agree."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for width, of_contexts in digests.items():
        groups[tuple(of_contexts) or width].append(width)
    return tuple(map(tuple, groups.values()))
