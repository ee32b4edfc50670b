"""Decode and check groups from requests, and convert groups between the stored form and the form in answers.

A JSON group is stored as JSON with all keys that atroposlib's server sends. So the service makes a batch by joining
stored bytes. A MessagePack group is stored unchanged. The first byte of a stored group shows its format.
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
    check_group,
    describe_decode_error,
    lengths_of,
    nested_too_deep,
    not_unicode,
    text_lengths,
)

Token = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
EnvId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Version = Annotated[int, Meta(ge=-(2**53), le=2**53)]  # the same range as `models.Version`
Ints = list[list[Token]]
Floats = list[list[float]]
_Optional = Union[None, UnsetType]


# Types that encode arrays of integers, optional arrays of floats, and scores.
IntegersT = TypeVar("IntegersT")
FloatsT = TypeVar("FloatsT")
ScoresT = TypeVar("ScoresT")


class WireGroup(Struct, Generic[IntegersT, FloatsT, ScoresT], forbid_unknown_fields=True, gc=False, kw_only=True):
    """A group in a request. The shape of arrays is [sequences][tokens]."""

    tokens: IntegersT
    masks: Annotated[IntegersT, Meta(description="-100 where there is no loss.")]
    scores: Annotated[ScoresT, Meta(description="true and false count as 1 and 0.")]
    advantages: Annotated[
        FloatsT | UnsetType, Meta(description="Rows of another length than the tokens are ignored.")
    ] = UNSET
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
    policy_version: Annotated[
        Version | _Optional, Meta(description="Policy version that the group was sampled from.")
    ] = UNSET


Scores = list[Union[float, bool]]
JsonGroup = WireGroup[Ints, Union[Floats, None], Scores]
TextGroup = WireGroup[Raw, Raw, Scores]  # a JSON group whose arrays are not decoded
PackedArrays = WireGroup[Union[Ints, bytes], Union[Floats, bytes, None], Union[Scores, bytes]]


class PackedGroup(PackedArrays, kw_only=True):
    """A group in MessagePack. Its arrays may be bytes: little-endian int32 or float32, all sequences concatenated.

    `lengths` has the number of tokens in each sequence, as int32.
    """

    lengths: bytes | _Optional = UNSET


KEYS = tuple(name for name in WireGroup.__struct_fields__ if name != "policy_version")  # keys of an item in a batch


class _Encoding(NamedTuple):
    """An encoding of groups: the structure of a group, and functions that decode and encode."""

    structure: type[Struct]
    group: Callable[[bytes], Any]
    members: Callable[[bytes], dict[str, Raw]]  # decodes the fields of a group, by name
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
_decode_numbers = msgspec.json.Decoder(JsonGroup).decode  # also decodes the arrays; `_JSON.group` leaves them as text


class ParsedGroup(NamedTuple):
    """The payload of a group, which is stored, and the facts about the group that the queue needs."""

    sequences: int
    tokens: int
    env_id: int | None
    policy_version: int | None
    payload: bytes


def parse_group(body: bytes, packed: bool) -> ParsedGroup:
    """Decode and check one group.

    Args:
        body: JSON, or MessagePack if `packed`.

    Raises:
        InvalidGroupError: A field is invalid. The error has the path to the first invalid field.
    """
    try:
        return _parse(body, _PACKED) if packed else _parse(body.strip(), _JSON)
    except RecursionError:
        raise nested_too_deep() from None
    except UnicodeDecodeError as error:
        raise not_unicode(error) from None


def parse_groups(body: bytes, packed: bool) -> Iterator[ParsedGroup]:
    """Decode and check a list of groups one by one, as `parse_group` does. Paths begin with the index in the list."""
    try:
        items = (_PACKED if packed else _JSON).items(body)
    except RecursionError:
        raise nested_too_deep() from None
    except UnicodeDecodeError as error:
        raise not_unicode(error) from None
    except msgspec.DecodeError as error:
        raise describe_decode_error(error, body, packed) from None
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
            # atroposlib's server also converts booleans to numbers.
            scores = Raw(encoding.encode([float(score) for score in group.scores]))
            return _parse(encoding.encode({**encoding.members(body), "scores": scores}), encoding)
        lengths = lengths_of(group) if packed else _lengths_of_text(group)
        if lengths is None:  # the fast check has no result, so decode the numbers
            group = _decode_numbers(body)
            lengths = lengths_of(group)
    except msgspec.ValidationError as error:
        if "unknown field" not in str(error):
            raise describe_decode_error(error, body, packed) from None
        known = encoding.structure.__struct_fields__
        members = {name: value for name, value in encoding.members(body).items() if name in known}
        return _parse(encoding.encode(members), encoding)
    except msgspec.DecodeError as error:
        raise describe_decode_error(error, body, packed) from None
    check_group(group, lengths)
    absent = [] if packed else [name for name in KEYS if getattr(group, name) is UNSET]
    if absent:
        nulls = "".join(f',"{name}":null' for name in absent)
        body = b"".join((memoryview(body)[:-1], nulls.encode(), b"}"))  # one copy
    env_id = None if group.env_id is UNSET else group.env_id
    version = None if group.policy_version is UNSET else group.policy_version
    return ParsedGroup(len(lengths), sum(lengths), env_id, version, body)


def _lengths_of_text(group: Any) -> list[int] | None:
    """Return the number of tokens in each sequence, or None if the arrays must be decoded for an exact check."""
    lengths = text_lengths(bytes(group.tokens), integers=True)
    if lengths is None or text_lengths(bytes(group.masks), integers=True) != lengths:
        return None
    for name in FLOAT_FIELDS:
        value = getattr(group, name)
        text = b"null" if value is UNSET else bytes(value)  # a `Raw` never equals bytes
        if text in (b"null", b"[]"):
            continue
        found = text_lengths(text, integers=False)
        if found is None or (found != lengths and name != ANY_LENGTH_FIELD):
            return None
    return lengths


# Answers to consumers


def is_packed(payload: bytes) -> bool:
    return payload[:1] != b"{"


def join_json(payloads: Iterable[bytes]) -> bytes:
    """Return a JSON array of items."""
    return b"[" + b",".join(map(as_json, payloads)) + b"]"


def join_packed(payloads: Sequence[bytes]) -> bytes:
    """Return a MessagePack array of items."""
    return _PACKED.encode([Raw(as_packed(payload)) for payload in payloads])


def as_packed(payload: bytes) -> bytes:
    """Return a stored group as MessagePack. The arrays of a JSON group become lists."""
    if is_packed(payload):
        return payload
    try:
        return _PACKED.encode(msgspec.json.decode(payload))  # decoding without a type is twice as fast
    except OverflowError:  # a number is an integer of more than 64 bits
        return _PACKED.encode(_decode_numbers(payload))


def as_json(payload: bytes) -> bytes:
    """Return a stored group as JSON, with all keys."""
    if not is_packed(payload):
        return payload
    group = _PACKED.group(payload)
    ends = np.cumsum(lengths_of(group))[:-1]
    item: dict[str, Any] = {}
    for name in KEYS:
        value = getattr(group, name)
        if isinstance(value, bytes):
            numbers = np.frombuffer(value, "<i4" if name in INT_FIELDS else "<f4")
            value = numbers.tolist() if name == "scores" else [row.tolist() for row in np.split(numbers, ends)]
        item[name] = None if value is UNSET else value
    if group.policy_version is not UNSET:
        item["policy_version"] = group.policy_version
    return _JSON.encode(item)
