from __future__ import annotations

import pytest

from rlframe.errors import CheckpointError
from rlframe.programs.actor_counts import ActorCounts


def stats(rank: int, incarnation: int, steps: int) -> dict[str, float]:
    return {
        "rank": rank,
        "incarnation": incarnation,
        "env_steps": steps,
        "episodes": 1,
        "return_sum": 2.0 * steps,
        "length_sum": steps,
    }


def test_what_an_actor_says_twice_counts_once_and_what_it_said_before_its_death_stays(tmp_path):
    counts = ActorCounts(tmp_path / "progress.json", "first")
    assert counts.total() == {"env_steps": 0, "episodes": 0, "return_sum": 0, "length_sum": 0}
    counts.add(stats(0, 0, 10))
    counts.add(stats(0, 0, 15))
    counts.add(stats(1, 0, 7))
    counts.add(stats(0, 1, 100))  # restarted
    assert counts.total() == {"env_steps": 122, "episodes": 3, "return_sum": 244.0, "length_sum": 122}


def test_a_restarted_monitor_goes_on_counting_the_same_actors(tmp_path):
    counts = ActorCounts(tmp_path / "progress.json", "first")
    counts.add(stats(0, 0, 10))
    counts.save()
    again = ActorCounts(tmp_path / "progress.json", "first")
    again.add(stats(0, 0, 12))
    assert again.total()["env_steps"] == 12
    assert again.goes_on and not ActorCounts(tmp_path / "progress.json", "second").goes_on


def test_when_the_newest_evaluation_began_is_kept(tmp_path):
    counts = ActorCounts(tmp_path / "progress.json", "first")
    assert counts.evaluated is None
    counts.evaluated = 300
    counts.save()
    assert ActorCounts(tmp_path / "progress.json", "second").evaluated == 300


def test_a_file_that_cannot_be_written_is_told_of_once_and_when_it_can_again(tmp_path, caplog):
    counts = ActorCounts(tmp_path / "there" / "progress.json", "first")
    for _ in range(3):
        counts.try_to_save()
    (tmp_path / "there").mkdir()
    for _ in range(2):
        counts.try_to_save()
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"Cannot write {tmp_path}/there/progress.json: ") and second.endswith("is written again.")


def test_actors_of_a_resumed_run_are_others_although_their_ranks_are_the_same(tmp_path):
    counts = ActorCounts(tmp_path / "progress.json", "first")
    counts.add(stats(0, 0, 10))
    counts.add(stats(1, 0, 10))
    counts.save()
    resumed = ActorCounts(tmp_path / "progress.json", "second")
    assert resumed.total()["env_steps"] == 20
    resumed.add(stats(0, 0, 5))
    assert resumed.total() == {"env_steps": 25, "episodes": 3, "return_sum": 50.0, "length_sum": 25}


@pytest.mark.parametrize(
    "content",
    ["", '{"session": "first", "cou', "[]", '{"counts": {}}', '{"session": "a", "counts": {}}']
    + [f'{{"session": "a", "evaluated": 0, "counts": {{"0.0": {it}}}}}' for it in ("[1]", "[0, 0, 0, {}]", "0")],
)
def test_a_damaged_file_is_named_with_what_to_do(tmp_path, content):
    (tmp_path / "progress.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"progress\.json is damaged: .*or remove it: .* counted from 0"):
        ActorCounts(tmp_path / "progress.json", "first")


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    counts = ActorCounts(tmp_path / "gone" / "progress.json", "first")
    with pytest.raises(CheckpointError, match=r"Cannot write .*progress\.json: No such file or directory"):
        counts.save()


def test_why_a_session_ends_early_is_kept_for_a_monitor_that_is_restarted_but_not_for_the_next_session(tmp_path):
    counts = ActorCounts(tmp_path / "progress.json", "first")
    assert counts.ended is None
    counts.ended = "until_return"
    counts.save()
    assert ActorCounts(tmp_path / "progress.json", "first").ended == "until_return"
    assert ActorCounts(tmp_path / "progress.json", "second").ended is None
