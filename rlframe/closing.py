"""Objects that are context managers, and end with `close()`."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class Closing(abc.ABC):
    """A context manager whose end is `close()`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free what the object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
