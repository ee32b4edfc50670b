"""What model servers there are, and how they are asked."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from rlframe.errors import UsageError
from rlframe.language.environments.config import StrictModel

_LOCAL_PORTS = range(9004, 9008)  # where ServerBaseline looks, as published
_SLURM_PORT = 9000  # and on the nodes of a Slurm job, from here on
_GPUS_PER_NODE = 8


class ServerBaseline(StrictModel):
    """How to ask the model servers of this machine, on ports 9004 to 9007."""

    timeout: int = Field(default=1200, gt=0, description="seconds for an answer, with all repetitions")
    num_max_requests_at_once: int = Field(
        default=512, ge=1, description="requests under way at one server, in training"
    )
    num_requests_for_eval: int = Field(default=64, ge=1, description="and in evaluations")
    model_name: str = Field(default="default", description="the model to ask for")
    rolling_buffer_length: int = Field(
        default=1000, ge=1, description="requests that the statistics of a server look back on"
    )
    server_type: Literal["openai", "vllm", "sglang"] = Field(
        default="openai",
        description="sglang: token ids come from its own /generate; else from /v1/completions",
    )
    tokenizer_name: str = Field(
        default="none", description="for `managed_server()` without a tokenizer; none: model_name"
    )


class APIServerConfig(ServerBaseline):
    """A model server."""

    api_key: str | None = Field(default="", description="None: what the environment variable OPENAI_API_KEY says")
    base_url: str | None = Field(default="", description="such as http://HOST:PORT/v1; None: OpenAI's own")
    n_kwarg_is_ignored: bool = Field(default=False, description="it answers with one completion, whatever n is")
    health_check: bool = Field(default=True, description="once it failed, ask it for its models before anything else")


OpenaiConfig = APIServerConfig  # as older environments call it


class ServerManagerConfig(StrictModel):
    """The options of the command line that belong to no server in particular."""

    slurm: bool = Field(default=False, description="take the model servers from the nodes of the Slurm job")
    testing: bool = Field(default=False, description="published: made-up answers; not offered")
    max_n_completions: int = Field(default=8, ge=1, description="completions in one request; more are divided")


@dataclasses.dataclass(frozen=True)
class ReasoningConfig:
    """What asks a chat model to reason, in the words of its provider."""

    enabled: bool = False
    effort: str | None = None
    max_tokens: int | None = None

    def extra_body(self, base_url: str | None) -> dict[str, Any]:
        """Empty where nothing is asked for. Of effort and max_tokens, providers take one: effort goes first."""
        if not (self.enabled or self.effort is not None or self.max_tokens is not None):
            return {}
        if base_url is None or "api.openai.com" in base_url:
            return {"reasoning_effort": self.effort or "medium"}
        reasoning: dict[str, Any] = {"enabled": True}
        if self.effort is not None:
            reasoning["effort"] = self.effort
        elif self.max_tokens is not None:
            reasoning["max_tokens"] = self.max_tokens
        return {"reasoning": reasoning}


def servers_of(configs: ServerBaseline | Sequence[APIServerConfig], slurm: bool) -> list[APIServerConfig]:
    """One config for each server that there is.

    A job of several Slurm nodes has its model servers on those after the first NUM_TRAINING_NODES, from port 9000 on,
    one for each INFER_TP of 8 GPUs, as published.
    """
    listed: list[Any] = [configs] if isinstance(configs, ServerBaseline) else list(configs)
    if not listed:
        raise UsageError("There is no model server: the list of server configs is empty.")
    first = listed[0]
    if slurm and len(nodes := _slurm_nodes()) > 1:
        training, each = int(os.environ.get("NUM_TRAINING_NODES", "1")), int(os.environ.get("INFER_TP", "1"))
        ports = range(_SLURM_PORT, _SLURM_PORT + _GPUS_PER_NODE // each)
        return [_at(first, f"http://{node}:{port}/v1") for node in nodes[training:] for port in ports]
    if not isinstance(first, APIServerConfig):
        return [_at(first, f"http://localhost:{port}/v1") for port in _LOCAL_PORTS]
    return listed


def _at(config: ServerBaseline, url: str) -> APIServerConfig:
    return APIServerConfig(**{"api_key": "x", **config.model_dump(), "base_url": url})


def _slurm_nodes() -> list[str]:
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        return []
    listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=60)
    if listed.returncode:
        raise UsageError(f"`scontrol show hostnames {nodes}` failed: {listed.stderr.strip()}")
    return listed.stdout.split()
