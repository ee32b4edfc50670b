"""The options of the trajectory service."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from rlframe.errors import check_at_least
from rlframe.http.config import ServiceConfig


@dataclasses.dataclass(frozen=True)
class Settings(ServiceConfig):
    """Options of the trajectory service. `rlframe serve trajectories` reads them from the command line, and uvicorn
    from environment variables.
    """

    can: ClassVar[str] = "read, send and erase experience"

    port: int = 8000  # 0 selects a free port
    store: str = "sqlite:trajectories.db"  # sqlite:PATH, memory, or redis://HOST:PORT/DATABASE
    fresh: bool = False  # clear the store: delete all its registrations, environments and groups
    tokenizer: str | None = None  # `byte`, or a tokenizer.json file; with a tokenizer, the live page shows text
    max_queue_mb: int = 16_384  # limit of stored groups in MB; environments wait above 80 % of it
    reset: bool = True  # True enables the endpoint /reset_data
    cors_origins: tuple[str, ...] = ()  # origins whose pages may call the service, or *

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "max_queue_mb")
