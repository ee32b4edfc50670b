"""`rlframe bench NAME --against CHECKOUT` compares another checkout (the old one) with this one (the new one).

Both run in alternating turns, with this interpreter and its packages, so that only the code differs. With another
interpreter for the old checkout and `--against .`, only the interpreter differs. The benchmark programs of this
checkout measure both. If they do not work with the old code, each checkout is measured by its own programs.
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

TURN_SECONDS = 3600.0  # time limit of one turn, which normally takes minutes


def run(
    names: Iterable[str],
    against: str,
    turns: int,
    quick: bool,
    as_json: bool,
    log: Callable[[str], None],
    old_python: str = sys.executable,
) -> int:
    """Compare the checkouts in the named benchmarks and print the results.

    Args:
        names: names of benchmarks.
        against: the old checkout, as a folder or a git revision.
        turns: number of turns.
        quick: run short turns.
        as_json: also print one JSON object.
        log: receives progress messages.
        old_python: interpreter of the old checkout.

    Returns:
        0 if no row is slower by more than the old checkout differs from itself. 1 if a row is slower, or no row could
        be compared.

    Raises:
        UsageError: `against` is not a checkout and not a revision.
    """
    found: list[Comparison] = []
    missing: list[str] = []
    with checkout(against) as old, tempfile.TemporaryDirectory(prefix="rlframe-bench-") as folder:
        for name in names:
            compared, not_compared = compare(
                CheckoutPair(name, ROOT, old, Path(folder, name), log, old_python).take_turns(turns, quick)
            )
            print("", *compared, sep="\n\n" if len(compared) > 1 else "\n", flush=True)
            found, missing = found + compared, missing + [f"{name}: {line}" for line in not_compared]
    slower = [one for one in found if one.is_slower]
    print()
    if missing:
        print("Not compared:", *missing, sep="\n  ")
    if not found:
        print("No row could be compared.")
    elif not slower:
        print(f"None of {len(found)} rows is slower.")
    _list("Slower", [one for one in slower if not one.waits])
    _list("Slower without more processor time (waiting)", [one for one in slower if one.waits])
    _list("Not slower, but more processor time", [one for one in found if one.needs_more_processor_time])
    if as_json:
        print(json.dumps({"turns": turns, "rows": [one.record() for one in found], "not_compared": missing}))
    return 1 if slower or not found else 0


def _list(heading: str, comparisons: list[Comparison]) -> None:
    if comparisons:
        print(f"{heading}:", *(f"{one.title}: {one.row}" for one in comparisons), sep="\n  ")


@contextlib.contextmanager
def checkout(given: str) -> Iterator[Path]:
    """Yield the folder of a checkout. For a git revision, this is a temporary folder."""
    if Path(given, "rlframe", "__init__.py").is_file():
        yield Path(given).resolve()
        return
    if Path(given).is_dir():
        raise UsageError(f"--against {given}: the folder is not a checkout of rlframe. It has no rlframe/__init__.py.")
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", given, "rlframe", "benchmarks"]
    try:
        done = subprocess.run(command, capture_output=True)
        failure = done.stderr.decode().strip() if done.returncode else ""
    except OSError as error:
        failure = str(error)
    if failure:
        raise UsageError(f"--against {given}: there is no folder and no revision with this name ({failure}).")
    with tempfile.TemporaryDirectory(prefix="rlframe-against-") as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(folder)
        yield Path(folder)


class TurnFailed(Exception):
    """Raised for a turn without results. The message contains the reason."""


class CheckoutPair:
    """The old and the new code for one benchmark, each in a folder together with benchmark programs."""

    def __init__(
        self, name: str, new: Path, old: Path, folder: Path, log: Callable[[str], None], old_python: str
    ) -> None:
        self._name = name
        self._log = log
        self._old_python = old_python
        self._new = _lay_out(folder / "new", new, new)
        self._old = _lay_out(folder / "old", old, new)
        self._old_alone = _lay_out(folder / "old_alone", old, old)

    def take_turns(self, turns: int, quick: bool) -> list[tuple[Rows, Rows, Rows]]:
        """Return the rows of each turn (old, new, old again), after a quick turn for warm-up."""
        old = self._warm_up()
        taken = []
        for turn in range(1, turns + 1):
            sides = {"the old": old, "the new": self._new, "the old again": old}
            rows = [self._measure(f"turn {turn} of {turns}, {side}", tree, quick) for side, tree in sides.items()]
            taken.append((rows[0], rows[1], rows[2]))
        return taken

    def _warm_up(self) -> Path:
        """Return the folder of the old code whose programs measure more of the new code's rows."""
        wanted = _measured(self._measure("warm-up, the new", self._new, True))
        by_new = _measured(self._measure("warm-up, the old", self._old, True)) & wanted
        if by_new == wanted:
            return self._old
        by_old = _measured(self._measure("warm-up, the old by its own benchmarks", self._old_alone, True)) & wanted
        if len(by_old) <= len(by_new):
            return self._old
        self._log(f"{self._name}: the old code is measured by its own benchmarks, because ours do not work with it")
        return self._old_alone

    def _measure(self, label: str, tree: Path, quick: bool) -> Rows:
        """Return the rows of one turn, or no rows and a message if it fails."""
        self._log(f"{self._name}, {label}")
        try:
            return _run(sys.executable if tree is self._new else self._old_python, tree, self._name, quick)
        except TurnFailed as why:
            self._log(f"{self._name}, {label}: {why}")
            return {}


def _lay_out(folder: Path, code: Path, programs: Path) -> Path:
    """Create a folder with links to the rlframe of `code`, the benchmarks of `programs`, and our own `turn` module."""
    (folder / "benchmarks").mkdir(parents=True)
    (folder / "rlframe").symlink_to(code / "rlframe")
    (folder / "benchmarks" / "turn.py").symlink_to(ROOT / "benchmarks" / "turn.py")
    for entry in (programs / "benchmarks").glob("*"):
        if entry.name not in ("turn.py", "__pycache__"):
            (folder / "benchmarks" / entry.name).symlink_to(entry)
    return folder


def _run(python: str, tree: Path, name: str, quick: bool) -> Rows:
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    # Files instead of pipes, because processes left behind could keep pipes open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [python, "-m", "benchmarks.turn", name, *(["--quick"] if quick else [])],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": path},
            stdout=out,
            stderr=errors,
            start_new_session=True,  # a process group, so that all its processes can be killed
        )
        try:
            process.wait(TURN_SECONDS)
        except subprocess.TimeoutExpired:
            raise TurnFailed(f"it did not end within {TURN_SECONDS:g} s and was killed") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        errors.seek(0)
        lines, error_lines = out.read().strip().splitlines(), errors.read().strip().splitlines()
    if process.returncode != 0 or not lines:
        raise TurnFailed((error_lines or ["nothing on stderr"])[-1][:300])
    result = json.loads(lines[-1])
    if Path(result["rlframe"]).parent != tree / "rlframe":
        raise TurnFailed(f"it imported {result['rlframe']} instead of {tree / 'rlframe'}")
    return {(row["title"], row["row"]): row for row in result["rows"]}


def _measured(rows: Rows) -> set[tuple[str, str]]:
    return {key for key, row in rows.items() if row["value"] is not None}
