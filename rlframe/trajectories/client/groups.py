"""A group: several token sequences for one prompt. Environments send groups, and trainers receive them."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlframe.errors import UsageError
from rlframe.trajectories.messages import (
    ANY_LENGTH_FIELD,
    FLOAT_FIELDS,
    IGNORED,
    INT_FIELDS,
    MAX_FLOAT32,
    OPAQUE_FIELDS,
)

_DISTILL = ("distill_token_ids", "distill_logprobs")
_KINDS = {
    np.dtype(np.int32): ("iu", "integers"),
    np.dtype(np.float32): ("iuf", "numbers"),
    np.dtype(np.float64): ("biuf", "numbers"),  # scores may be booleans, such as `answer == expected`
}
_LISTS = (list, tuple, np.ndarray)
_ROWS = (*_LISTS, type(None))
_MIN_TEMPERATURE = 0.01
_NAMES = (*INT_FIELDS, "scores", *FLOAT_FIELDS, *OPAQUE_FIELDS, "env_id", *_DISTILL, "policy_version")


@dataclass(frozen=True, eq=False)
class Group:
    """A group of S sequences. Sequence i has T_i tokens. Rows can be lists or arrays, and are stored as arrays.

    Args:
        tokens: S rows [T_i] int32.
        masks: S rows [T_i] int32: the token itself if it is trained on, -100 if not.
        scores: [S] float64. Booleans become 1 and 0.
        advantages: S rows [T_i] float32, or None. A row is None if the environment sent no row of length T_i.
        ref_logprobs, inference_logprobs: S rows [T_i] float32, or None. By convention 1.0 where the mask is -100.
        messages, generation_params, overrides, group_overrides, images: JSON values that the service does not
            interpret. `overrides` is a list with one dict per sequence (None becomes {}). A `TrajectoryBuffer` reads
            `temperature` in these values, and `set_advantage_to_zero` in `overrides`.
        env_id: Id from `register_env`. None if the sender did not register.
        distill_token_ids, distill_logprobs: [S][T_i][k] lists, or None.
        policy_version: Version of the policy from which the group was sampled.

    Raises:
        UsageError: The group has no sequences, rows differ in length, or a number is not finite or not an int32.
    """

    tokens: Sequence[Any]
    masks: Sequence[Any]
    scores: Any
    advantages: Sequence[Any] | None = None
    ref_logprobs: Sequence[Any] | None = None
    inference_logprobs: Sequence[Any] | None = None
    messages: list[Any] | None = None
    generation_params: dict[str, Any] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: int | None = None
    distill_token_ids: list[Any] | None = None
    distill_logprobs: list[Any] | None = None
    policy_version: int | None = None

    def __post_init__(self) -> None:
        for name in INT_FIELDS:
            object.__setattr__(self, name, _rows(name, getattr(self, name), np.dtype(np.int32)))
        if not self.tokens:
            raise UsageError("A group must have at least one sequence; this one has no tokens.")
        if 0 in map(len, self.tokens):
            raise UsageError("A sequence must have at least one token; this group has an empty one.")
        for name in FLOAT_FIELDS:
            if getattr(self, name) is not None:
                optional = name == ANY_LENGTH_FIELD
                object.__setattr__(self, name, _rows(name, getattr(self, name), np.dtype(np.float32), optional))
        for name in ("masks", *FLOAT_FIELDS):
            self._check_rows(name)
        object.__setattr__(self, "scores", _row("scores", self.scores, np.dtype(np.float64)))
        if self.overrides is not None:
            object.__setattr__(self, "overrides", _overrides(self.overrides))
        for name in ("generation_params", "group_overrides"):
            if not isinstance(value := getattr(self, name), (dict, type(None))):
                raise UsageError(f"{name} must be a dict, such as {{'temperature': 0.7}}; got {type(value).__name__}.")
        for name in ("env_id", "policy_version"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _int64(name, getattr(self, name)))
        for name in ("scores", *_DISTILL):
            value = getattr(self, name)
            if value is not None and not isinstance(value, _LISTS):
                raise UsageError(f"{name} must be a list with an entry for each sequence; got {type(value).__name__}.")
            if value is not None and len(value) != len(self):
                raise UsageError(f"A group of {len(self)} sequences needs the same number of {name}; got {len(value)}.")

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.tokens)

    @property
    def lengths(self) -> np.ndarray:
        """[S] int32: the number of tokens in each sequence."""
        return np.fromiter(map(len, self.tokens), np.int32, len(self))

    @property
    def sequence_overrides(self) -> list[dict[str, Any]]:
        """The entry of `overrides` for each sequence. It is {} if there is none."""
        given = (self.overrides or [])[: len(self)]
        return given + [{}] * (len(self) - len(given))

    @property
    def temperatures(self) -> np.ndarray:
        """[S] float32: the sampling temperature of each sequence. The default is 1.

        It is the first finite value among the sequence's override, `generation_params` and `group_overrides`, as in
        atroposlib's trainer. Values of 0 or less count as 1. Other values are at least 0.01, as in vLLM.
        """
        of_all = [self.generation_params, self.group_overrides]
        return np.array([_temperature([override, *of_all]) for override in self.sequence_overrides], np.float32)

    def to_dict(self, *, binary: bool) -> dict[str, Any]:
        """Return the fields that are not None. With `binary`, an array is the concatenated bytes of its rows.
        Otherwise it is a list of lists.
        """
        fields = {name: getattr(self, name) for name in _NAMES if getattr(self, name) is not None}
        for name in (*INT_FIELDS, *FLOAT_FIELDS):
            if name in fields:
                rows = fields[name]
                whole = binary and all(row is not None for row in rows)
                lists = [[] if row is None else row.tolist() for row in rows]
                fields[name] = np.concatenate(rows).tobytes() if whole else lists
        if binary:
            fields["lengths"] = self.lengths.tobytes()
        fields["scores"] = self.scores.tolist()
        return fields

    def check_json(self) -> None:
        """Raise ValueError if a key is not text, or if a number is not finite. The encoders do not check this."""
        for name in OPAQUE_FIELDS:
            values = [getattr(self, name)]
            for value in values:  # a work list: the loop appends the nested values
                if isinstance(value, dict):
                    if wrong := [key for key in value if not isinstance(key, str)]:
                        raise ValueError(f"{name} has the key {wrong[0]!r} ({type(wrong[0]).__name__})")
                    values.extend(value.values())
                elif isinstance(value, (list, tuple)):
                    values.extend(value)
                elif isinstance(value, float) and not math.isfinite(value):
                    raise ValueError(f"{name} holds {value}")

    @classmethod
    def from_item(cls, item: Mapping[str, Any]) -> Group:
        """Convert one item of a batch, decoded from JSON or MessagePack. Raise `UsageError` like the class.

        Environments can send advantages of any length. If a row and its tokens differ in length, the row becomes None.
        """
        fields: dict[str, Any] = {name: item.get(name) for name in _NAMES}
        # atroposlib's clients send [] for missing fields.
        fields = {name: None if isinstance(value, list) and not value else value for name, value in fields.items()}
        lengths = item.get("lengths")
        for name in (*INT_FIELDS, *FLOAT_FIELDS):
            if isinstance(fields[name], bytes):
                if not isinstance(lengths, bytes):
                    raise UsageError(f"The {name} of a group came as bytes, without the lengths to split them.")
                fields[name] = _split_rows(name, fields[name], np.frombuffer(lengths, "<i4"))
        if isinstance(fields["scores"], bytes):
            fields["scores"] = np.frombuffer(fields["scores"], "<f4")
        if (rows := fields[ANY_LENGTH_FIELD]) is not None:
            fields[ANY_LENGTH_FIELD] = _fitting(rows, fields["tokens"])
        return cls(**fields)

    def _check_rows(self, name: str) -> None:
        rows = getattr(self, name)
        if rows is None:
            return
        if len(rows) != len(self):
            raise UsageError(
                f"A group of {len(self)} sequences needs the same number of rows of {name}; got {len(rows)}."
            )
        for index, (row, tokens) in enumerate(zip(rows, self.tokens)):
            if row is not None and len(row) != len(tokens):
                raise UsageError(f"Sequence {index} has {len(tokens)} tokens, but {len(row)} {name}.")


@dataclass(frozen=True)
class PostResult:
    """The result of `post`. `status` is "received", or "buffered" if a group differs from the group size."""

    status: str
    groups: int
    buffer_size: int | None  # if `status` is "buffered": number of sequences in the environment's buffer
    replayed: bool  # True if the service already had the groups, and repeated its first answer


@dataclass(frozen=True)
class ServedBatch:
    """A batch: groups with `batch_size` sequences in total."""

    groups: list[Group]
    batch_id: int
    step: int  # training step of the batch
    redelivered: bool  # True if the batch was already delivered, but not acknowledged


def _rows(name: str, rows: Iterable[Any], dtype: np.dtype, optional: bool = False) -> list[Any]:
    if isinstance(rows, (str, bytes)) or not isinstance(rows, Iterable):
        raise UsageError(f"{name} must be a list of rows, one for each sequence; got {type(rows).__name__}.")
    return [
        None if optional and row is None else _row(f"{name}[{index}]", row, dtype) for index, row in enumerate(rows)
    ]


def _row(name: str, row: Any, dtype: np.dtype) -> np.ndarray:
    kinds, what = _KINDS[dtype]
    try:
        array = np.asarray(row)
    except ValueError:
        raise UsageError(f"{name} must be a row of {what}; got a ragged list.") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in kinds):
        raise UsageError(f"{name} must be a row of {what}; got an array of {array.dtype} with {array.ndim} axes.")
    if array.dtype == dtype and dtype.kind == "i":
        return array
    if dtype.kind == "i" and array.size:
        info = np.iinfo(dtype)
        if array.min() < info.min or array.max() > info.max:
            raise UsageError(f"{name} must be a row of {dtype}; got numbers from {array.min()} to {array.max()}.")
    with np.errstate(over="ignore"):  # numbers beyond float32 become infinite; the next check refuses them
        converted = array.astype(dtype, copy=False)
    if dtype.kind == "f" and not (fits := np.abs(converted) <= MAX_FLOAT32).all():  # also refuses NaN
        position = int(np.argmin(fits))
        raise UsageError(f"{name} must be finite float32; got {array[position]} at position {position}.")
    return converted


def _fitting(rows: Any, tokens: Any) -> Any:
    """Replace a row by None if its length differs from its tokens. If a value is not a list, return it unchanged."""
    if not all(isinstance(each, _LISTS) and all(isinstance(row, _ROWS) for row in each) for each in (rows, tokens)):
        return rows
    fits = len(rows) == len(tokens)
    return [
        rows[index] if fits and rows[index] is not None and len(rows[index]) == len(sequence) else None
        for index, sequence in enumerate(tokens)
    ]


def _int64(name: str, given: Any) -> int:
    try:
        if not isinstance(given, bool) and -(2**63) <= (number := operator.index(given)) < 2**63:
            return number
    except TypeError:
        pass
    raise UsageError(f"{name} must be a 64-bit integer; got {str(given)[:40]} ({type(given).__name__}).")


def _overrides(given: Any) -> list[dict[str, Any]]:
    """Return one dict for each sequence."""
    rows = [row or {} for row in given] if isinstance(given, (list, tuple)) else [given]
    if not isinstance(given, (list, tuple)) or not all(isinstance(row, dict) for row in rows):
        got = next((type(row).__name__ for row in rows if not isinstance(row, dict)), type(given).__name__)
        raise UsageError(
            "overrides must be a list with a dict for each sequence, such as [{'set_advantage_to_zero': True}, {}]; "
            f"got {type(given).__name__}{'' if got == type(given).__name__ else ' with ' + got}."
        )
    return rows


def finite_temperature(given: Any) -> float | None:
    """Return a temperature as a float, or None if it is not a finite float32."""
    try:
        number = float(given)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= MAX_FLOAT32 else None


def _temperature(sources: Iterable[dict[str, Any] | None]) -> float:
    for source in sources:
        if (given := finite_temperature((source or {}).get("temperature"))) is not None:
            return max(given, _MIN_TEMPERATURE) if given > 0 else 1.0
    return 1.0


def _split_rows(name: str, data: bytes, lengths: np.ndarray) -> list[np.ndarray]:
    flat = np.frombuffer(data, "<i4" if name in INT_FIELDS else "<f4")
    ends = np.cumsum(lengths)
    if lengths.min(initial=0) < 0 or (ends[-1] if len(ends) else 0) != len(flat):
        raise UsageError(f"A group has {len(flat)} {name}, but its lengths sum to {int(lengths.sum())}.")
    return np.split(flat, ends[:-1])


_log = logging.getLogger(__name__)


class GroupWarnings:
    """Warns about fields that other trainers use and rlframe ignores. Each kind of warning is logged once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def warn_once(self, groups: Sequence[Group]) -> None:
        """Log a warning for each kind of ignored field in these groups. Skip kinds that were already logged."""
        for group in groups:
            for kind, found in self._found(group):
                if kind not in self._logged:
                    self._logged.add(kind)
                    _log.warning("A group of environment %s %s This is logged once.", group.env_id, found)

    def _found(self, group: Group) -> Iterator[tuple[str, str]]:
        """Yield (kind of warning, text of the warning)."""
        overrides = group.overrides or []
        for source in (*overrides, group.generation_params or {}, group.group_overrides or {}):
            if (given := source.get("temperature")) is not None and finite_temperature(given) is None:
                yield (
                    "unused temperature",
                    f"has the temperature {str(given)[:40]}, which is ignored, because it is not a finite float32.",
                )
        other = group.temperatures[group.temperatures != 1]
        if len(other) and group.inference_logprobs is not None:
            yield (
                "temperature",
                f"has a temperature of {other[0]:g}. Its inference_logprobs must be at this temperature, because "
                "the learner computes its log-probabilities at it. Those of `rlframe serve policy` are at "
                "temperature 1: sample at 1, or send no inference_logprobs.",
            )
        if unknown := sorted(
            {str(name) for one in overrides for name in one} - {"set_advantage_to_zero", "temperature"}
        ):
            yield f"overrides {unknown}", f"has overrides that are ignored here: {', '.join(unknown)}."
        if unknown := sorted(map(str, set(group.group_overrides or {}) - {"group_size", "temperature"})):
            yield f"group_overrides {unknown}", f"has group_overrides that are ignored here: {', '.join(unknown)}."
        for name in ("distill_token_ids", "distill_logprobs", "images"):
            if getattr(group, name):
                yield name, f"has {name}, which are ignored here."
        if "masks" not in self._logged:
            for index, (mask, tokens) in enumerate(zip(group.masks, group.tokens)):
                if (wrong := (mask != IGNORED) & (mask != tokens)).any():
                    at = int(np.argmax(wrong))
                    yield (
                        "masks",
                        f"has masks that differ from both the token and {IGNORED}: {mask[at]} for the token "
                        f"{tokens[at]}, at position {at} of sequence {index}. "
                        f"Every token whose mask is not {IGNORED} is trained on.",
                    )
                    break
