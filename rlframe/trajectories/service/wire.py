"""Groups of sequences as they come over the wire: decoded, checked, and brought into the form in which they are stored.

A group that was sent as JSON is stored as JSON with all keys of the published contract: what a consumer gets is a join
of stored bytes. One that was sent as MessagePack is stored as it came. The first byte tells which one it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, Union

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from rlframe.trajectories.messages import ANY_LENGTH_FIELD, FLOAT_FIELDS, INT_FIELDS
from rlframe.trajectories.service.validation import (
    InvalidGroupError,
    check,
    explained,
    lengths_of,
    nested_too_deep,
    not_unicode,
    text_lengths,
)

Token = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
EnvId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Version = Annotated[int, Meta(ge=-(2**53), le=2**53)]  # as in `models`
Ints = list[list[Token]]
Floats = list[list[float]]
_Optional = Union[None, UnsetType]


# How integers, floats that may be absent, and scores come.
IntegersT = TypeVar("IntegersT")
FloatsT = TypeVar("FloatsT")
ScoresT = TypeVar("ScoresT")


class WireGroup(Struct, Generic[IntegersT, FloatsT, ScoresT], forbid_unknown_fields=True, gc=False, kw_only=True):
    """A group as it comes. Arrays are [sequences][tokens]."""

    tokens: IntegersT
    masks: Annotated[IntegersT, Meta(description="-100 where there is no loss.")]
    scores: Annotated[ScoresT, Meta(description="true and false are taken as 1 and 0.")]
    advantages: Annotated[FloatsT | UnsetType, Meta(description="Of any lengths; taken where they fit the tokens.")] = (
        UNSET
    )
    ref_logprobs: FloatsT | UnsetType = UNSET
    inference_logprobs: Annotated[FloatsT | UnsetType, Meta(description="1.0 where there is no loss.")] = UNSET
    messages: Annotated[list[list[dict[str, Any]]] | _Optional, Meta(description="Each has a role and content.")] = (
        UNSET
    )
    generation_params: dict[str, Any] | _Optional = UNSET
    overrides: list[dict[str, Any]] | _Optional = UNSET
    group_overrides: dict[str, Any] | _Optional = UNSET
    images: Any = UNSET
    env_id: EnvId | _Optional = UNSET
    distill_token_ids: Annotated[list[Ints] | _Optional, Meta(description="[sequence][position][k]")] = UNSET
    distill_logprobs: Annotated[list[Floats] | _Optional, Meta(description="[sequence][position][k]")] = UNSET
    policy_version: Annotated[Version | _Optional, Meta(description="That the group was sampled from.")] = UNSET


Scores = list[Union[float, bool]]
JsonGroup = WireGroup[Ints, Union[Floats, None], Scores]
TextGroup = WireGroup[Raw, Raw, Scores]  # as JSON whose arrays stay text
PackedArrays = WireGroup[Union[Ints, bytes], Union[Floats, bytes, None], Union[Scores, bytes]]


class PackedGroup(PackedArrays, kw_only=True):
    """A group as MessagePack, in which the arrays may be bytes: little-endian int32 or float32, all sequences end to
    end. `lengths` says in int32 how many tokens each has."""

    lengths: bytes | _Optional = UNSET


KEYS = tuple(name for name in WireGroup.__struct_fields__ if name != "policy_version")  # of an item in a batch


class _Encoding(NamedTuple):
    """How groups come: the structure of one, and functions that decode and encode."""

    structure: type[Struct]
    group: Callable[[bytes], Any]
    members: Callable[[bytes], dict[str, Raw]]  # of a group, by name
    items: Callable[[bytes], list[Raw]]
    encode: Callable[[Any], bytes]


def _encoding(module: Any, structure: type[Struct], group: Any) -> _Encoding:
    return _Encoding(
        structure,
        group=module.Decoder(group).decode,
        members=module.Decoder(dict[str, Raw]).decode,
        items=module.Decoder(list[Raw]).decode,
        encode=module.Encoder().encode,
    )


_JSON = _encoding(msgspec.json, WireGroup, TextGroup)
_PACKED = _encoding(msgspec.msgpack, PackedGroup, PackedGroup)
_decode_numbers = msgspec.json.Decoder(JsonGroup).decode  # of JSON, whose arrays `_JSON.group` leaves as text


class ParsedGroup(NamedTuple):
    """What the queue has to know of a group, and what is stored of it."""

    sequences: int
    tokens: int
    env_id: int | None
    policy_version: int | None
    payload: bytes


def parse_group(body: bytes, packed: bool) -> ParsedGroup:
    """Decode and check one group.

    Args:
        body: JSON, or MessagePack where `packed`.

    Raises:
        InvalidGroupError: with the path to the first field that is wrong.
    """
    try:
        return _parse(body, _PACKED) if packed else _parse(body.strip(), _JSON)
    except RecursionError:
        raise nested_too_deep() from None
    except UnicodeDecodeError as error:
        raise not_unicode(error) from None


def parse_groups(body: bytes, packed: bool) -> Iterator[ParsedGroup]:
    """Decode and check a list of groups, one after the other; as `parse_group`, with its place before each path."""
    try:
        items = (_PACKED if packed else _JSON).items(body)
    except RecursionError:
        raise nested_too_deep() from None
    except UnicodeDecodeError as error:
        raise not_unicode(error) from None
    except msgspec.DecodeError as error:
        raise explained(error, body, packed) from None
    for i, item in enumerate(items):
        try:
            yield parse_group(bytes(item), packed)
        except InvalidGroupError as error:
            raise InvalidGroupError((i, *error.loc), str(error), error.kind) from None


def _parse(body: bytes, encoding: _Encoding) -> ParsedGroup:
    packed = encoding is _PACKED
    try:
        group = encoding.group(body)
        if isinstance(group.scores, list) and any(isinstance(score, bool) for score in group.scores):
            # Trainers get numbers, as from the published service.
            scores = Raw(encoding.encode([float(score) for score in group.scores]))
            return _parse(encoding.encode({**encoding.members(body), "scores": scores}), encoding)
        lengths = lengths_of(group) if packed else _lengths_of_text(group)
        if lengths is None:  # a closer look, for whoever is to be told what is wrong
            group = _decode_numbers(body)
            lengths = lengths_of(group)
    except msgspec.ValidationError as error:
        if "unknown field" not in str(error):
            raise explained(error, body, packed) from None
        known = encoding.structure.__struct_fields__
        members = {name: value for name, value in encoding.members(body).items() if name in known}
        return _parse(encoding.encode(members), encoding)
    except msgspec.DecodeError as error:
        raise explained(error, body, packed) from None
    check(group, lengths)
    absent = [] if packed else [name for name in KEYS if getattr(group, name) is UNSET]
    if absent:
        nulls = "".join(f',"{name}":null' for name in absent)
        body = b"".join((memoryview(body)[:-1], nulls.encode(), b"}"))  # one copy
    env_id = None if group.env_id is UNSET else group.env_id
    version = None if group.policy_version is UNSET else group.policy_version
    return ParsedGroup(len(lengths), sum(lengths), env_id, version, body)


def _lengths_of_text(group: Any) -> list[int] | None:
    """Tokens of each sequence, where every array has this shape and holds what it should; else None."""
    lengths = text_lengths(bytes(group.tokens), integers=True)
    if lengths is None or text_lengths(bytes(group.masks), integers=True) != lengths:
        return None
    for name in FLOAT_FIELDS:
        value = getattr(group, name)
        text = b"null" if value is UNSET else bytes(value)  # a `Raw` is equal to nothing
        if text in (b"null", b"[]"):
            continue
        found = text_lengths(text, integers=False)
        if found is None or (found != lengths and name != ANY_LENGTH_FIELD):
            return None
    return lengths


# What consumers get


def is_packed(payload: bytes) -> bool:
    return payload[:1] != b"{"


def join_json(payloads: Iterable[bytes]) -> bytes:
    """A JSON array of items."""
    return b"[" + b",".join(map(as_json, payloads)) + b"]"


def join_packed(payloads: Sequence[bytes]) -> bytes:
    """A MessagePack array of items."""
    return _PACKED.encode([Raw(as_packed(payload)) for payload in payloads])


def as_packed(payload: bytes) -> bytes:
    """A stored group as MessagePack: as it came, or with lists."""
    if is_packed(payload):
        return payload
    try:
        return _PACKED.encode(msgspec.json.decode(payload))  # in half the time that it takes with types
    except OverflowError:  # where a float is meant, an integer may have more than the 64 bits of MessagePack's
        return _PACKED.encode(_decode_numbers(payload))


def as_json(payload: bytes) -> bytes:
    """A stored group as JSON, with all keys."""
    if not is_packed(payload):
        return payload
    group = _PACKED.group(payload)
    lengths = lengths_of(group)
    item: dict[str, Any] = {}
    for name in KEYS:
        value = getattr(group, name)
        if isinstance(value, bytes):
            numbers = np.frombuffer(value, "<i4" if name in INT_FIELDS else "<f4").tolist()
            value = numbers if name == "scores" else _split(numbers, lengths)
        item[name] = None if value is UNSET else value
    if group.policy_version is not UNSET:
        item["policy_version"] = group.policy_version
    return _JSON.encode(item)


def _split(values: list[Any], lengths: list[int]) -> list[list[Any]]:
    ends = np.cumsum(lengths).tolist()
    return [values[end - length : end] for end, length in zip(ends, lengths)]
