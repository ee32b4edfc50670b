"""The FastAPI application of the policy server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive

from rlframe.errors import UnavailableError, UsageError
from rlframe.http.app import make_app as make_base_app
from rlframe.http.app import metric_families
from rlframe.http.bodies import answer
from rlframe.http.config import read_token
from rlframe.language.server.errors import RefusedError, invalid, refusal, refused
from rlframe.language.server.generation import Generation
from rlframe.language.server.native import GenerateRequest, SglangRequest, SglangSampling, VllmRequest
from rlframe.language.server.replies import ChatReplies, CompletionReplies, Replies
from rlframe.language.server.requests import ChatRequest, CompletionRequest, ParsedRequest

if TYPE_CHECKING:
    from rlframe.language.server.server import PolicyServer

_IN_THREAD = 16 << 10  # bytes of a request from which on it is encoded beside the event loop: 1 MB may take seconds
_LINE_ENDS = "\x85\u2028\u2029"  # clients that split by Unicode's lines would cut an event there; JSON may escape them
_DESCRIPTION = """A language model that learns meanwhile, behind the OpenAI API.

Every answer names its `policy_version`: that of the parameters which its last token was sampled with."""

_PREFIX = "rlframe_policy_"  # of metrics
# Name, help, and what it is called in `PolicyServer.stats`.
_COUNTERS = (
    ("completions", "Completions that were asked for.", "requests"),
    ("tokens", "Tokens that were sampled.", "tokens"),
    ("prompt_tokens", "Tokens of prompts that were read.", "prompt_tokens"),
    ("engine_calls", "Calls of the decode engine.", "calls"),
    ("refreshes", "Versions of the parameters that were taken over.", "refreshes"),
)
_GAUGES = (
    ("running", "Completions that are decoded.", "running"),
    ("waiting", "Completions that wait for a slot.", "waiting"),
    ("version", "Of the parameters.", "version"),
    ("learner_version", "The newest that was heard of; -1: none.", "learner_version"),
    ("versions_behind", "Versions by which the parameters are older than the newest heard of.", "versions_behind"),
    ("since_refresh_seconds", "Since the parameters were taken over.", "since_refresh"),
    ("since_learner_seconds", "Since the learner was heard of.", "since_learner"),
)

T = TypeVar("T")


def make_app(server: PolicyServer) -> FastAPI:
    """The application. Raises `UsageError` where the token file cannot be read."""
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
        """200 once it can answer."""
        return answer({"status": "ok", "policy_version": server.live_engine().version})

    @app.get("/v1/models", tags=["OpenAI"])
    async def models() -> Response:
        """The one model that there is."""
        return answer({"object": "list", "data": [card]})

    @app.get("/v1/models/{model:path}", tags=["OpenAI"])
    async def one_model(model: str) -> Response:
        """Return that model."""
        _check_model(model, cfg.model_name)
        return answer(card)

    @app.get("/v1/policy", tags=["server"])
    async def policy() -> Response:
        """The version that answers, and how far it is behind the learner's; `problem` says why it is not followed."""
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
        """Continue token ids, as vLLM's own `/generate` does; with `sampling_params` or `input_ids` as SGLang's."""
        generation, asked = await _begin(server, body, request)
        pieces = await _result_or_disconnect(request.receive, generation.whole())
        return _client_closed_request() if pieces is None else answer(body.reply(asked, pieces, server.tokenizer))

    return app


async def _reply(
    server: PolicyServer, body: CompletionRequest | ChatRequest, request: Request, form: type[Replies]
) -> Response:
    _check_model(body.model, server.cfg.model_name)
    generation, asked = await _begin(server, body, request, body.stream)
    replies = form(body, asked, server.tokenizer)
    if body.stream:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(_events(generation, replies), headers=headers, media_type="text/event-stream")
    pieces = await _result_or_disconnect(request.receive, generation.whole())
    return _client_closed_request() if pieces is None else answer(replies.whole(pieces))


async def _begin(
    server: PolicyServer, body: Any, request: Request, streams: bool = False
) -> tuple[Generation, ParsedRequest]:
    """Send what a body asks for to the engine."""
    engine, tokenizer = server.live_engine(), server.tokenizer
    long = int(request.headers.get("content-length", 0)) > _IN_THREAD
    asked = await asyncio.to_thread(body.asked, tokenizer) if long else body.asked(tokenizer)
    return Generation(engine, asked, tokenizer, streams=streams, timeout=server.cfg.request_timeout), asked


def _client_closed_request() -> Response:
    return Response(status_code=499)  # as nginx notes it: nobody sees it


async def _result_or_disconnect(receive: Receive, work: Coroutine[None, None, T]) -> T | None:
    """Return what `work` gives, or None if the client leaves before; the work is cancelled then."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await working  # it frees its slots


async def _events(generation: Generation, replies: Replies) -> AsyncIterator[bytes]:
    """Server-sent events, each a JSON object; at the end `[DONE]`. An error is an event too.

    Starlette cancels it where the client leaves.
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
    data = msgspec.json.encode(content)
    for character in _LINE_ENDS:
        data = data.replace(character.encode(), f"\\u{ord(character):04x}".encode())
    return b"data: " + data + b"\n\n"


def _check_model(asked: str, name: str) -> None:
    if asked != name:
        message = f"There is no model {asked!r}; this server has {name!r}."
        raise RefusedError(message, 404, param="model", code="model_not_found")
