from __future__ import annotations

from rlframe.metrics.sums import add_up, env_means


def test_sources_are_added_up_by_name():
    assert add_up([{"a": [1.0, 2.0]}, {}, {"a": [3.0, 1.0], "b": [5.0, 1.0]}]) == {"a": [4.0, 3.0], "b": [5.0, 1.0]}
    assert add_up([]) == {}


def test_means_are_of_what_was_logged_since():
    before = {"a": [4.0, 2.0], "b": [5.0, 1.0]}
    assert env_means({"a": [10.0, 4.0], "b": [5.0, 1.0], "c": [1.0, 2.0]}, before) == {"env/a": 3.0, "env/c": 0.5}
