"""What the server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from lspec.stats import Stats

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """The counters of one server. Safe to use from several threads."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()

        def counter(name: str, text: str) -> Counter:
            return Counter(f"lspec_{name}", text, registry=self._registry)

        self.requests = Counter(
            "lspec_requests",
            "HTTP requests by path and status; 499: the client went away before the reply",
            ("path", "status"),
            registry=self._registry,
        )
        self._tokens = {
            "prompt_tokens": counter("prompt_tokens", "Tokens of prompts"),
            "reused_tokens": counter("reused_tokens", "Tokens of prompts found in the cache"),
            "generated_tokens": counter("generated_tokens", "Tokens of answers"),
            "rounds": counter("rounds", "Passes of the target behind the prompts"),
            "drafted": counter("drafted_tokens", "Drafted tokens"),
            "accepted": counter("accepted_tokens", "Accepted ones of the drafted tokens"),
            "prompt_s": counter("prompt_seconds", "Time of reading prompts"),
            "total_s": counter("decode_seconds", "Time of decoding"),
        }
        self.first_token_s = self._histogram("first_token_seconds", "From request to first token")
        self.request_s = self._histogram("request_seconds", "From request to last token")

    def count(self, stats: Stats) -> None:
        """Add up a generation, finished or not."""
        for name, counter in self._tokens.items():
            counter.inc(getattr(stats, name))

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Report `value()` at the time of each look."""
        Gauge(f"lspec_{name}", text, registry=self._registry).set_function(value)

    def text(self) -> bytes:
        """Return all of it in Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"lspec_{name}", text, buckets=_SECONDS, registry=self._registry)
