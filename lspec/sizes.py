"""Sizes in bytes, for people."""

from __future__ import annotations


def size_text(size: int | None) -> str:
    """Return a size in megabytes or gigabytes; a question mark where it is not known."""
    if size is None:
        return "?"
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
