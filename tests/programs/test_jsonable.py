from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal, Union

import numpy as np
import pytest

from rlframe.errors import UsageError
from rlframe.programs.jsonable import from_jsonable, to_jsonable


@dataclasses.dataclass(frozen=True)
class Inner:
    sizes: tuple[int, ...] = (64, 64)
    mode: Literal["a", "b"] = "a"


@dataclasses.dataclass(frozen=True)
class Outer:
    rate: float = 0.5
    limit: float | None = None
    count: Union[int, None] = 3
    name: str = "x"
    on: bool = True
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    inner: Inner = dataclasses.field(default_factory=Inner)


def test_a_dataclass_survives_the_round_trip_through_json():
    value = Outer(1e-4, 0.2, None, "y", False, {"a": [1, "b"]}, Inner((1, 2, 3), "b"))
    assert from_jsonable(Outer, json.loads(json.dumps(to_jsonable(value))), "here") == value


def test_a_whole_number_is_taken_for_a_float_field():
    rate = from_jsonable(Outer, {"rate": 1, "limit": 2}, "here")
    assert (rate.rate, rate.limit) == (1.0, 2.0)
    assert type(rate.rate) is float and type(rate.limit) is float


def test_arrays_are_written_as_lists():
    assert to_jsonable({"goal": np.array([[1, 2], [3, 4]]), "x": np.array(0.5)}) == {"goal": [[1, 2], [3, 4]], "x": 0.5}


def test_annotations_that_mean_nothing_here_take_any_value():
    @dataclasses.dataclass
    class Local:
        pass

    @dataclasses.dataclass
    class Holder:
        local: Local
        rate: float = 0.5

    assert from_jsonable(Holder, {"local": 3, "rate": "x"}, "here") == Holder(3, "x")  # type: ignore[arg-type]


def test_fields_that_are_left_out_keep_their_defaults():
    assert from_jsonable(Outer, {}, "here") == Outer()


def test_numpy_scalars_are_written_as_numbers():
    assert to_jsonable({"a": np.float32(0.5), "b": np.int64(3)}) == {"a": 0.5, "b": 3}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rat": 1.0}, "here: Outer has no field 'rat'. Did you mean 'rate'?"),
        ({"rate": "fast"}, "here.rate: expected float, got 'fast' (str)."),
        ({"rate": True}, "here.rate: expected float, got True."),
        ({"count": 1.5}, "here.count: expected int or None, got 1.5."),
        ({"inner": {"mode": "c"}}, "here.inner.mode: expected 'a' or 'b', got 'c' (str)."),
        ({"inner": {"sizes": [1, "2"]}}, "here.inner.sizes: expected int, got '2' (str)."),
        ([], "here: expected an object with the fields of Outer, got [] (list)."),
    ],
)
def test_what_does_not_fit_is_named(values, message):
    with pytest.raises(UsageError) as raised:
        from_jsonable(Outer, values, "here")
    assert str(raised.value) == message


def test_what_json_cannot_hold_is_refused():
    with pytest.raises(UsageError, match=r"does not go into config\.json"):
        to_jsonable({"f": object()})
