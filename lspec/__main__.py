"""`python -m lspec`."""

from __future__ import annotations

from lspec.cli import main

main()
