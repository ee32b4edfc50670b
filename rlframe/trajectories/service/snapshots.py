"""The state of all runs as bytes, made beside the event loop: in a thread, in slices."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from rlframe.errors import StoreError

FORMAT = 2
_SLICE = 1000  # entries of a list that are encoded at once: a tenth of a millisecond, in which nothing else runs

_encoder = msgspec.msgpack.Encoder()


def encode(runs: dict[str, Any]) -> bytes:
    """MessagePack of the runs' states, long lists slice by slice, and all in one piece of memory."""
    out = bytearray()
    _append({"format": FORMAT, "runs": runs}, out)
    return bytes(out)


def decode(snapshot: bytes) -> dict[str, Any]:
    """The runs' states."""
    state = msgspec.msgpack.decode(snapshot)
    if state["format"] != FORMAT:
        raise StoreError(f"The store's snapshot is of format {state['format']}; this version reads format {FORMAT}.")
    return state["runs"]


def _append(value: Any, out: bytearray) -> None:
    if isinstance(value, dict):
        out += b"\xdf" + len(value).to_bytes(4, "big")  # a map of so many
        for name, inner in value.items():
            _encoder.encode_into(name, out, -1)
            _append(inner, out)
    elif isinstance(value, list) and len(value) > _SLICE:
        out += b"\xdd" + len(value).to_bytes(4, "big")  # an array of so many
        for start in range(0, len(value), _SLICE):
            end = len(out)
            _encoder.encode_into(value[start : start + _SLICE], out, end)
            del out[end : end + (1 if out[end] & 0xF0 == 0x90 else 3)]  # the header of an array of its own
            time.sleep(0)  # lets other threads run
    elif isinstance(value, list):
        out += b"\xdd" + len(value).to_bytes(4, "big")
        for inner in value:
            _append(inner, out)
    else:
        _encoder.encode_into(value, out, -1)
