"""`rlframe bench NAME --against CHECKOUT`: runs another checkout and this one in turns, and compares them.

Both run with this interpreter and its packages, so that what differs is the code, unless the old is given another one:
with `--against .` what differs is that. Both are measured by this checkout's benchmarks where they run with the old
code, else each by its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from benchmarks.comparison import Comparison, Rows, compare
from benchmarks.context import ROOT
from rlframe.errors import UsageError

TURN_SECONDS = 3600.0  # after which a turn of a benchmark, which takes minutes, has failed


def run(
    names: Iterable[str],
    against: str,
    turns: int,
    quick: bool,
    as_json: bool,
    say: Callable[[str], None],
    old_python: str = sys.executable,
) -> int:
    """Compares in the named benchmarks, and prints what it finds. `old_python` is the interpreter of the old.

    Returns:
        0: no row is slower by more than the old differs from itself. 1: one is, or no row could be compared.

    Raises:
        UsageError: `against` is neither a checkout nor a revision.
    """
    found: list[Comparison] = []
    missing: list[str] = []
    with checkout(against) as old, tempfile.TemporaryDirectory(prefix="rlframe-bench-") as folder:
        for name in names:
            compared, lacking = compare(
                Sides(name, ROOT, old, Path(folder, name), say, old_python).take_turns(turns, quick)
            )
            print("", *compared, sep="\n\n" if len(compared) > 1 else "\n", flush=True)
            found, missing = found + compared, missing + [f"{name}: {line}" for line in lacking]
    slower = [one for one in found if one.is_slower]
    print()
    if missing:
        print("Not compared:", *missing, sep="\n  ")
    if not found:
        print("No row could be compared.")
    elif not slower:
        print(f"None of {len(found)} rows is slower.")
    _list("Slower", [one for one in slower if not one.waits])
    _list("Slower for no more processor time: they wait", [one for one in slower if one.waits])
    _list("Not slower, but of more processor time", [one for one in found if one.only_works_more])
    if as_json:
        print(json.dumps({"turns": turns, "rows": [one.record() for one in found], "not_compared": missing}))
    return 1 if slower or not found else 0


def _list(heading: str, comparisons: list[Comparison]) -> None:
    if comparisons:
        print(f"{heading}:", *(f"{one.title}: {one.row}" for one in comparisons), sep="\n  ")


@contextlib.contextmanager
def checkout(given: str) -> Iterator[Path]:
    """The folder of a checkout; of a git revision of this one, a folder that is there for the time of the `with`."""
    if Path(given, "rlframe", "__init__.py").is_file():
        yield Path(given).resolve()
        return
    if Path(given).is_dir():
        raise UsageError(f"--against {given}: the folder is no checkout of rlframe; there is no rlframe/__init__.py.")
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", given, "rlframe", "benchmarks"]
    try:
        done = subprocess.run(command, capture_output=True)
        failure = done.stderr.decode().strip() if done.returncode else ""
    except OSError as error:
        failure = str(error)
    if failure:
        raise UsageError(f"--against {given}: neither a folder nor a revision of this repository ({failure}).")
    with tempfile.TemporaryDirectory(prefix="rlframe-against-") as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(folder)
        yield Path(folder)


class Failed(Exception):
    """A turn that gave no rows; the message says why."""


class Sides:
    """The old and the new of one benchmark, each in a folder that has the code and the programs that measure it."""

    def __init__(
        self, name: str, new: Path, old: Path, folder: Path, say: Callable[[str], None], old_python: str
    ) -> None:
        self._name = name
        self._say = say
        self._old_python = old_python
        self._new = _lay_out(folder / "new", new, new)
        self._old = _lay_out(folder / "old", old, new)
        self._old_alone = _lay_out(folder / "old_alone", old, old)

    def take_turns(self, turns: int, quick: bool) -> list[tuple[Rows, Rows, Rows]]:
        """The rows of so many turns of the old, the new, and the old again, after a quick one that warms up."""
        old = self._warm_up()
        taken = []
        for turn in range(1, turns + 1):
            sides = {"the old": old, "the new": self._new, "the old again": old}
            rows = [self._measure(f"turn {turn} of {turns}, {side}", tree, quick) for side, tree in sides.items()]
            taken.append((rows[0], rows[1], rows[2]))
        return taken

    def _warm_up(self) -> Path:
        """The old with the programs that measure more of the rows that the new has."""
        wanted = _measured(self._measure("warm-up, the new", self._new, True))
        by_new = _measured(self._measure("warm-up, the old", self._old, True)) & wanted
        if by_new == wanted:
            return self._old
        by_old = _measured(self._measure("warm-up, the old by its own benchmarks", self._old_alone, True)) & wanted
        if len(by_old) <= len(by_new):
            return self._old
        self._say(f"{self._name}: the old is measured by its own benchmarks; this checkout's do not run with it")
        return self._old_alone

    def _measure(self, what: str, tree: Path, quick: bool) -> Rows:
        """No rows where it fails, and says so."""
        self._say(f"{self._name}, {what}")
        try:
            return _run(sys.executable if tree is self._new else self._old_python, tree, self._name, quick)
        except Failed as why:
            self._say(f"{self._name}, {what}: {why}")
            return {}


def _lay_out(folder: Path, code: Path, programs: Path) -> Path:
    """A folder in which Python finds the rlframe of `code`, the benchmarks of `programs`, and our `turn` with them."""
    (folder / "benchmarks").mkdir(parents=True)
    (folder / "rlframe").symlink_to(code / "rlframe")
    (folder / "benchmarks" / "turn.py").symlink_to(ROOT / "benchmarks" / "turn.py")
    for entry in (programs / "benchmarks").glob("*"):
        if entry.name not in ("turn.py", "__pycache__"):
            (folder / "benchmarks" / entry.name).symlink_to(entry)
    return folder


def _run(python: str, tree: Path, name: str, quick: bool) -> Rows:
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    # Not pipes: what it left behind might hold them open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [python, "-m", "benchmarks.turn", name, *(["--quick"] if quick else [])],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": path},
            stdout=out,
            stderr=errors,
            start_new_session=True,  # a group to end with all that it started
        )
        try:
            process.wait(TURN_SECONDS)
        except subprocess.TimeoutExpired:
            raise Failed(f"it had not ended after {TURN_SECONDS:g} s, and was killed") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        errors.seek(0)
        lines, complaints = out.read().strip().splitlines(), errors.read().strip().splitlines()
    if process.returncode != 0 or not lines:
        raise Failed((complaints or ["nothing on stderr"])[-1][:300])
    said = json.loads(lines[-1])
    if Path(said["rlframe"]).parent != tree / "rlframe":
        raise Failed(f"it ran {said['rlframe']}, not {tree / 'rlframe'}")
    return {(row["title"], row["row"]): row for row in said["rows"]}


def _measured(rows: Rows) -> set[tuple[str, str]]:
    return {key for key, row in rows.items() if row["value"] is not None}
