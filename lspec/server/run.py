"""Serving until a signal comes."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import uvicorn

from lspec.engine import Engine
from lspec.server.app import Settings, create_app
from lspec.server.metrics import Metrics
from lspec.server.worker import Worker

_MARGIN_S = 5  # for clients that do not read what they are sent


def bind(host: str, port: int) -> socket.socket:
    """Return a socket with an address, which does not listen yet. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def serve(
    engine: Engine,
    sock: socket.socket,
    settings: Settings,
    *,
    thread: ThreadPoolExecutor,
    grace_s: float,
    on_start: Callable[[], None] = lambda: None,
    on_stop: Callable[[], None] = lambda: None,
) -> int | None:
    """Serve `engine` by `thread` on `sock` until SIGINT or SIGTERM comes; return the signal.

    From then on no connection is accepted, and what is not finished after `grace_s` seconds is
    cancelled. No thread is left. `on_start` is called when the first request would be heard,
    `on_stop` when the signal has come.
    """
    logging.getLogger("uvicorn.error").addFilter(_is_a_fault)
    metrics = Metrics()
    worker = Worker(metrics, queue=settings.queue, thread=thread)
    app = create_app(engine, worker, metrics, settings)
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=round(grace_s) + _MARGIN_S,
    )
    server = _Server(config, worker, grace_s, on_start, on_stop)
    try:
        server.run(sockets=[sock])
    finally:
        worker.close()
    return server.signal


def _is_a_fault(record: logging.LogRecord) -> bool:
    """Return whether a record is worth a line: requests that the end of the server cuts are not."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        worker: Worker,
        grace_s: float,
        on_start: Callable[[], None],
        on_stop: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self.signal: int | None = None
        self._worker = worker
        self._grace_s = grace_s
        self._on_start, self._on_stop = on_start, on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        timer = asyncio.get_running_loop().call_later(self._grace_s, self._worker.stop)
        await super().shutdown(sockets)
        timer.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note the signal; a second Ctrl-C waits no longer.

        The parent would raise the signal again in the end, and so leave out the rest of the exit.
        """
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
        self.signal = sig
