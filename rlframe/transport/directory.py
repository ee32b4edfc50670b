"""The directory of the sockets of a program, which only its user can enter, and which is gone when the program is."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import weakref

from rlframe.errors import UsageError

_LONGEST = 50  # characters of the directory's place: a socket's whole path may have 107

# It outlives the process that it reads from, even one that is killed.
_REMOVE_AT_END = 'read _; exec rm -rf -- "$0"'


class SocketDirectory:
    """Makes the directory; it is removed by `close`, or when this process has ended, whatever it dies of.

    It is where temporary files are (TMPDIR), or in /tmp where the sockets' paths would be too long.

    Attributes:
        path: of the directory.
    """

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="rlframe-", dir=place_of_sockets())  # of mode 0700
        remover = subprocess.Popen(
            ["/bin/sh", "-c", _REMOVE_AT_END, self.path],
            stdin=subprocess.PIPE,  # which nobody writes to: the kernel closes it with this process
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it
        )
        self._finalizer = weakref.finalize(self, _remove, self.path, remover)

    def close(self) -> None:
        """Removes the directory with all that is in it. Calling it twice does nothing."""
        self._finalizer()


def place_of_sockets() -> str:
    """A directory in which those of sockets may be. Raises UsageError where there is none."""
    place = next((each for each in (tempfile.gettempdir(), "/tmp", "/dev/shm") if _suits(each)), None)
    if place is None:
        raise UsageError(
            f"The sockets of a program need a directory of at most {_LONGEST} characters that can be written to: "
            "TMPDIR, /tmp or /dev/shm. None of these is."
        )
    return place


def _remove(path: str, remover: subprocess.Popen[bytes]) -> None:
    shutil.rmtree(path, ignore_errors=True)
    remover.communicate()


def _suits(place: str) -> bool:
    return len(os.fsencode(place)) <= _LONGEST and os.access(place, os.W_OK | os.X_OK)
