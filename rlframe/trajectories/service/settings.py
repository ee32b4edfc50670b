"""What the trajectory service can be told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

import msgspec

from rlframe.errors import UsageError, check_at_least, suggest
from rlframe.http.token_file import check_guarded, read_token

PREFIX = "RLFRAME_TRAJECTORIES_"
CAN = "read, send and erase experience"  # what whoever may call the service can do


@dataclass(frozen=True)
class Settings:
    """The service's options. `rlframe serve trajectories` takes them as --store and so on; under uvicorn,
    `RLFRAME_TRAJECTORIES_STORE` and so on set them."""

    store: str = "sqlite:trajectories.db"  # sqlite:PATH, memory, or redis://HOST:PORT
    token_file: str | None = None  # file with the bearer token that every request has to carry
    no_token: bool = False  # whether to answer other machines without a token: whoever reaches it can do all of `CAN`
    allowed_hosts: tuple[str, ...] = ()  # without a token: its names, beside localhost and IP addresses
    tokenizer: str | None = None  # byte, or a tokenizer.json, with which the live page shows tokens as text
    fresh: bool = False  # begin every run of the store anew, without what it holds
    max_queue_mb: int = 16_384  # megabytes of groups that are kept; environments are told to hold at 80 % of it
    max_body_mb: int = 64  # megabytes of one request, decompressed
    reset: bool = True  # whether /reset_data is there
    cors_origins: tuple[str, ...] = ()  # origins whose pages may call the service, or *

    def __post_init__(self) -> None:
        check_guarded("localhost", self.token_file, CAN, self.no_token)  # where it listens is not said here
        check_at_least(self, 1, "max_queue_mb", "max_body_mb")

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> Settings:
        """Raise `UsageError` for a variable that names no setting, or whose value cannot be."""
        told: dict[str, Any] = {}
        names, hints = {f.name: f for f in fields(cls)}, get_type_hints(cls)
        for variable, text in variables.items():
            if not variable.startswith(PREFIX):
                continue
            name = variable[len(PREFIX) :].lower()
            if name not in names:
                known = [PREFIX + known.upper() for known in names]
                raise UsageError(f"{variable} names no setting of the trajectory service.{suggest(variable, known)}")
            split = [part.strip() for part in text.split(",") if part.strip()]
            try:
                value = split if isinstance(names[name].default, tuple) else text
                told[name] = msgspec.convert(value, hints[name], strict=False)
            except msgspec.ValidationError as error:
                raise UsageError(f"{variable}: {error}; got {text!r}.") from None
        return cls(**told)

    def token(self) -> str | None:
        """The bearer token. Raises `UsageError` where the file cannot be read or is empty."""
        return read_token(self.token_file)
