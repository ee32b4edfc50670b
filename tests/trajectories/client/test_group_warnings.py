"""Fields of groups that change what other trainers learn."""

from __future__ import annotations

import pytest

from rlframe.trajectories.client.groups import GroupWarnings
from tests.trajectories.client.test_groups import a_group


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"generation_params": {"temperature": 0.7}, "inference_logprobs": [[1.0, -1, -1], [1.0, -1]]},
            "has a temperature of 0.7. Its inference_logprobs must be at this temperature",
        ),
        (
            {"overrides": [{"scale": 2, "set_advantage_to_zero": True}, {}]},
            "has overrides that change nothing here: scale.",
        ),
        (
            {"group_overrides": {"group_size": 2, "set_advantage_to_zero": True}},
            "has group_overrides that change nothing here: set_advantage_to_zero.",
        ),
        ({"overrides": [{"temperature": 10**400}, {}]}, "has the temperature 1000000000"),
        ({"generation_params": {"temperature": 1e39}}, "has the temperature 1e+39, which is not used"),
        ({"images": ["x"]}, "has images, which nothing is learned from here."),
        ({"distill_token_ids": [[[1]] * 3, [[1]] * 2]}, "has distill_token_ids"),
        (
            {"masks": [[0, 1, 1], [-100, 5]]},
            "has masks that differ from both the token and -100: 0 for the token 1, at position 0 of sequence 0",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_field_that_changes_nothing_here_is_warned_of_once(fields, said, caplog):
    warnings = GroupWarnings()
    warnings.look([a_group(env_id=3), a_group(env_id=4, **fields)])
    warnings.look([a_group(env_id=5, **fields)])
    (record,) = caplog.records
    assert f"A group of environment 4 {said}" in record.getMessage() and record.levelname == "WARNING"


def test_what_is_honored_or_asks_for_nothing_is_not_warned_of(caplog):
    fields = {"generation_params": {"temperature": 0.7, "n": 4}, "group_overrides": {"group_size": 2}, "images": []}
    GroupWarnings().look([a_group(**fields, overrides=[{"set_advantage_to_zero": True}, None])])
    assert not caplog.records
