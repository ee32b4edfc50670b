"""Test that services decompress request bodies of one or several parts, and that responses are valid JSON."""

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


def read_body(body, encoding):
    """Send a request to `ReadBody`. Return the response's status, and a list of the bodies that the application got."""
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
def test_several_compressed_parts_become_one_body(encoding):
    compress = COMPRESS[encoding]
    # The sizes differ, so the parts end at different offsets of a piece.
    parts = [bytes([i % 256]) * (i * 37) for i in range(60)]
    assert read_body(b"".join(map(compress, parts)), encoding) == (200, [b"".join(parts)])
    assert read_body(b"".join(map(compress, parts))[:-1], encoding) == (400, [])


@pytest.mark.parametrize("encoding", COMPRESS)
def test_many_empty_parts_are_refused(encoding):
    """Decompressing an empty part takes time, but adds nothing to the body. So a limit on the size is not enough."""
    empty = COMPRESS[encoding](b"")
    assert DECOMPRESS[encoding](empty * 10_000, LIMIT) == b""
    with pytest.raises(ValueError, match="10000 parts"):
        DECOMPRESS[encoding](empty * 10_001, LIMIT)
    assert read_body(empty * 10_001, encoding) == (400, [])


def test_zero_bytes_between_gzip_parts_are_ignored():
    assert DECOMPRESS["gzip"](gzip.compress(b"ab") + bytes(5000) + gzip.compress(b"c") + bytes(3), LIMIT) == b"abc"


def test_body_with_more_than_two_encodings_is_refused():
    twice = gzip.compress(gzip.compress(b"a"))
    assert read_body(twice, "gzip, identity, gzip") == (200, [b"a"])
    assert read_body(gzip.compress(twice), "gzip, gzip, gzip") == (415, [])


def test_invalid_utf_8_in_a_path_is_escaped_in_json():
    path = os.fsdecode(b"/a\xff")
    response = answer({"run_dir": path, "steps": 3})
    assert response.body == b'{"run_dir": "/a\\udcff", "steps": 3}' and json.loads(response.body)["run_dir"] == path


@pytest.mark.parametrize("path", ["/a", os.fsdecode(b"/a\xff")])
def test_nan_and_infinity_become_null_in_json(path):
    response = answer({"run_dir": path, "values": [math.nan, math.inf, -math.inf, 1.5], "text": "NaN"})
    assert json.loads(response.body) == {"run_dir": path, "values": [None, None, None, 1.5], "text": "NaN"}
