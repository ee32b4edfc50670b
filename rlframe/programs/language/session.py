"""One session of a run, as its nodes need to know it."""

from __future__ import annotations

import dataclasses
import pathlib

from rlframe.agents import Agent
from rlframe.programs.language.description import LanguageExperiment

HOST = "127.0.0.1"  # all of a program's services are on one machine


@dataclasses.dataclass(frozen=True)
class LanguageRun:
    """See the module."""

    described: LanguageExperiment
    agent: Agent
    path: pathlib.Path  # of the run directory
    until: int  # learner steps at which this session ends
    began: float  # seconds since the epoch
    service_port: int  # of the trajectory service
    policy_port: int  # of the policy server

    @property
    def service_url(self) -> str:
        """Of the trajectory service."""
        return f"http://{HOST}:{self.service_port}"

    @property
    def policy_url(self) -> str:
        """Of the policy server, without `/v1`."""
        return f"http://{HOST}:{self.policy_port}"
