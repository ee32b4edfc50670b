"""The options of the trajectory service."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from rlframe.errors import check_at_least
from rlframe.http.config import ServiceConfig


@dataclasses.dataclass(frozen=True)
class Settings(ServiceConfig):
    """Options of the trajectory service: `rlframe serve trajectories --store ...`, or variables under uvicorn."""

    can: ClassVar[str] = "read, send and erase experience"

    port: int = 8000  # 0: one that is free
    store: str = "sqlite:trajectories.db"  # sqlite:PATH, memory, or redis://HOST:PORT/DATABASE
    fresh: bool = False  # clear the store: drop all registrations, environments and groups in it
    tokenizer: str | None = None  # byte, or a tokenizer.json, with which the live page shows tokens as text
    max_queue_mb: int = 16_384  # megabytes of groups that are kept; environments are told to hold at 80 % of it
    reset: bool = True  # whether /reset_data is there
    cors_origins: tuple[str, ...] = ()  # origins whose pages may call the service, or *

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "max_queue_mb")
