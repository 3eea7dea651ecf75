"""`lspec serve`: an OpenAI-compatible server."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from ipaddress import ip_address
from typing import Any

import click

from lspec.cli.loading import load
from lspec.cli.options import MODEL_OPTIONS, TEMPLATE_OPTIONS, ModelChoice, add, split
from lspec.cli.output import EXIT_INTERRUPTED, note
from lspec.errors import LspecError
from lspec.paths import reason

_NEEDED = ("fastapi", "uvicorn", "prometheus_client")


@click.command()
@add(MODEL_OPTIONS, TEMPLATE_OPTIONS)
@click.option("--host", envvar="LSPEC_HOST", default="127.0.0.1", show_default=True)
@click.option(
    "--port",
    envvar="LSPEC_PORT",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="0: any that is free.",
)
@click.option("--alias", multiple=True, help="Another name of the model; several times.")
@click.option(
    "--api-key", envvar="LSPEC_API_KEY", help="What clients must send; better as LSPEC_API_KEY."
)
@click.option("--no-auth", is_flag=True, help="Serve other machines without a key.")
@click.option(
    "--cors", multiple=True, metavar="ORIGIN", help="Web pages that may ask, or '*'; several times."
)
@click.option(
    "--queue",
    type=click.IntRange(0),
    default=32,
    show_default=True,
    help="Requests that may wait while one is answered.",
)
@click.option(
    "--max-body",
    type=click.IntRange(1),
    default=2**21,
    show_default=True,
    help="The longest request in bytes.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0),
    default=5.0,
    show_default=True,
    help="Seconds for what is not finished when a signal comes.",
)
def serve(**params: Any) -> int:
    """Serve a pair to clients of OpenAI's API.

    They are given http://HOST:PORT/v1 as the base URL. SIGTERM and Ctrl-C end it.
    """
    if any(find_spec(name) is None for name in _NEEDED):
        raise LspecError(
            "the server needs fastapi, uvicorn and prometheus_client, which are not all installed",
            hint="pip install 'lspec[server]', or in a clone: scripts/install server",
        )
    from lspec.server.app import Settings
    from lspec.server.run import bind
    from lspec.server.run import serve as run

    models, _ = split()
    thread = ThreadPoolExecutor(1, thread_name_prefix="lspec-play")
    try:
        bound = bind(params["host"], params["port"])
    except (OSError, UnicodeError) as error:  # the latter: no name of a machine
        raise LspecError(
            f"cannot listen on {params['host']} port {params['port']}: {reason(error)}",
            hint="Choose another one with --port, or end the program that has it.",
        ) from None
    with bound as sock:
        host, port = sock.getsockname()[:2]
        _require_key(host, params["api_key"], no_auth=params["no_auth"])
        with load(models, thread=thread) as engine:
            names = (_name(models), *params["alias"])
            settings = Settings(
                names=names,
                key=params["api_key"],
                origins=params["cors"],
                queue=params["queue"],
                max_body=params["max_body"],
            )
            note(engine.description)
            shown = f"[{host}]" if ":" in host else host
            caught = run(
                engine,
                sock,
                settings,
                thread=thread,
                grace_s=params["grace"],
                on_start=lambda: note(f"serving {names[0]} on http://{shown}:{port}/v1"),
                on_stop=lambda: note("stopping"),
            )
    return EXIT_INTERRUPTED if caught == signal.SIGINT else 0


def _require_key(host: str, key: str | None, *, no_auth: bool) -> None:
    if key is not None and not key.strip():
        raise click.UsageError("The key of --api-key is empty.")
    if key and no_auth:
        raise click.UsageError("Give --api-key or --no-auth, not both.")
    if not (key or no_auth or ip_address(host.split("%")[0]).is_loopback):
        raise click.UsageError(
            f"{host} can be reached by other machines: give --api-key, or --no-auth."
        )


def _name(models: ModelChoice) -> str:
    """Return the name by which clients ask for the model: the pair's, or the target file's."""
    if "target" in models.load:
        return str(models.load["target"].stem)
    from lspec import catalogue

    return catalogue.load().pair(models.pair).name
