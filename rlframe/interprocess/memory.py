"""Memory that processes of one machine share: anonymous, and found through the process that made it.

It has no name in any file system, so nothing of it can be left behind: it goes when its maker has let go of it, or has
died, and nobody maps it any more. Its first two words, int64, are the same in all of it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
from typing import NamedTuple

import numpy as np

from rlframe.interprocess.futex import KNOWN
from rlframe.interprocess.processes import ProcessId, this_process

TOKEN = 0  # which memory this is; written once
CLOSED = 1  # 1 once its maker closed it

SUPPORTED = hasattr(os, "memfd_create") and KNOWN
_ORDER = sys.byteorder


class Name(NamedTuple):
    """Where the memory is found."""

    maker: ProcessId
    descriptor: int
    token: int


def create(label: str, size: int) -> Name:
    """Makes `size` bytes, zeros, of which the system's tools say `label`. Pages that nobody writes to take no room."""
    descriptor = os.memfd_create(label, os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    token = secrets.randbits(62)
    os.pwrite(descriptor, token.to_bytes(8, _ORDER), 8 * TOKEN)
    return Name(this_process(), descriptor, token)


def destroy(name: Name) -> None:
    """Tells all who map the memory that it is closed, and lets go of it. Only its maker's call does something."""
    if this_process() == name.maker:  # and not a fork of it
        os.pwrite(name.descriptor, (1).to_bytes(8, _ORDER), 8 * CLOSED)
        os.close(name.descriptor)


def attach(name: Name, label: str, size: int) -> tuple[int, mmap.mmap]:
    """Finds the memory and maps it: (a descriptor of it, which is the caller's to close, the map).

    Raises:
        PermissionError: its maker runs as another user.
        FileNotFoundError: it is closed, or its maker has ended or runs on another machine.
    """
    path = f"/proc/{name.maker.pid}/fd/{name.descriptor}"
    if not os.readlink(path).startswith(f"/memfd:{label}"):
        raise FileNotFoundError(path)  # closed, and its number taken by another file
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if not name.maker.is_alive or os.fstat(descriptor).st_size != size:
            raise FileNotFoundError(path)
        memory = mmap.mmap(descriptor, size)
        if np.frombuffer(memory, np.int64, 1)[TOKEN] != name.token:
            raise FileNotFoundError(path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, memory
