"""Test that the lint for plain English finds its patterns in each kind of text."""

import pytest

from tests.plain_english import main, problem, texts

SOURCE = '''
def test_what_is_kept(path):
    """What the file holds."""
    # whoever reads this waits here
    raise ValueError("The file is read anew, then closed.")
'''


def test_lint_checks_each_kind_of_text():
    assert [(line, kind) for line, kind, _ in texts(SOURCE)] == [
        (2, "test name"),
        (3, "docstring"),
        (5, "message"),
        (4, "comment"),
    ]


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("docstring", "What the file holds.", "What"),
        ("docstring", "Return what it holds.", "what it"),
        ("comment", "Of each environment, the rows", "Of"),
        ("comment", "the pool ends its processes by hand", "by hand"),
        ("message", "Of these options only one may be set", None),
        ("message", "The run goes on from there", "goes on"),
        ("message", "Observations are normalised by default", "normalised"),
        ("test name", "test_what_cannot_be_is_refused", "test_what_"),
        ("test name", "test_unsupported_action_space_is_refused", None),
        ("docstring", "Return the rows of the file.", None),
        ("message", "fbx.make_prioritised_flat_buffer in two places", None),
    ],
)
def test_lint_finds_hard_texts_and_accepts_plain_texts(kind, text, words):
    assert problem(kind, text) == words


def test_lint_prints_the_file_the_line_and_the_words(tmp_path, capsys):
    bad, good = tmp_path / "bad.py", tmp_path / "good.py"
    bad.write_text(SOURCE)
    good.write_text('"""Rows of a file."""\n')
    assert main([str(good)]) == 0
    assert main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"{bad}:3: docstring: 'What' in: What the file holds."
    assert lines[-1].startswith("4 texts are hard to read.")
