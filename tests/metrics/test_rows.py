"""Compare the counters of actors, and the rows made from them, with hand-computed values."""

from __future__ import annotations

from rlframe.metrics.rows import ActorCounts, Rows, add_sums


def stats(rank: int, incarnation: int, steps: float, **logged: list[float]) -> dict[str, object]:
    counters = {"env_steps": steps, "episodes": 1, "return_sum": 2.0 * steps, "length_sum": steps}
    return {"rank": rank, "incarnation": incarnation, **counters, "logged": logged}


def test_add_sums_adds_the_sums_with_the_same_name():
    assert add_sums([{"a": [1.0, 2.0]}, {}, {"a": [3.0, 1.0], "b": [5.0, 1.0]}]) == {"a": [4.0, 3.0], "b": [5.0, 1.0]}
    assert add_sums([]) == {}


def test_repeated_stats_are_counted_once_and_stats_of_dead_actors_are_kept():
    counts = ActorCounts()
    assert counts.total() == {"env_steps": 0, "episodes": 0, "return_sum": 0, "length_sum": 0}
    for each in (
        stats(0, 0, 10),
        stats(0, 0, 15),
        stats(1, 0, 7),
        stats(0, 1, 100),
    ):  # the last element comes from a restarted actor
        counts.add(each)
    assert counts.total() == {"env_steps": 122, "episodes": 3, "return_sum": 244.0, "length_sum": 122}
    assert counts.env_steps == 122


def test_late_stats_with_fewer_steps_are_ignored():
    counts = ActorCounts()
    for steps, rank in [(10.0, 0), (5.0, 1), (7.0, 0), (8.0, 1)]:
        counts.add(stats(rank, 0, steps, a=[steps, 1.0]))
    assert counts.env_steps == 18 and counts.total_logged() == {"a": [18.0, 2.0]}
    assert counts.counters == {"0.0": [10.0, 1, 20.0, 10.0], "1.0": [8.0, 1, 16.0, 8.0]}


def test_row_covers_the_time_since_the_previous_row():
    counts = ActorCounts()
    counts.add(stats(0, 0, 100, a=[4.0, 2.0], b=[5.0, 1.0]))
    rows = Rows(100, counts.total(), counts.total_logged(), 10.0)
    assert rows.next(100, counts, 11.0) == {}
    counts.add({**stats(0, 0, 150, a=[10.0, 4.0], b=[5.0, 1.0], c=[1.0, 2.0]), "episodes": 3})
    expected = {"episode_return": 50.0, "episode_length": 25.0, "episodes": 2, "env/a": 3.0, "env/c": 0.5}
    assert rows.next(150, counts, 15.0) == {**expected, "steps_per_second": 10.0}
    counts.add({**stats(0, 0, 160, a=[10.0, 4.0]), "episodes": 3})
    again = Rows(*rows.to_json(), now=16.0)
    assert again.next(160, counts, 20.0) == {"steps_per_second": 2.5} and rows.step == 150
