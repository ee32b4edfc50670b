"""Check the values of groups. The types of the fields are already checked. Errors have the path of the invalid field.

The numbers of a JSON group are checked without decoding them (`text_lengths`). Decoding would take three times as much
time. It is not needed, because the JSON text is stored unchanged.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from rlframe.errors import UsageError
from rlframe.trajectories.messages import ANY_LENGTH_FIELD, FLOAT_FIELDS, INT_FIELDS, MAX_FLOAT32, OPAQUE_FIELDS

MAX_DEPTH = 32  # limit for the nesting of `messages`, `images` and so on; Python's parsers fail at hundreds

_MAX_EXPLAINED_BYTES = 1 << 20  # maximum size to search for NaN by parsing again; this blocks the event loop
# Matches a surrogate pair, a lone surrogate (its digits are group 1), or another escape.
_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u([dD][89a-fA-F]..)|.)", re.DOTALL)
_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
_INT_CHARACTERS = b"0123456789- \n\r\t"
_FLOAT_CHARACTERS = _INT_CHARACTERS + b".eE+"
_INT_WIDTH = 10  # maximum number of characters of a number and its comma; longer numbers may exceed int32
_FLOAT_WIDTH = 39  # characters with the comma; up to this length, numbers without positive exponent are float32


class InvalidGroupError(UsageError):
    """A group is invalid. `loc` is the path of the field. `kind` is the error's `type` in answers, as in FastAPI."""

    def __init__(self, loc: Sequence[str | int], message: str, kind: str = "value_error"):
        super().__init__(message)
        self.loc = tuple(loc)
        self.kind = kind


def nested_too_deep(*loc: str) -> InvalidGroupError:
    return InvalidGroupError(loc, f"A group may be nested at most {MAX_DEPTH} levels deep.")


def not_unicode(error: UnicodeDecodeError) -> InvalidGroupError:
    return InvalidGroupError((), f"Text must be UTF-8: {error.reason}.", "string_unicode")


def lengths_of(group: Any) -> list[int]:
    """Return the number of tokens in each sequence."""
    if isinstance(group.tokens, list):
        lengths = [len(sequence) for sequence in group.tokens]
        if any(isinstance(getattr(group, name), bytes) for name in ("masks", *FLOAT_FIELDS)) and (
            not isinstance(group.lengths, bytes) or _array("lengths", group.lengths, _INT32).tolist() != lengths
        ):
            raise InvalidGroupError(
                ("lengths",), "Binary arrays need lengths: int32, the number of tokens in each sequence."
            )
        return lengths
    if not isinstance(group.lengths, bytes):
        message = "Binary tokens need lengths: int32, the number of tokens in each sequence."
        raise InvalidGroupError(("lengths",), message, "missing")
    lengths = _array("lengths", group.lengths, _INT32).tolist()
    if min(lengths, default=0) < 0:
        raise InvalidGroupError(("lengths",), f"A length must not be negative; got {min(lengths)}.")
    return lengths


def text_lengths(text: bytes, *, integers: bool) -> list[int] | None:
    """Return the length of each list in a JSON array of arrays of numbers, without decoding the numbers.

    Args:
        text: Valid JSON.
        integers: True requires int32 numbers, False requires finite float32 numbers.

    Returns:
        The lengths, or None if this check cannot exclude that `text` is something else. Lists with fewer than two
        numbers also return None.
    """
    # Only brackets and commas should remain.
    brackets = text.translate(None, _INT_CHARACTERS if integers else _FLOAT_CHARACTERS)
    if not (brackets.startswith(b"[[") and brackets.endswith(b"]]")):
        return None
    commas = [len(part) for part in brackets[2:-2].split(b"],[")]
    characters = np.frombuffer(text, np.uint8)
    ends = characters == ord(",")
    if 0 in commas or np.count_nonzero(ends) != sum(commas) + len(commas) - 1:
        return None
    if not _in_every_window(ends, _INT_WIDTH if integers else _FLOAT_WIDTH):
        return None
    # Usually there are no exponents, which avoids the slower count of character pairs.
    exponents = 0 if integers else np.count_nonzero(characters == ord("e"))
    if not integers and (b"E" in text or (exponents and exponents != text.count(b"e-"))):
        return None
    return [count + 1 for count in commas]


def _in_every_window(ends: np.ndarray, width: int) -> bool:
    """Return True if every `width` consecutive characters contain the end of a number."""
    covered = 1
    while covered < width:
        step = min(covered, width - covered)
        ends = ends[:-step] | ends[step:]
        covered += step
    return bool(ends.all())


def check_group(group: Any, lengths: list[int]) -> None:
    """Raise `InvalidGroupError` if a field does not match sequences of these `lengths`.

    Arrays are lists, bytes, or JSON text whose shape and numbers are already checked.
    """
    if not lengths:
        raise InvalidGroupError(("tokens",), "A group must have at least one sequence; this one is empty.", "too_short")
    if 0 in lengths:
        raise InvalidGroupError(("tokens", lengths.index(0)), "A sequence must have at least one token.", "too_short")
    for name in INT_FIELDS + FLOAT_FIELDS:
        value = getattr(group, name)
        if isinstance(value, bytes):
            _check_binary(name, value, lengths)
        # atroposlib's BaseEnv sends [] for missing fields.
        elif isinstance(value, list) and (value or name in INT_FIELDS):
            _check_lists(name, value, None if name == ANY_LENGTH_FIELD else lengths)
    scores = group.scores
    if isinstance(scores, bytes):
        scores = _array("scores", scores, _FLOAT32).tolist()
    _check_count("scores", scores, len(lengths))
    _check_finite(("scores",), scores)
    _check_distillation(group, len(lengths))
    for name in OPAQUE_FIELDS:
        value = getattr(group, name)
        if value is not None and value is not UNSET:
            _check_opaque(name, value)


def _check_binary(name: str, value: bytes, lengths: list[int]) -> None:
    array = _array(name, value, _INT32 if name in INT_FIELDS else _FLOAT32)
    if len(array) != sum(lengths):
        raise InvalidGroupError((name,), f"The lengths sum to {sum(lengths)} tokens, but {name} holds {len(array)}.")
    if name in FLOAT_FIELDS and not np.isfinite(array).all():
        raise InvalidGroupError((name,), f"{name} holds NaN or an infinity.", "finite_number")


def _check_lists(name: str, value: list[list[Any]], lengths: list[int] | None) -> None:
    """Check the lengths and numbers of a list of lists. If `lengths` is None, any lengths are allowed."""
    if lengths is not None:
        _check_count(name, value, len(lengths))
    for i, sequence in enumerate(value):
        if lengths is not None and len(sequence) != lengths[i]:
            message = f"Sequence {i} has {lengths[i]} tokens, but {len(sequence)} values in {name}."
            raise InvalidGroupError((name, i), message)
        if name in FLOAT_FIELDS:
            _check_finite((name, i), sequence)


def _check_count(name: str, value: list[Any], sequences: int) -> None:
    if len(value) != sequences:
        raise InvalidGroupError((name,), f"There are {sequences} sequences in tokens, but {len(value)} in {name}.")


def _check_finite(loc: tuple[str | int, ...], values: list[float]) -> None:
    if not values or (math.isfinite(sum(values)) and min(values) >= -MAX_FLOAT32 and max(values) <= MAX_FLOAT32):
        return
    for i, value in enumerate(values):
        if not abs(value) <= MAX_FLOAT32:
            raise InvalidGroupError(
                (*loc, i), f"{loc[0]} must hold finite float32 numbers; got {value}.", "finite_number"
            )


def _check_distillation(group: Any, sequences: int) -> None:
    shapes = {}
    for name in ("distill_token_ids", "distill_logprobs"):
        value = getattr(group, name)
        if not value:
            continue
        _check_count(name, value, sequences)
        shapes[name] = [[len(position) for position in sequence] for sequence in value]
        if name == "distill_logprobs":
            for i, sequence in enumerate(value):
                for j, position in enumerate(sequence):
                    _check_finite((name, i, j), position)
    if len(shapes) == 2 and shapes["distill_token_ids"] != shapes["distill_logprobs"]:
        message = "distill_logprobs and distill_token_ids must have the same shape, [sequence][position][k]."
        raise InvalidGroupError(("distill_logprobs",), message)


def _check_opaque(name: str, value: Any) -> None:
    if name == "messages":
        for i, sequence in enumerate(value):
            for j, message in enumerate(sequence):
                if "role" not in message or "content" not in message:
                    raise InvalidGroupError((name, i, j), "A message must have a role and content.", "missing")
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _children(name, outer)]
        if not level:
            return
    raise nested_too_deep(name)


def _children(name: str, value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise InvalidGroupError((name,), f"{name} has a key that is not text, which JSON does not allow.")
        return value.values()
    if isinstance(value, list):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidGroupError((name,), f"{name} holds {value}, which JSON does not allow.", "finite_number")
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise InvalidGroupError(
            (name,), f"{name} holds an integer of more than 64 bits, which MessagePack does not allow."
        )
    if value is None or isinstance(value, (str, int, float)):
        return ()
    raise InvalidGroupError((name,), f"{name} holds {type(value).__name__}, which JSON does not allow.")


def _array(name: str, value: bytes, dtype: np.dtype) -> np.ndarray:
    if len(value) % dtype.itemsize:
        raise InvalidGroupError(
            (name,), f"{name} has {len(value)} bytes, which is not a whole number of {dtype.name} values."
        )
    return np.frombuffer(value, dtype)


def describe_decode_error(error: msgspec.DecodeError, body: bytes, packed: bool) -> InvalidGroupError:
    """Convert a decoder's error about `body` to an error that names the path to the field."""
    message, _, where = str(error).partition(" - at ")  # "`$.a[0]`", or "`key` in `$.a`"
    path = where.partition("$")[2]
    if isinstance(error, msgspec.ValidationError):
        if message.startswith("Object missing required field"):
            return InvalidGroupError((*_path_steps(path), message.split("`")[1]), "Field required", "missing")
        return InvalidGroupError(_path_steps(path), message, "type_error")
    if not packed and (half := _lone_surrogate(body, message)) is not None:
        wrong = f"Text holds half of a surrogate pair (byte {half}), which is not a character."
        return InvalidGroupError((), wrong, "string_unicode")
    look = _find_not_finite if len(body) <= _MAX_EXPLAINED_BYTES else _find_field_not_finite
    if not packed and (found := look(body, message)) is not None:
        return InvalidGroupError(found, "A number must be finite; got NaN or an infinity.", "finite_number")
    name, kind = ("MessagePack", "msgpack_invalid") if packed else ("JSON", "json_invalid")
    return InvalidGroupError((), f"The body is not valid {name}: {message}.", kind)


def _path_steps(path: str) -> tuple[str | int, ...]:
    """Split a path into steps: `.tokens[0][1]` becomes ("tokens", 0, 1)."""
    steps = path.rstrip("`").replace("[", ".").replace("]", "").split(".")
    return tuple(int(step) if step.isdigit() else step for step in steps if step)


def _find_field_not_finite(body: bytes, message: str) -> tuple[str, ...] | None:
    """Return the field that contains NaN or an infinity, or None. The decoder's message has its byte position."""
    byte = re.search(r"\(byte (\d+)\)", message)
    if byte is None or not re.compile(rb"-?(NaN|Infinity)").match(body, int(byte[1])):
        return None
    names = (*INT_FIELDS, *FLOAT_FIELDS, "scores", "distill_logprobs", *OPAQUE_FIELDS)
    place, name = max((body.rfind(b'"%s"' % name.encode(), 0, int(byte[1])), name) for name in names)
    return (name,) if place >= 0 else ()


def _lone_surrogate(body: bytes, message: str) -> int | None:
    """Return the position of a lone surrogate if it is the reason why the decoder failed, otherwise None."""
    if "surrogate" not in message and "truncated" not in message:  # "truncated" means near the end of the text
        return None
    half = next((escape for escape in _ESCAPE.finditer(body) if escape[1] is not None), None)
    return None if half is None else half.start()


def _find_not_finite(body: bytes, _: str) -> tuple[str | int, ...] | None:
    """Return the path to a NaN or an infinity. Return None if the body has neither, or if Python cannot parse it."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    stack: list[tuple[tuple[str | int, ...], Any]] = [((), [value])]
    while stack:
        loc, value = stack.pop()
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(inner, float) and not math.isfinite(inner):
                return (*loc, key)[1:]
            if isinstance(inner, (dict, list)):
                stack.append(((*loc, key), inner))
    return None
