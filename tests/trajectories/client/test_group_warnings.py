"""Tests of the warnings about group fields that rlframe ignores but other trainers use."""

from __future__ import annotations

import pytest

from rlframe.trajectories.client.groups import GroupWarnings
from tests.trajectories.client.test_groups import a_group


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"generation_params": {"temperature": 0.7}, "inference_logprobs": [[1.0, -1, -1], [1.0, -1]]},
            "has a temperature of 0.7. Its inference_logprobs must be at this temperature",
        ),
        (
            {"overrides": [{"scale": 2, "set_advantage_to_zero": True}, {}]},
            "has overrides that are ignored here: scale.",
        ),
        (
            {"group_overrides": {"group_size": 2, "set_advantage_to_zero": True}},
            "has group_overrides that are ignored here: set_advantage_to_zero.",
        ),
        ({"overrides": [{"temperature": 10**400}, {}]}, "has the temperature 1000000000"),
        ({"generation_params": {"temperature": 1e39}}, "has the temperature 1e+39, which is ignored"),
        ({"images": ["x"]}, "has images, which are ignored here."),
        ({"distill_token_ids": [[[1]] * 3, [[1]] * 2]}, "has distill_token_ids"),
        (
            {"masks": [[0, 1, 1], [-100, 5]]},
            "has masks that differ from both the token and -100: 0 for the token 1, at position 0 of sequence 0",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_ignored_field_is_logged_once(fields, expected, caplog):
    warnings = GroupWarnings()
    warnings.warn_once([a_group(env_id=3), a_group(env_id=4, **fields)])
    warnings.warn_once([a_group(env_id=5, **fields)])
    (record,) = caplog.records
    assert f"A group of environment 4 {expected}" in record.getMessage() and record.levelname == "WARNING"


def test_supported_or_empty_fields_are_not_logged(caplog):
    fields = {"generation_params": {"temperature": 0.7, "n": 4}, "group_overrides": {"group_size": 2}, "images": []}
    GroupWarnings().warn_once([a_group(**fields, overrides=[{"set_advantage_to_zero": True}, None])])
    assert not caplog.records
