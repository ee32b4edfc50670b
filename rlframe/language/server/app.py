"""The FastAPI application of the policy server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

import rlframe
from rlframe.errors import UnavailableError, UsageError
from rlframe.http.measuring import Measure, RequestMetrics
from rlframe.http.middleware import Compress, ReadBody, RequireToken, answer
from rlframe.http.origins import SameOrigin
from rlframe.http.token_file import read_token
from rlframe.language.server.errors import RefusedError, invalid, refusal
from rlframe.language.server.generation import Generation
from rlframe.language.server.prometheus import PREFIX, PolicyCollector
from rlframe.language.server.replies import ChatReplies, CompletionReplies, Replies
from rlframe.language.server.requests import ChatRequest, CompletionRequest
from rlframe.language.server.streaming import ClientLeftError, EventStream, while_connected

if TYPE_CHECKING:
    from rlframe.language.server.server import PolicyServer

_IN_THREAD = 16 << 10  # bytes of a request from which on it is encoded beside the event loop: 1 MB may take seconds
_DESCRIPTION = """A language model that learns meanwhile, behind the OpenAI API.

Every answer names its `policy_version`: that of the parameters which its last token was sampled with."""


def make_app(server: PolicyServer) -> FastAPI:
    """The application. Raises `UsageError` where the token file cannot be read."""
    cfg, token = server.cfg, read_token(server.cfg.token_file)
    metrics, started = RequestMetrics(PREFIX), int(time.time())
    app = FastAPI(
        title="rlframe policy",
        version=rlframe.__version__,
        description=_DESCRIPTION,
        strict_content_type=False,  # CSRF is what SameOrigin is there for
    )
    card = {
        "id": cfg.model_name,
        "object": "model",
        "created": started,
        "owned_by": "rlframe",
        "max_model_len": cfg.engine.length or server.model_config.max_position_embeddings,
    }

    @app.get("/health", tags=["server"])
    async def health() -> Response:
        """200 once it can answer."""
        return answer({"status": "ok", "policy_version": server.live_engine().version})

    @app.get("/metrics", tags=["server"], response_class=Response)
    async def read_metrics() -> Response:
        """Requests, tokens, what runs and waits, and the version, as Prometheus reads them."""
        content = metrics.exposition(PolicyCollector(server.stats()))
        return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models", tags=["OpenAI"])
    async def models() -> Response:
        """The one model that there is."""
        return answer({"object": "list", "data": [card]})

    @app.get("/v1/models/{model:path}", tags=["OpenAI"])
    async def one_model(model: str) -> Response:
        """That model."""
        _check_model(model, cfg.model_name)
        return answer(card)

    @app.get("/v1/policy", tags=["server"])
    async def policy() -> Response:
        """The version that answers, and how far it is behind the learner's; `problem` says why it is not followed."""
        return answer({"model": cfg.model_name, **server.stats(), "problem": server.problem or None})

    @app.post("/v1/completions", tags=["OpenAI"])
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Goes on from prompts."""
        return await _reply(server, body, request, CompletionReplies)

    @app.post("/v1/chat/completions", tags=["OpenAI"])
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answers a conversation."""
        return await _reply(server, body, request, ChatReplies)

    _handle_errors(app)
    # The last one added is the first that a request meets.
    app.add_middleware(Compress)
    app.add_middleware(ReadBody, limit=cfg.max_body_mb << 20, refusal=refusal)
    if token is not None:
        app.add_middleware(RequireToken, token=token, refusal=refusal)
    app.add_middleware(
        SameOrigin, token=token is not None, no_token=cfg.no_token, hosts=cfg.allowed_hosts, refusal=refusal
    )
    app.add_middleware(Measure, metrics=metrics)
    return app


async def _reply(
    server: PolicyServer, body: CompletionRequest | ChatRequest, request: Request, form: type[Replies]
) -> Response:
    _check_model(body.model, server.cfg.model_name)
    engine, tokenizer = server.live_engine(), server.tokenizer
    long = int(request.headers.get("content-length", 0)) > _IN_THREAD
    asked = await asyncio.to_thread(body.asked, tokenizer) if long else body.asked(tokenizer)
    generation = Generation(
        engine,
        asked,
        tokenizer,
        streams=body.stream,
        skip_special_tokens=body.skip_special_tokens,
        timeout=server.cfg.request_timeout,
    )
    replies = form(body, asked, tokenizer)
    if body.stream:
        return EventStream(_events(generation, replies))
    try:
        pieces = await while_connected(request.receive, generation.whole())
    except ClientLeftError:
        return Response(status_code=499)  # as nginx notes it: nobody sees it
    return answer(replies.whole(pieces))


async def _events(generation: Generation, replies: Replies) -> AsyncIterator[dict[str, Any]]:
    try:
        async for piece in generation.pieces():
            if (event := replies.event(piece)) is not None:
                yield event
        if (last := replies.last_event()) is not None:
            yield last
    finally:
        generation.cancel()


def _check_model(asked: str, name: str) -> None:
    if asked != name:
        message = f"There is no model {asked!r}; this server has {name!r}."
        raise RefusedError(message, 404, param="model", code="model_not_found")


def _handle_errors(app: FastAPI) -> None:
    known = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields})

    @app.exception_handler(RequestValidationError)
    async def invalid_request(_: Request, error: RequestValidationError) -> Response:
        return invalid(error, known).response

    @app.exception_handler(RefusedError)
    async def refused(_: Request, error: RefusedError) -> Response:
        return error.response

    @app.exception_handler(UsageError)
    async def impossible(_: Request, error: UsageError) -> Response:
        return RefusedError(str(error), 400).response

    @app.exception_handler(UnavailableError)
    async def unavailable(_: Request, error: UnavailableError) -> Response:
        return RefusedError(str(error), 503, retry=1).response

    @app.exception_handler(HTTPException)
    async def no_such_path(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}. The endpoints are described at /docs."
        return RefusedError(message, error.status_code).response
