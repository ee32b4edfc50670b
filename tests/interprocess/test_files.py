from __future__ import annotations

import os
import stat

import pytest

from rlframe.interprocess.files import replacing, write_atomically


def test_a_file_is_replaced_by_all_its_contents_one_after_the_other(tmp_path):
    path = tmp_path / "file"
    path.write_text("before, and longer than what comes after")
    write_atomically(path, "a text, ", b"bytes", memoryview(b" and more"), " ü")
    assert path.read_text(encoding="utf-8") == "a text, bytes and more ü"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_that_is_not_written_in_full_stays_as_it_was(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, "before")
    with pytest.raises(TypeError):
        write_atomically(path, "begun", None)
    with pytest.raises(OSError, match="disk full"), replacing(path) as temporary:
        temporary.write_text("begun")
        raise OSError("disk full")
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]


def test_a_secret_is_its_owners_from_the_beginning(tmp_path):
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "secret") as temporary:
        write_atomically(temporary, "token", mode=0o600)
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
        raise ZeroDivisionError
    write_atomically(tmp_path / "secret", "token", mode=0o600)
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["secret"]


def test_the_folders_of_a_file_are_made_where_that_is_asked_for(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "new" / "file", "text")
    write_atomically(tmp_path / "new" / "file", "text", parents=True)
    assert (tmp_path / "new" / "file").read_text() == "text"
