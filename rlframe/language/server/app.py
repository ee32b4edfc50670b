"""The FastAPI application of the policy server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response, StreamingResponse

from rlframe.errors import UnavailableError, UsageError
from rlframe.http.app import make_app as make_base_app
from rlframe.http.app import metric_families
from rlframe.http.bodies import answer, event_data
from rlframe.http.config import read_token
from rlframe.language.server.errors import RefusedError, invalid, refusal, refused
from rlframe.language.server.generation import AnswerPiece, Generation
from rlframe.language.server.replies import (
    ChatReplies,
    CompletionReplies,
    GenerateRequest,
    Replies,
    SglangRequest,
    SglangSampling,
    VllmRequest,
)
from rlframe.language.server.requests import ChatRequest, CompletionRequest, ParsedRequest

if TYPE_CHECKING:
    from rlframe.language.server.server import PolicyServer

_IN_THREAD = 16 << 10  # bytes; larger requests are encoded in a thread, because 1 MB can take seconds
_DESCRIPTION = """A language model in training, with the OpenAI API.

Every response has a `policy_version`: the version of the parameters that sampled its last token."""

_PREFIX = "rlframe_policy_"  # prefix of the metrics' names
# Name, help text, and key in `PolicyServer.stats`.
_COUNTERS = (
    ("completions", "Requested completions.", "requests"),
    ("tokens", "Sampled tokens.", "tokens"),
    ("prompt_tokens", "Prefilled prompt tokens.", "prompt_tokens"),
    ("engine_calls", "Calls of the decode engine.", "calls"),
    ("refreshes", "Updates of the parameters from the learner.", "refreshes"),
)
_GAUGES = (
    ("running", "Number of completions that are decoded now.", "running"),
    ("waiting", "Number of completions that wait for a slot.", "waiting"),
    ("version", "Version of the parameters.", "version"),
    ("learner_version", "Newest known version of the learner's parameters; -1: none.", "learner_version"),
    (
        "versions_behind",
        "Number of versions between the parameters and the learner's newest known version.",
        "versions_behind",
    ),
    ("since_refresh_seconds", "Seconds since the last update of the parameters.", "since_refresh"),
    ("since_learner_seconds", "Seconds since the learner last answered.", "since_learner"),
)


def make_app(server: PolicyServer) -> FastAPI:
    """Return the FastAPI application. Raise `UsageError` if the token file cannot be read."""
    cfg = server.cfg
    requests = (CompletionRequest, ChatRequest, VllmRequest, SglangRequest, SglangSampling)
    known = sorted({name for kind in requests for name in kind.model_fields})

    async def read_families() -> Any:
        return metric_families(_PREFIX, _COUNTERS, _GAUGES, server.stats().get)

    app = make_base_app(
        "rlframe policy",
        _DESCRIPTION,
        _PREFIX,
        read_families,
        token=read_token(cfg.token_file),
        max_body=cfg.max_body_mb << 20,
        errors={
            RequestValidationError: lambda error: invalid(error, known).response,
            **{kind: lambda error: refused(error).response for kind in (RefusedError, UsageError, UnavailableError)},
        },
        refusal=refusal,
        no_token=cfg.no_token,
        hosts=cfg.allowed_hosts,
    )
    card = {
        "id": cfg.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "rlframe",
        "max_model_len": cfg.engine.length or server.model_config.max_position_embeddings,
    }

    @app.get("/health", tags=["server"])
    async def health() -> Response:
        """Return 200 if the server has parameters."""
        return answer({"status": "ok", "policy_version": server.live_engine().version})

    @app.get("/v1/models", tags=["OpenAI"])
    async def models() -> Response:
        """List the served model."""
        return answer({"object": "list", "data": [card]})

    @app.get("/v1/models/{model:path}", tags=["OpenAI"])
    async def one_model(model: str) -> Response:
        """Return the served model."""
        _check_model(model, cfg.model_name)
        return answer(card)

    @app.get("/v1/policy", tags=["server"])
    async def policy() -> Response:
        """Return the parameters' version and the number of newer versions. `problem`: reason why updates stopped."""
        return answer({"model": cfg.model_name, **server.stats()})

    @app.post("/v1/completions", tags=["OpenAI"])
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        return await _reply(server, body, request, CompletionReplies)

    @app.post("/v1/chat/completions", tags=["OpenAI"])
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await _reply(server, body, request, ChatReplies)

    @app.post("/generate", tags=["vLLM and SGLang"])
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Continue token ids like vLLM's `/generate` or, with `sampling_params` or `input_ids`, like SGLang's."""
        generation, parsed = await _start_generation(server, body, request)
        return await _answer_or_disconnect(
            request, generation, lambda pieces: body.reply(parsed, pieces, server.tokenizer)
        )

    return app


async def _reply(
    server: PolicyServer, body: CompletionRequest | ChatRequest, request: Request, form: type[Replies]
) -> Response:
    _check_model(body.model, server.cfg.model_name)
    generation, parsed = await _start_generation(server, body, request, body.stream)
    replies = form(body, parsed, server.tokenizer)
    if body.stream:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(_events(generation, replies), headers=headers, media_type="text/event-stream")
    return await _answer_or_disconnect(request, generation, replies.whole)


async def _start_generation(
    server: PolicyServer, body: Any, request: Request, streams: bool = False
) -> tuple[Generation, ParsedRequest]:
    """Submit the request to the engine."""
    engine, tokenizer = server.live_engine(), server.tokenizer
    long = int(request.headers.get("content-length", 0)) > _IN_THREAD
    parsed = await asyncio.to_thread(body.parse, tokenizer) if long else body.parse(tokenizer)
    return Generation(engine, parsed, tokenizer, streams=streams, timeout=server.cfg.request_timeout), parsed


async def _answer_or_disconnect(
    request: Request, generation: Generation, make_reply: Callable[[list[AnswerPiece]], object]
) -> Response:
    """Return the response to a complete request. If the client disconnects before it is complete, cancel it."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(generation.whole()), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return Response(status_code=499)  # nginx's status for a closed connection; no client receives it
        return answer(make_reply(working.result()))
    finally:
        working.cancel()
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await working  # wait until the cancelled work has freed its slots


async def _events(generation: Generation, replies: Replies) -> AsyncIterator[bytes]:
    """Yield server-sent events. Each event is a JSON object, also for an error. The last event is `[DONE]`.

    If the client disconnects, Starlette cancels this generator.
    """
    try:
        async for piece in generation.pieces():
            if (event := replies.event(piece)) is not None:
                yield _event(event)
        if (last := replies.last_event()) is not None:
            yield _event(last)
    except (RefusedError, UnavailableError) as error:
        yield _event(refused(error).content)
    finally:
        generation.cancel()
    yield b"data: [DONE]\n\n"


def _event(content: object) -> bytes:
    return b"data: " + event_data(content) + b"\n\n"


def _check_model(model: str, name: str) -> None:
    if model != name:
        message = f"There is no model {model!r}. This server has {name!r}."
        raise RefusedError(message, 404, param="model", code="model_not_found")
