"""Bodies that come compressed, in parts and more than once."""

from __future__ import annotations

import asyncio
import functools
import gzip
import json
import math
import os

import pytest
import zstandard

from rlframe.http.bodies import _DECOMPRESSORS, ReadBody, answer, decompressed

LIMIT = 1_000_000
DEADLINE = 60.0
COMPRESS = {"gzip": gzip.compress, "zstd": zstandard.compress}
DECOMPRESS = {name: functools.partial(decompressed, _DECOMPRESSORS[name]) for name in ("gzip", "zstd")}


def asked(body, encoding):
    """The status that a body is answered with, and what reached the application."""
    seen, sent = [], []

    async def application(scope, receive, send):
        seen.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    headers = [(b"content-length", str(len(body)).encode()), (b"content-encoding", encoding.encode())]
    scope = {"type": "http", "path": "/", "headers": headers}
    asyncio.run(asyncio.wait_for(ReadBody(application, limit=LIMIT)(scope, receive, send), DEADLINE))
    return sent[0]["status"], seen


@pytest.mark.parametrize("encoding", COMPRESS)
def test_a_body_of_several_parts(encoding):
    compress = COMPRESS[encoding]
    parts = [bytes([i % 256]) * (i * 37) for i in range(60)]  # ends of parts fall anywhere in what is read at once
    assert asked(b"".join(map(compress, parts)), encoding) == (200, [b"".join(parts)])
    assert asked(b"".join(map(compress, parts))[:-1], encoding) == (400, [])


@pytest.mark.parametrize("encoding", COMPRESS)
def test_many_empty_parts_are_refused(encoding):
    """Each costs what a kilobyte does, and adds nothing to what is limited."""
    empty = COMPRESS[encoding](b"")
    assert DECOMPRESS[encoding](empty * 10_000, LIMIT) == b""
    with pytest.raises(ValueError, match="10000 parts"):
        DECOMPRESS[encoding](empty * 10_001, LIMIT)
    assert asked(empty * 10_001, encoding) == (400, [])


def test_zeros_after_a_gzip_member_are_padding():
    assert DECOMPRESS["gzip"](gzip.compress(b"ab") + bytes(5000) + gzip.compress(b"c") + bytes(3), LIMIT) == b"abc"


def test_a_body_is_compressed_twice_at_most():
    twice = gzip.compress(gzip.compress(b"a"))
    assert asked(twice, "gzip, identity, gzip") == (200, [b"a"])
    assert asked(gzip.compress(twice), "gzip, gzip, gzip") == (415, [])


def test_bytes_that_are_not_utf_8_are_escapes_in_an_answer():
    path = os.fsdecode(b"/a\xff")
    answered = answer({"run_dir": path, "steps": 3})
    assert answered.body == b'{"run_dir": "/a\\udcff", "steps": 3}' and json.loads(answered.body)["run_dir"] == path


@pytest.mark.parametrize("path", ["/a", os.fsdecode(b"/a\xff")])
def test_numbers_that_json_does_not_have_are_null_in_an_answer(path):
    answered = answer({"run_dir": path, "values": [math.nan, math.inf, -math.inf, 1.5], "text": "NaN"})
    assert json.loads(answered.body) == {"run_dir": path, "values": [None, None, None, 1.5], "text": "NaN"}
