"""Test parts of environments: `gather_or_cancel`, attempts, groups, metrics, files and options."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from rlframe.errors import CheckpointError, UsageError
from rlframe.language.environments import BaseEnvConfig, collecting, files
from rlframe.language.environments.collecting import CollectAttempt, Gate
from rlframe.language.environments.groups import group_from_items, to_trajectory_group
from rlframe.language.environments.metrics import CollectStatistics, length_metrics
from rlframe.language.environments.serving import Membership


def test_gather_or_cancel_cancels_the_other_coroutines():
    ended = []

    async def long(name):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(name)

    async def fails():
        raise RuntimeError("no")

    async def run():
        with pytest.raises(RuntimeError, match="no"):
            await collecting.gather_or_cancel([long("a"), fails(), long("b")])
        return list(ended)

    assert asyncio.run(run()) == ["a", "b"]


def test_attempt_seconds_exclude_pauses(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(collecting.time, "monotonic", lambda: now[0])
    gate = Gate()
    gate.set(closed=True)
    now[0] = 5.0
    gate.set(closed=True)
    gate.set(closed=False)
    one = CollectAttempt("item", gate)
    now[0] = 7.0
    gate.set(closed=True)
    now[0] = 20.0
    assert one.seconds == 2.0 and gate.closed and gate.clock == 2.0
    gate.set(closed=False)
    now[0] = 21.0
    assert one.seconds == 3.0


def test_attempt_records_the_oldest_version():
    one = CollectAttempt("item", Gate())
    for version in (None, 5, 3, None, 4):
        one.record_version(version)
    assert one.policy_version == 3


def test_group_has_no_field_that_a_sequence_lacks():
    items = [
        {"tokens": [1], "masks": [1], "scores": 1.0, "advantages": [0.5], "group_overrides": {"a": 1}},
        {"tokens": [2], "masks": [2], "scores": 0.0, "advantages": None, "group_overrides": {"b": 2}},
    ]
    assert group_from_items(items) == {
        "tokens": [[1], [2]],
        "masks": [[1], [2]],
        "scores": [1.0, 0.0],
        "group_overrides": {"a": 1, "b": 2},
    }


def test_group_has_overrides_even_if_a_sequence_has_none():
    zero = {"set_advantage_to_zero": True}
    items = [
        {"tokens": [1], "masks": [1], "scores": True},
        {"tokens": [2], "masks": [2], "scores": False, "overrides": zero},
        {"tokens": [3], "masks": [3], "scores": False, "overrides": None},
    ]
    group = group_from_items(items)
    assert group["overrides"] == [{}, zero, {}]
    sent = to_trajectory_group({**group, "overrides": [None, zero, {}]}, env_id=0, policy_version=None)
    assert sent.overrides == [{}, zero, {}] and sent.scores.tolist() == [1.0, 0.0, 0.0]


def test_message_with_tool_calls_may_have_no_content():
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    chat = [{"role": "assistant", "tool_calls": calls}, {"role": "tool", "tool_call_id": "1", "content": "4"}]
    sent = to_trajectory_group({"tokens": [[1]], "masks": [[1]], "scores": [1.0], "messages": [chat]}, 0, None).messages
    assert sent == [[{"role": "assistant", "tool_calls": calls, "content": None}, chat[1]]]


def test_report_resets_the_statistics():
    statistics = CollectStatistics()
    for seconds, sent in ((1.0, True), (3.0, True), (5.0, False)):
        statistics.record(seconds, sent=sent)
    metrics = statistics.report({"mine": 1})
    assert metrics["train/items_sent_to_api"] == 2 and metrics["train/items_rejected"] == 1 and metrics["mine"] == 1
    assert metrics["train_perf/task_duration_mean"] == 3.0
    assert metrics["train_perf/succeeded_task_duration_std"] == 1.0
    assert (metrics["train_perf/task_duration_max"], metrics["train_perf/failed_task_duration_min"]) == (5.0, 5.0)
    assert statistics.report({}) == {}


def test_completion_length_metrics_have_the_expected_values():
    assert length_metrics([], 10) == {}
    assert length_metrics([2, 4, 9, 10], 10) == {
        "train/completion_lengths": 6.25,
        "train/completion_lengths_std": pytest.approx(np.std([2, 4, 9, 10])),
        "train/completion_lengths_max": 10,
        "train/completion_lengths_min": 2,
        "train/completion_lengths_p95": 0.25,
    }


def test_newest_checkpoint_that_is_not_after_a_step_is_loaded(tmp_path):
    for step in (2, 10, 4):
        files.save_checkpoint(str(tmp_path), "env_0", step, {"at": np.int64(step), "row": np.arange(2)})
    found = {step: files.load_checkpoint(str(tmp_path), "env_0", step) for step in (1, 2, 9, 10, 11)}
    assert found[1] == {} and found[2] == {"at": 2, "row": [0, 1]}
    assert [found[step]["at"] for step in (9, 10, 11)] == [4, 10, 10]
    assert files.load_checkpoint(str(tmp_path), "env_1", 10) == {}
    (tmp_path / "env_checkpoints/env_0/step-10.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"step-10.json of an environment cannot be read"):
        files.load_checkpoint(str(tmp_path), "env_0", 10)


def test_existing_groups_file_is_not_overwritten(tmp_path):
    for expected in ("groups.jsonl", "groups_1.jsonl", "groups_2.jsonl"):
        file = files.GroupsFile(str(tmp_path / "groups.jsonl"))
        file.write({"scores": np.ones(2)})
        file.write({"scores": [1]})
        file.close()
        assert file.path.name == expected
        assert [json.loads(line) for line in file.path.read_text().splitlines()] == [
            {"scores": [1, 1]},
            {"scores": [1]},
        ]
    assert len(list(tmp_path.iterdir())) == 3


def test_invalid_resume_file_is_refused(tmp_path):
    file = tmp_path / "resume"
    file.write_text("hello")

    async def run():
        member = Membership(BaseEnvConfig(resume_file=str(file), service_timeout=0.1), "env")
        try:
            await member.join()
        finally:
            await member.leave()

    with pytest.raises(UsageError, match="resume_file .* was not written by an environment"):
        asyncio.run(run())


def test_invalid_option_values_are_refused():
    for wrong in (
        {"reasoning_effort": "much"},
        {"max_reasoning_tokens": 5},
        {"group_size": 0},
        {"max_batches_offpolicy": 0},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            BaseEnvConfig(**wrong)
