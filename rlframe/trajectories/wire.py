"""Groups of sequences as they come over the wire: decoded, checked, and brought into the form in which they are stored.

A group that was sent as JSON is stored as JSON with all keys of the published contract: what a consumer gets is a join
of stored bytes. One that was sent as MessagePack is stored as it came. The first byte tells which one it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple, Union

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from rlframe.errors import UsageError

MAX_DEPTH = 32  # of what is in `messages`, `images` and the like; Python's parsers fail at some hundreds

Token = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
EnvId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Version = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Ints = list[list[Token]]
Floats = list[list[float]]
_Optional = Union[None, UnsetType]


class Group(Struct, forbid_unknown_fields=True, gc=False):
    """A group as JSON, and as MessagePack where no array is binary. Field for field what was published, one more."""

    tokens: Ints
    masks: Ints
    scores: list[float]
    advantages: Floats | _Optional = UNSET
    ref_logprobs: Floats | _Optional = UNSET
    messages: list[list[dict[str, Any]]] | _Optional = UNSET
    generation_params: dict[str, Any] | _Optional = UNSET
    inference_logprobs: Floats | _Optional = UNSET
    overrides: list[dict[str, Any]] | _Optional = UNSET
    group_overrides: dict[str, Any] | _Optional = UNSET
    images: Any = UNSET
    env_id: EnvId | _Optional = UNSET
    distill_token_ids: list[Ints] | _Optional = UNSET
    distill_logprobs: list[Floats] | _Optional = UNSET
    policy_version: Version | _Optional = UNSET


class PackedGroup(Group, forbid_unknown_fields=True, gc=False):
    """A group as MessagePack, in which per-token arrays may be bytes: little-endian int32 or float32, all sequences end
    to end; `lengths` says in int32 where each ends."""

    tokens: Ints | bytes
    masks: Ints | bytes
    scores: list[float] | bytes
    advantages: Floats | bytes | _Optional = UNSET
    ref_logprobs: Floats | bytes | _Optional = UNSET
    inference_logprobs: Floats | bytes | _Optional = UNSET
    lengths: bytes | _Optional = UNSET


KEYS = tuple(name for name in Group.__struct_fields__ if name != "policy_version")  # of an item in a batch
OPTIONAL = KEYS[3:]
_INTS = ("tokens", "masks")
_FLOATS = ("advantages", "ref_logprobs", "inference_logprobs")
_FREE = ("messages", "generation_params", "overrides", "group_overrides", "images")

_json_group = msgspec.json.Decoder(Group)
_packed_group = msgspec.msgpack.Decoder(PackedGroup)
_json_members = msgspec.json.Decoder(dict[str, Raw])
_packed_members = msgspec.msgpack.Decoder(dict[str, Raw])
_json_list = msgspec.json.Decoder(list[Raw])
_packed_list = msgspec.msgpack.Decoder(list[Raw])
_json = msgspec.json.Encoder()
_packed = msgspec.msgpack.Encoder()


class InvalidGroupError(UsageError):
    """A group that cannot be. `loc` is the path to the field, as in FastAPI's answers; `kind` is their `type`."""

    def __init__(self, loc: Sequence[str | int], message: str, kind: str = "value_error"):
        super().__init__(message)
        self.loc = tuple(loc)
        self.kind = kind


class Parsed(NamedTuple):
    """What the queue has to know of a group, and what is stored of it."""

    sequences: int
    tokens: int
    env_id: int | None
    policy_version: int | None
    payload: bytes


def parse_group(body: bytes, packed: bool) -> Parsed:
    """Decodes and checks one group.

    Args:
        body: JSON, or MessagePack where `packed`.

    Raises:
        InvalidGroupError: with the path to the first field that is wrong.
    """
    try:
        return _parse_packed(body) if packed else _parse_json(body)
    except RecursionError:
        raise InvalidGroupError((), f"The group is nested more than {MAX_DEPTH} levels deep.") from None


def parse_groups(body: bytes, packed: bool) -> list[Parsed]:
    """Decodes and checks a list of groups; as `parse_group`, with the place in the list before each path."""
    try:
        items = (_packed_list if packed else _json_list).decode(body)
    except RecursionError:
        raise InvalidGroupError((), f"The list is nested more than {MAX_DEPTH} levels deep.") from None
    except msgspec.DecodeError as error:
        raise _explained(error, body, packed) from None
    groups = []
    for i, item in enumerate(items):
        try:
            groups.append(parse_group(bytes(item), packed))
        except InvalidGroupError as error:
            raise InvalidGroupError((i, *error.loc), str(error), error.kind) from None
    return groups


def _parse_json(body: bytes) -> Parsed:
    body = body.strip()
    try:
        group = _json_group.decode(body)
    except msgspec.ValidationError as error:
        if "unknown field" not in str(error):
            raise _explained(error, body, False) from None
        members = _json_members.decode(body)
        known = {name: members[name] for name in (*KEYS, "policy_version") if name in members}
        return _parse_json(_json.encode(known))
    except msgspec.DecodeError as error:
        raise _explained(error, body, False) from None
    lengths = [len(sequence) for sequence in group.tokens]
    _check(group, lengths)
    absent = [name for name in OPTIONAL if getattr(group, name) is UNSET]
    if absent:
        body = body[:-1] + "".join(f',"{name}":null' for name in absent).encode() + b"}"
    return _parsed(group, lengths, body)


def _parse_packed(body: bytes) -> Parsed:
    try:
        group = _packed_group.decode(body)
    except msgspec.ValidationError as error:
        if "unknown field" not in str(error):
            raise _explained(error, body, True) from None
        members = _packed_members.decode(body)
        known = {name: members[name] for name in PackedGroup.__struct_fields__ if name in members}
        return _parse_packed(_packed.encode(known))
    except msgspec.DecodeError as error:
        raise _explained(error, body, True) from None
    lengths = _lengths(group)
    _check(group, lengths)
    return _parsed(group, lengths, body)


def _parsed(group: Group, lengths: list[int], payload: bytes) -> Parsed:
    env_id = None if group.env_id is UNSET else group.env_id
    version = None if group.policy_version is UNSET else group.policy_version
    return Parsed(len(lengths), sum(lengths), env_id, version, payload)


# Checks


def _lengths(group: PackedGroup) -> list[int]:
    """Tokens of each sequence."""
    if isinstance(group.tokens, list):
        return [len(sequence) for sequence in group.tokens]
    if not isinstance(group.lengths, bytes):
        raise InvalidGroupError(("lengths",), "Binary tokens need lengths: int32, the tokens of each sequence.", "missing")
    lengths = _array(group.lengths, "lengths", np.dtype("<i4")).tolist()
    if min(lengths, default=0) < 0:
        raise InvalidGroupError(("lengths",), f"A length is not negative; got {min(lengths)}.")
    return lengths


def _check(group: Group, lengths: list[int]) -> None:
    if not lengths:
        raise InvalidGroupError(("tokens",), "A group has at least one sequence; this one is empty.", "too_short")
    if 0 in lengths:
        raise InvalidGroupError(("tokens", lengths.index(0)), "A sequence has at least one token.", "too_short")
    for name in _INTS:
        _check_array(name, getattr(group, name), lengths, np.dtype("<i4"))
    for name in _FLOATS:
        value = getattr(group, name)
        if value is not None and value is not UNSET:
            _check_array(name, value, lengths, np.dtype("<f4"))
    scores = group.scores
    if isinstance(scores, bytes):
        scores = _array(scores, "scores", np.dtype("<f4")).tolist()
    if len(scores) != len(lengths):
        raise InvalidGroupError(("scores",), f"There are {len(lengths)} sequences in tokens, but {len(scores)} scores.")
    _check_finite(("scores",), scores)
    _check_distillation(group, len(lengths))
    for name in _FREE:
        value = getattr(group, name)
        if value is not None and value is not UNSET:
            _check_free(name, value)


def _check_array(name: str, value: list[list[Any]] | bytes, lengths: list[int], dtype: np.dtype) -> None:
    if isinstance(value, bytes):
        array = _array(value, name, dtype)
        if len(array) != sum(lengths):
            raise InvalidGroupError((name,), f"The lengths sum to {sum(lengths)} tokens, but {name} holds {len(array)}.")
        if dtype.kind == "f" and not np.isfinite(array).all():
            raise InvalidGroupError((name, int(np.isfinite(array).argmin())), f"{name} holds NaN or infinity.", "finite_number")
        return
    found = [len(sequence) for sequence in value]
    if found != lengths:
        _explain_ragged(name, found, lengths)
    if dtype.kind == "f":
        for i, sequence in enumerate(value):
            _check_finite((name, i), sequence)


def _explain_ragged(name: str, found: list[int], lengths: list[int]) -> None:
    if len(found) != len(lengths):
        raise InvalidGroupError((name,), f"There are {len(lengths)} sequences in tokens, but {len(found)} in {name}.")
    i = next(i for i, (a, b) in enumerate(zip(found, lengths)) if a != b)
    raise InvalidGroupError((name, i), f"Sequence {i} has {lengths[i]} tokens, but {found[i]} values in {name}.")


def _check_finite(loc: tuple[str | int, ...], values: list[float]) -> None:
    # The sum is finite where all are, but for sums that overflow.
    if math.isfinite(sum(values)):
        return
    for i, value in enumerate(values):
        if not math.isfinite(value):
            raise InvalidGroupError((*loc, i), f"{loc[0]} holds finite numbers; got {value}.", "finite_number")


def _check_distillation(group: Group, sequences: int) -> None:
    shapes = {}
    for name in ("distill_token_ids", "distill_logprobs"):
        value = getattr(group, name)
        if value is None or value is UNSET:
            continue
        if len(value) != sequences:
            raise InvalidGroupError((name,), f"There are {sequences} sequences in tokens, but {len(value)} in {name}.")
        shapes[name] = [[len(position) for position in sequence] for sequence in value]
        if name == "distill_logprobs":
            for i, sequence in enumerate(value):
                for j, position in enumerate(sequence):
                    _check_finite((name, i, j), position)
    if len(shapes) == 2 and shapes["distill_token_ids"] != shapes["distill_logprobs"]:
        raise InvalidGroupError(
            ("distill_logprobs",), "distill_logprobs and distill_token_ids have one shape, [sequence][position][k]."
        )


def _check_free(name: str, value: Any) -> None:
    if name == "messages":
        for i, sequence in enumerate(value):
            for j, message in enumerate(sequence):
                if "role" not in message or "content" not in message:
                    raise InvalidGroupError((name, i, j), "A message has a role and content.")
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _members(name, outer)]
        if not level:
            return
    raise InvalidGroupError((name,), f"{name} is nested more than {MAX_DEPTH} levels deep.")


def _members(name: str, value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidGroupError((name,), f"{name} holds {value}, which JSON does not have.", "finite_number")
    if value is None or isinstance(value, (str, int, float)):
        return ()
    raise InvalidGroupError((name,), f"{name} holds {type(value).__name__}, which JSON does not have.")


def _array(value: bytes, name: str, dtype: np.dtype) -> np.ndarray:
    if len(value) % dtype.itemsize:
        raise InvalidGroupError((name,), f"{name} is {len(value)} bytes, which are no whole {dtype.name} values.")
    return np.frombuffer(value, dtype)


def _explained(error: msgspec.DecodeError, body: bytes, packed: bool) -> InvalidGroupError:
    """The error of a decoder, with its path as FastAPI has them."""
    message, _, path = str(error).partition(" - at `$")
    if isinstance(error, msgspec.ValidationError):
        if message.startswith("Object missing required field"):
            return InvalidGroupError((*_path(path), message.split("`")[1]), "Field required", "missing")
        return InvalidGroupError(_path(path), message, "type_error")
    if not packed and (found := _not_finite(body)) is not None:
        return InvalidGroupError(found, "A number has to be finite; got NaN or an infinity.", "finite_number")
    kind = "MessagePack" if packed else "JSON"
    return InvalidGroupError((), f"The body is no valid {kind}: {message}.", "msgpack_invalid" if packed else "json_invalid")


def _path(path: str) -> tuple[str | int, ...]:
    """`.tokens[0][1]` as ("tokens", 0, 1)."""
    steps = path.rstrip("`").replace("[", ".").replace("]", "").split(".")
    return tuple(int(step) if step.isdigit() else step for step in steps if step)


def _not_finite(body: bytes) -> tuple[str | int, ...] | None:
    """Where Python's parser, which accepts them, finds NaN or an infinity; None: nowhere, or it fails too."""
    import json

    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    stack: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    while stack:
        loc, value = stack.pop()
        if isinstance(value, float) and not math.isfinite(value):
            return loc
        if isinstance(value, dict):
            stack += [((*loc, key), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            stack += [((*loc, i), inner) for i, inner in enumerate(value)]
    return None


# What consumers get


def is_packed(payload: bytes) -> bool:
    return payload[:1] != b"{"


def join_json(payloads: Iterable[bytes]) -> bytes:
    """A JSON array of items."""
    return b"[" + b",".join(to_json(payload) if is_packed(payload) else payload for payload in payloads) + b"]"


def join_packed(payloads: Sequence[bytes]) -> bytes:
    """A MessagePack array of items."""
    return _packed.encode([Raw(payload if is_packed(payload) else to_packed(payload)) for payload in payloads])


def to_packed(payload: bytes) -> bytes:
    """A stored JSON group as MessagePack."""
    return _packed.encode(msgspec.json.decode(payload))


def to_json(payload: bytes) -> bytes:
    """A stored MessagePack group as JSON, with all keys."""
    group = _packed_group.decode(payload)
    lengths = _lengths(group)
    item: dict[str, Any] = {}
    for name in KEYS:
        value = getattr(group, name)
        if isinstance(value, bytes):
            array = np.frombuffer(value, "<i4" if name in _INTS else "<f4").tolist()
            value = array if name == "scores" else _split(array, lengths)
        item[name] = None if value is UNSET else value
    if group.policy_version is not UNSET:
        item["policy_version"] = group.policy_version
    return _json.encode(item)


def _split(values: list[Any], lengths: list[int]) -> list[list[Any]]:
    ends = np.cumsum(lengths).tolist()
    return [values[end - length : end] for end, length in zip(ends, lengths)]
