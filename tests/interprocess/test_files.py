from __future__ import annotations

import os
import stat

import pytest

from rlframe.interprocess.files import replacing, stored_id, write_atomically


def test_write_atomically_replaces_a_file_with_all_given_parts(tmp_path):
    path = tmp_path / "file"
    path.write_text("the old contents, which are longer than the new ones")
    write_atomically(path, "a text, ", b"bytes", memoryview(b" and more"), " ü")
    assert path.read_text(encoding="utf-8") == "a text, bytes and more ü"
    assert os.listdir(tmp_path) == ["file"]


def test_old_file_is_unchanged_after_a_failed_write(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, "before")
    with pytest.raises(TypeError):
        write_atomically(path, "begun", None)
    with pytest.raises(OSError, match="disk full"), replacing(path) as temporary:
        temporary.write_text("begun")
        raise OSError("disk full")
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]


def test_file_has_its_mode_before_the_contents_are_written(tmp_path):
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "secret") as temporary:
        write_atomically(temporary, "token", mode=0o600)
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
        raise ZeroDivisionError
    write_atomically(tmp_path / "secret", "token", mode=0o600)
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["secret"]


def test_parents_option_creates_missing_directories(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "new" / "file", "text")
    write_atomically(tmp_path / "new" / "file", "text", parents=True)
    assert (tmp_path / "new" / "file").read_text() == "text"


def test_stored_id_is_created_once(tmp_path):
    path = tmp_path / "new" / "id"
    first = stored_id(path)
    assert len(first) == 32 and path.read_text() == first == stored_id(path) != stored_id(tmp_path / "other")
