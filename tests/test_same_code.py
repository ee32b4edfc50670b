"""Tests that `same_code` ignores text and names, and finds every other change."""

import subprocess

import pytest

from tests.same_code import differences

OLD = '''
def area(width, height):
    """What the area is."""
    if width < 0:
        raise ValueError(f"a width of {width}, and a height of {height}, cannot be")
    return width * height
'''

SAME = """
def rectangle_area(w, h):
    if w < 0:
        raise ValueError(f"The height is {h}: expected a positive width, got {w}.")
    return w * h
"""


@pytest.fixture
def change(tmp_path, monkeypatch):
    """Return a function that commits a file, changes its content, and returns the differences."""
    monkeypatch.chdir(tmp_path)

    def differences_of(old, new):
        path = tmp_path / "module.py"
        path.write_text(old)
        git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.com"]
        for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "old"]):
            subprocess.run([*git, *command], check=True)
        path.write_text(new)
        return differences("HEAD", None, ["module.py"])

    return differences_of


def test_changed_names_messages_and_docstrings_are_not_reported(change):
    assert change(OLD, SAME) == []


def test_changed_operator_is_reported(change):
    found = change(OLD, SAME.replace("w * h", "w + h"))
    assert found == [
        "module.py: rectangle_area: new or changed",
        "module.py: area: gone or changed (old name)",
    ]


def test_value_that_a_new_message_omits_is_reported(change):
    assert len(change(OLD, SAME.replace("{h}", "negative"))) == 2
