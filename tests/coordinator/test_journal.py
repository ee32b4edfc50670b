"""Tests of the journal: after any failure it can be read, or the error names the problem."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from rlframe.coordinator import journal as journals
from rlframe.coordinator.journal import Journal
from rlframe.errors import CheckpointError

# A program that simulates a full disk: it limits the size of its files.
FULL = """
import resource, signal, sys
from rlframe.coordinator.journal import Journal
journal = Journal(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), unlimited[1]))
for number in range(100):
    journal.write({"counts": [number] * 20})
    journal.note({"number": number})
print("full", flush=True)
sys.stdin.readline()
resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
journal.note({"number": 100})
"""


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "coordinator" / "journal.jsonl"


def note(number: int) -> dict[str, object]:
    return {"number": number, "kind": "came", "text": f"event {number} → here"}


def numbers(journal: Journal) -> list[int]:
    return [each["number"] for each in journal.notes]


def written(path: pathlib.Path, states: int = 3) -> Journal:
    journal = Journal(path)
    for number in range(states):
        journal.write({"counts": {"env_steps": number}})
        journal.note(note(number))
    return journal


def test_new_journal_is_empty(path: pathlib.Path) -> None:
    journal = Journal(path)
    assert journal.state is None and journal.notes == []


def test_newest_state_and_all_notes_are_read_back(path: pathlib.Path) -> None:
    written(path).close()
    journal = Journal(path)
    assert journal.state == {"counts": {"env_steps": 2}} and journal.notes == [note(0), note(1), note(2)]


def test_journal_that_was_not_closed_is_read_back(path: pathlib.Path) -> None:
    killed = written(path)
    assert Journal(path).state == killed.state


def test_journal_truncated_at_any_byte_has_the_last_complete_state(path: pathlib.Path) -> None:
    written(path).close()
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    ends = [sum(map(len, lines[: count + 1])) for count in range(len(lines))]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        journal = Journal(path)
        records = [json.loads(line) for line, end in zip(lines, ends) if end <= cut]
        states = [record["state"] for record in records if "state" in record]
        assert journal.state == (states[-1] if states else None)
        assert journal.notes == [record["note"] for record in records if "note" in record]
        journal.note(note(99))  # the journal can be continued
        journal.close()
        assert numbers(Journal(path))[-1] == 99


def test_error_names_the_damaged_line(path: pathlib.Path) -> None:
    written(path).close()
    lines = path.read_bytes().split(b"\n")
    for damage in (b"\x00" * 30, b'{"state": {"cou', b"[1, 2]", b"7"):
        path.write_bytes(b"\n".join([lines[0], damage, *lines[2:]]))
        with pytest.raises(CheckpointError, match=r"journal\.jsonl, line 2, is damaged.*from a backup"):
            Journal(path)


def test_compaction_keeps_the_newest_state_and_notes(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "_COMPACT_AT", 2000)
    monkeypatch.setattr(journals, "_KEPT_NOTES", 5)
    journal, sizes = Journal(path), []
    for number in range(200):
        journal.note(note(number))
        journal.write({"counts": {"env_steps": number}})
        sizes.append(path.stat().st_size)
    assert max(sizes) < 2200 and min(sizes[50:]) < 600  # the file grows until it is compacted
    journal.close()
    again = Journal(path)
    assert again.state == {"counts": {"env_steps": 199}} and numbers(again) == [195, 196, 197, 198, 199]
    assert len(path.read_bytes().splitlines()) == 6  # the file contains 5 notes and the newest state


def test_large_state_is_not_compacted_with_every_line(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "_COMPACT_AT", 2000)
    journal, large = Journal(path), {"counts": list(range(500))}
    journal.write(large)
    node = path.stat().st_ino
    journal.note(note(1))
    assert path.stat().st_ino == node  # the file was not compacted, because compaction creates a new file
    journal.write(large)
    journal.close()
    assert Journal(path).state == large


@pytest.mark.parametrize("room", [0, 1, 3000, 3021, 3333])
def test_journal_survives_a_full_disk_and_writes_everything_later(path: pathlib.Path, room: int) -> None:
    command = [sys.executable, "-c", FULL, str(path), str(room)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "full\n"
        assert path.stat().st_size <= room  # the last line may be incomplete
        lines = path.read_bytes().split(b"\n")[:-1]
        killed = path.with_name("killed.jsonl")
        killed.write_bytes(path.read_bytes())
        states = [state for line in lines if (state := json.loads(line).get("state"))]
        assert Journal(killed).state == (states[-1] if states else None)
        warned = process.communicate("\n", timeout=60.0)[1]
    told = (
        f"Cannot write {path}: File too large. Free some disk space. The job continues. "
        "The journal tries again with its next line."
    )
    assert set(warned.splitlines()) == {told, f"{path} can be written again and is complete."}
    journal = Journal(path)
    assert journal.state == {"counts": [99] * 20} and numbers(journal) == list(range(101))


def test_directory_that_cannot_be_created_is_reported(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Cannot write .*file/journal.jsonl: "):
        Journal(tmp_path / "file" / "journal.jsonl")
