"""`lspec chat`: one answer, or a conversation at a terminal."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from lspec.cli.answer import answer_once, no_prompt, on_terminal, read_prompt
from lspec.cli.loading import load
from lspec.cli.options import (
    MODEL_OPTIONS,
    OUTPUT_OPTIONS,
    SAMPLING_OPTIONS,
    TEMPLATE_OPTIONS,
    add,
    split,
)
from lspec.cli.output import note


@click.command()
@add(MODEL_OPTIONS, TEMPLATE_OPTIONS, OUTPUT_OPTIONS, SAMPLING_OPTIONS)
@click.option("-i", "--interactive", is_flag=True, help="After -p go on as a conversation.")
@click.option("--system", envvar="LSPEC_SYSTEM", help="The system message.")
@click.option(
    "--overflow",
    envvar="LSPEC_OVERFLOW",
    type=click.Choice(["drop", "stop"]),
    default="drop",
    show_default=True,
    help="When a conversation fills the window: drop its oldest turns, or stop.",
)
def chat(**params: Any) -> int:
    """Chat with a pair.

    At a terminal, without -p, it is a conversation. Otherwise it answers once: what is piped in,
    what -p says, or both.

    What a model thinks before it answers is shown dim at a terminal, and left out where output
    goes elsewhere and from the conversation; --json has it as "reasoning".
    """
    if params["interactive"] and (params["as_json"] or not on_terminal()):
        raise click.UsageError("--interactive is for a terminal, without --json.")
    asked = params["prompt"]
    conversation = on_terminal() and not params["as_json"] and (not asked or params["interactive"])
    prompt = asked if conversation else read_prompt(asked)
    if not conversation and not prompt:
        raise no_prompt("nothing to answer", params["pair"])
    models, sampling = split()
    with load(models) as engine:
        if prompt and not conversation:
            messages = [{"role": "user", "content": prompt}]
            if params["system"]:
                messages.insert(0, {"role": "system", "content": params["system"]})
            return answer_once(
                partial(engine.stream_chat, messages, **sampling),
                n_ctx=engine.n_ctx,
                as_json=params["as_json"],
                stats=params["stats"],
                colour=params["show_drafts"],
            )
        from lspec.cli.session import Session
        from lspec.cli.terminal import PROMPT, Terminal, converse
        from lspec.paths import config_dir

        screen = Terminal(stats=params["stats"] is not False)
        session = Session(
            engine,
            screen,
            options=sampling,
            system=params["system"],
            overflow=params["overflow"],
        )
        note(engine.description)
        if params["show_drafts"]:
            session.handle("/drafts")
        note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.")
        if prompt:
            click.echo(f"{PROMPT}{prompt}")
            session.handle(f"/{prompt}" if prompt.startswith("/") else prompt)
        converse(session, history=config_dir() / "history")
    return 0
