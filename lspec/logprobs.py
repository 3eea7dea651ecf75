"""Log-probabilities under the target's own logits, before bias, penalties and truncation."""

from __future__ import annotations

import math

import numpy as np

from lspec.model import FloatRow
from lspec.round import TokenLogprob


def token_logprob(row: FloatRow, token: int, top: int) -> TokenLogprob:
    """Return what `row`, the logits at a token's place, says about `token` and the `top` likeliest.

    Equal logits come in the order of their ids.
    """
    best = row.max()
    norm = float(best) + math.log(float(np.exp(row - best).sum(dtype=np.float64)))
    likeliest: tuple[int, ...] = ()
    if top:
        ids = np.argpartition(row, len(row) - min(top, len(row)))[-top:]
        ids = np.flatnonzero(row >= row[ids].min())
        likeliest = tuple(ids[np.argsort(-row[ids], kind="stable")][:top].tolist())
    return TokenLogprob(
        token,
        float(row[token]) - norm,
        tuple((i, float(row[i]) - norm) for i in likeliest),
    )
