"""The options of a policy server."""

from __future__ import annotations

import dataclasses

from rlframe import handles
from rlframe.errors import UsageError
from rlframe.http.token_file import check_guarded
from rlframe.language.decoding import EngineConfig

CAN = "have the model answer"  # what whoever may call the server can do


@dataclasses.dataclass(frozen=True)
class PolicyServerConfig:
    """Where it listens, how much it takes, and how it follows its learner."""

    host: str = "127.0.0.1"  # address to listen at; 0.0.0.0 for all networks
    port: int = 8001  # 0: one that is free
    token_file: str | None = None  # file with the bearer token that every request has to carry
    no_token: bool = False  # whether to answer other machines without a token: whoever reaches it can do all of `CAN`
    allowed_hosts: tuple[str, ...] = ()  # without a token: its names, beside localhost and IP addresses
    model_name: str = "policy"  # that requests have to ask for
    max_connections: int = 1024  # at the same time; more are refused
    max_body_mb: int = 64  # megabytes of one request, decompressed
    request_timeout: float = 600.0  # seconds for an answer
    refresh_interval: float = 0.02  # seconds between two looks at the learner's parameters
    learner_deadline: float = handles.DEADLINE  # seconds that a learner in another process may be out of reach
    seed: int = 0  # of the requests that name none
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)  # how much is decoded at once

    def __post_init__(self) -> None:
        check_guarded(self.host, self.token_file, CAN, self.no_token)
        for name in ("max_connections", "max_body_mb"):
            if getattr(self, name) < 1:
                raise UsageError(f"PolicyServerConfig.{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("request_timeout", "refresh_interval", "learner_deadline"):
            if not getattr(self, name) > 0:
                raise UsageError(f"PolicyServerConfig.{name} must be more than 0 s, got {getattr(self, name)}.")
