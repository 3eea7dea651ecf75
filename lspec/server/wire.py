"""Data as JSON on the wire."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

Json = dict[str, Any]


def encode(data: Mapping[str, Any]) -> bytes:
    """Return `data` as JSON in UTF-8; half of a surrogate pair becomes "?"."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", errors="replace")


def json_response(
    data: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a reply with `data` as its body."""
    return Response(encode(data), status, headers, media_type="application/json")
