from __future__ import annotations

import pytest

from rlframe.errors import CheckpointError
from rlframe.programs.run_dir.directory import ProgressFile


def stats(rank: int, incarnation: int, steps: int, **logged: list[float]) -> dict[str, object]:
    counters = {"env_steps": steps, "episodes": 1, "return_sum": 2.0 * steps, "length_sum": steps}
    return {"rank": rank, "incarnation": incarnation, **counters, "logged": logged}


def test_restarted_monitor_does_not_count_steps_of_an_actor_twice(tmp_path):
    progress = ProgressFile(tmp_path / "progress.json", "first")
    progress.counts.add(stats(0, 0, 10, a=[1.0, 2.0]))
    progress.counts.add(stats(1, 0, 5, a=[4.0, 3.0]))
    progress.save()
    again = ProgressFile(tmp_path / "progress.json", "first")
    assert again.counts.total_logged() == {"a": [5.0, 5.0]}
    again.counts.add(stats(0, 0, 12, a=[2.0, 3.0]))
    assert again.counts.env_steps == 17 and again.counts.total_logged() == {"a": [6.0, 6.0]}


def test_step_of_the_newest_evaluation_is_saved(tmp_path):
    progress = ProgressFile(tmp_path / "progress.json", "first")
    assert progress.evaluated is None
    progress.evaluated = 300
    progress.save()
    assert ProgressFile(tmp_path / "progress.json", "second").evaluated == 300


def test_failed_saves_log_one_warning_and_the_next_success_is_logged(tmp_path, caplog):
    progress = ProgressFile(tmp_path / "there" / "progress.json", "first")
    for _ in range(3):
        progress.try_to_save()
    (tmp_path / "there").mkdir()
    for _ in range(2):
        progress.try_to_save()
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"Cannot write {tmp_path}/there/progress.json: ") and second.endswith("works again.")


def test_counts_of_earlier_sessions_are_added_to_the_counts_of_new_actors(tmp_path):
    progress = ProgressFile(tmp_path / "progress.json", "first")
    progress.counts.add(stats(0, 0, 10, a=[1.0, 2.0]))
    progress.counts.add(stats(1, 0, 10, a=[4.0, 3.0]))
    progress.save()
    resumed = ProgressFile(tmp_path / "progress.json", "second").counts
    assert resumed.env_steps == 20
    resumed.add(stats(0, 0, 5, a=[10.0, 1.0]))
    assert resumed.total() == {"env_steps": 25, "episodes": 3, "return_sum": 50.0, "length_sum": 25}
    assert resumed.total_logged() == {"a": [15.0, 6.0]}


@pytest.mark.parametrize(
    "content",
    ["", '{"session": "first", "cou', "[]", '{"counts": {}}', '{"session": "a", "counts": {}}']
    + [f'{{"session": "a", "evaluated": 0, "counts": {{"0.0": {it}}}}}' for it in ("[1]", "[0, 0, 0, {}]", "0")],
)
def test_error_about_a_damaged_progress_file_contains_instructions(tmp_path, content):
    (tmp_path / "progress.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"progress\.json is damaged: .*or remove it\. .* counted from 0"):
        ProgressFile(tmp_path / "progress.json", "first")


def test_failed_save_raises_an_error_with_the_path(tmp_path):
    progress = ProgressFile(tmp_path / "gone" / "progress.json", "first")
    with pytest.raises(CheckpointError, match=r"Cannot write .*progress\.json: No such file or directory"):
        progress.save()


def test_reason_of_an_early_stop_is_not_kept_in_the_next_session(tmp_path):
    progress = ProgressFile(tmp_path / "progress.json", "first")
    assert progress.ended is None
    progress.ended = "until_return"
    progress.save()
    assert ProgressFile(tmp_path / "progress.json", "first").ended == "until_return"
    assert ProgressFile(tmp_path / "progress.json", "second").ended is None
