"""The state of all runs as bytes, made beside the event loop: in a thread, in slices."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from rlframe.errors import StoreError

FORMAT = 1
_SLICE = 1000  # entries of a list that are encoded at once: a tenth of a millisecond, in which nothing else runs

_encode = msgspec.msgpack.Encoder().encode


def encode(runs: dict[str, Any]) -> bytes:
    """MessagePack of the runs' states, long lists slice by slice."""
    return _encode({"format": FORMAT, "runs": _sliced(runs)})


def decode(snapshot: bytes) -> dict[str, Any]:
    """The runs' states."""
    state = msgspec.msgpack.decode(snapshot)
    if state["format"] != FORMAT:
        raise StoreError(f"The store's snapshot is of format {state['format']}; this version reads format {FORMAT}.")
    return state["runs"]


def _sliced(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _sliced(inner) for name, inner in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) <= _SLICE:
        return [_sliced(inner) for inner in value]
    pieces = [b"\xdd" + len(value).to_bytes(4, "big")]  # an array of so many
    for start in range(0, len(value), _SLICE):
        piece = _encode(value[start : start + _SLICE])
        pieces.append(piece[1 if piece[0] & 0xF0 == 0x90 else 3 :])  # without the header of an array of its own
        time.sleep(0)  # lets other threads run
    return msgspec.Raw(b"".join(pieces))
