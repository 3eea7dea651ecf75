"""The endpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from lspec.engine import Engine
from lspec.server import errors
from lspec.server.choices import Chat, Kind, Text
from lspec.server.errors import ApiError
from lspec.server.gate import Gate
from lspec.server.metrics import Metrics
from lspec.server.options import chat_options, completion_options
from lspec.server.replies import Reply
from lspec.server.requests import answer_format, generations, messages_of, offer_of, prompts_of
from lspec.server.schemas import Body, ChatBody, CompletionBody
from lspec.server.stream import EventStream, while_connected
from lspec.server.tools import Tools
from lspec.server.wire import Json, json_response
from lspec.server.worker import Streams, Worker


@dataclass(frozen=True, slots=True)
class Settings:
    """How to serve; `names` are those of the model, of which the first is its own."""

    names: tuple[str, ...]
    key: str | None = None
    origins: tuple[str, ...] = ()  # of web pages that may ask, "*" for any
    queue: int = 32
    max_body: int = 2**21  # bytes


def create_app(engine: Engine, worker: Worker, metrics: Metrics, settings: Settings) -> FastAPI:
    """Return the application; `worker` and `metrics` belong to it alone."""
    api = _Api(engine, worker, metrics, settings)
    app = FastAPI(openapi_url=None)
    routes: dict[str, tuple[str, Callable[..., object]]] = {
        "/v1/chat/completions": ("POST", api.chat),
        "/v1/completions": ("POST", api.complete),
        "/v1/models": ("GET", api.models),
        "/v1/models/{name:path}": ("GET", api.model),
        "/health": ("GET", api.health),
        "/metrics": ("GET", api.metrics),
    }
    for path, (method, endpoint) in routes.items():
        app.add_api_route(path, endpoint, methods=[method, *["HEAD"] * (method == "GET")])
    errors.install(app, [path for path in routes if "{" not in path])
    app.add_middleware(
        Gate,
        key=settings.key,
        max_body=settings.max_body,
        paths=set(routes),
        metrics=metrics,
    )
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return app


class _Api:
    def __init__(
        self, engine: Engine, worker: Worker, metrics: Metrics, settings: Settings
    ) -> None:
        self._engine = engine
        self._worker = worker
        self._metrics = metrics
        self._names = settings.names
        self._started = int(time.time())
        self._tools = Tools.of(engine.chat_template, engine.vocab)
        self._n_vocab = engine.target.model.n_vocab

    async def chat(self, body: ChatBody, request: Request) -> Response:
        self._require_model(body.model)
        options = chat_options(body, n_vocab=self._n_vocab)
        offer = offer_of(body, self._tools)
        options["response_format"] = answer_format(body, offer)
        messages = messages_of(body, self._tools)
        shown = [tool.model_dump(exclude_unset=True) for tool in body.tools] if offer else []

        def make(should_stop: Callable[[], bool]) -> Streams:
            prompt = self._engine.tokenize_chat(messages, shown, body.chat_template_kwargs)
            options["should_stop"] = should_stop
            return generations(self._engine, [prompt], body.n, options)

        kind = Chat(self._engine.vocab, logprobs=body.logprobs, offer=offer)
        return await self._reply(body, kind, make, request)

    async def complete(self, body: CompletionBody, request: Request) -> Response:
        self._require_model(body.model)
        options = completion_options(body, n_vocab=self._n_vocab)

        def make(should_stop: Callable[[], bool]) -> Streams:
            options["should_stop"] = should_stop
            return generations(self._engine, prompts_of(body, self._engine), body.n, options)

        kind = Text(self._engine.vocab, logprobs=body.logprobs is not None)
        return await self._reply(body, kind, make, request)

    async def models(self) -> Response:
        return json_response({"object": "list", "data": list(map(self._describe, self._names))})

    async def model(self, name: str) -> Response:
        self._require_model(name)
        return json_response(self._describe(name))

    async def health(self) -> Response:
        if self._worker.stopping:
            raise errors.shutting_down()
        return json_response({"status": "ok"})

    async def metrics(self) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def _reply(
        self,
        body: Body,
        kind: Kind,
        make: Callable[[Callable[[], bool]], Streams],
        request: Request,
    ) -> Response:
        try:
            job = await self._worker.prepare(make)
        except RecursionError:
            raise ApiError(400, "the request is nested too deeply") from None
        reply = Reply(
            kind,
            model=body.model or self._names[0],
            prompts=len(job.streams) // body.n,
            n=body.n,
            usage=body.stream_options.include_usage,
        )
        items = self._worker.play(job)
        if body.stream:
            return EventStream(reply.events(items))
        whole = await while_connected(request.receive, reply.whole(items))
        return Response(status_code=499) if whole is None else json_response(whole)

    def _describe(self, name: str) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "lspec",
            "meta": {"n_ctx": self._engine.n_ctx, "n_vocab": self._n_vocab},
        }

    def _require_model(self, name: str) -> None:
        if name and name not in self._names:
            known = ", ".join(self._names)
            message = f"there is no model {name!r} here, only {known}"
            raise ApiError(404, message, param="model", code="model_not_found")
