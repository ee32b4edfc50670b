"""Mount a small file system for tests of a full disk."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess

import pytest


class SmallDisk:
    """A mounted file system of a few megabytes, which a test can fill.

    Args:
        path: path of the mount point.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path, self._filler = path, path / "filler"

    def fill(self) -> None:
        """Fill the disk completely."""
        with self._filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 4096)

    def free(self) -> None:
        """Delete the file that fills the disk."""
        self._filler.unlink(missing_ok=True)


@pytest.fixture
def small_disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "rlframe-test", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small disk needs root and the permission to mount a tmpfs")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
