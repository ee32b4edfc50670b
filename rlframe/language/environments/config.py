"""Options of environments and of their model servers. Most names and defaults are the same as in `atroposlib`."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlframe.errors import suggest

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class EvalHandlingEnum(Enum):
    """During an evaluation, collecting pauses, continues with fewer workers, or continues unchanged."""

    STOP_TRAIN = "STOP_TRAIN"
    LIMIT_TRAIN = "LIMIT_TRAIN"
    NONE = "NONE"


class StrictModel(BaseModel):
    """A pydantic model that refuses unknown options and suggests the nearest known name."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), validate_assignment=False)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for name in values:
                if name not in cls.model_fields:
                    raise ValueError(
                        f"{cls.__name__} has no option {name!r}.{suggest(str(name), cls.model_fields)}"
                        " An environment with additional options must declare them in its own config class."
                    )
            for name, value in values.items():
                if isinstance(value, bool) and not takes_bool(cls.model_fields[name].annotation):
                    raise ValueError(f"{name} cannot be {value}.")  # pydantic would convert the bool to a number
        return values


def takes_bool(annotation: Any) -> bool:
    """Return True if bools are valid values of a field of this type."""
    return annotation in (bool, Any) or any(map(takes_bool, get_args(annotation)))


class BaseEnvConfig(StrictModel):
    """Options of every environment. Subclasses add their own options."""

    group_size: int = Field(default=4, ge=1, description="number of sequences in a group; all answer the same item")
    max_num_workers: int = Field(
        default=-1,
        ge=-1,
        description="number of groups to collect at the same time; -1: max_num_workers_per_node for each model server",
    )
    max_num_workers_per_node: int = Field(
        default=8, ge=1, description="groups to collect at the same time per model server"
    )
    max_eval_workers: int = Field(default=16, ge=1, description="maximum tasks of `gather_eval` at the same time")
    steps_per_eval: int = Field(default=100, description="training steps between evaluations; 0: no evaluations")
    max_token_length: int = Field(
        default=2048, ge=1, description="maximum tokens of a sequence, including the prompt and all turns"
    )
    eval_handling: EvalHandlingEnum = Field(
        default=EvalHandlingEnum.STOP_TRAIN, description="what collecting does during an evaluation"
    )
    eval_limit_ratio: float = Field(
        default=0.5, ge=0, le=1, description="if eval_handling is LIMIT_TRAIN: fraction of workers that continue"
    )
    inference_weight: float = Field(
        default=1.0,
        description="share of the model servers, relative to other environments; -1: no limit",
    )
    batch_size: int = Field(default=-1, description="number of sequences in a batch, unless the service sets it")
    max_batches_offpolicy: int = Field(default=3, ge=1, description="number of queued batches at which to pause")
    tokenizer_name: str = Field(
        default="byte",  # in `atroposlib`, the default is a tokenizer that must be downloaded
        description="`byte`, or a folder with a tokenizer.json; see `rlframe.language.model.tokenizers.load_tokenizer`",
    )
    use_wandb: bool = Field(default=True, description="log to Weights & Biases")
    rollout_server_url: str = Field(default="http://localhost:8000", description="URL of the trajectory service")
    total_steps: int = Field(
        default=1000, ge=-1, description="serve: training steps; process: groups; -1: the trainer's number of steps"
    )
    wandb_name: str | None = Field(default=None, description="name of the run, and of the environment at the service")
    num_rollouts_to_keep: int = Field(default=32, ge=1, description="number of groups in the table of rollouts")
    num_rollouts_per_group_for_logging: int = Field(
        default=1, ge=-1, description="sequences per group in the table of rollouts; -1: all"
    )
    ensure_scores_are_not_same: bool = Field(default=True, description="do not send groups whose scores are all equal")
    data_path_to_save_groups: str | None = Field(
        default=None, description="JSONL file to which groups are also written"
    )
    data_dir_to_save_evals: str | None = Field(
        default=None, description="folder for the results of evaluations, written by `evaluate_log`"
    )
    min_items_sent_before_logging: int = Field(
        default=2, description="groups that must be sent before a step is logged"
    )
    include_messages: bool = Field(default=False, description="also send sequences as text if a group has no messages")
    min_batch_allocation: float | None = Field(
        default=None, ge=0, le=1, description="fraction of each batch that is reserved for this environment"
    )
    worker_timeout: float = Field(default=600, description="seconds for a group, without pauses; -1: no limit")
    thinking_mode: bool = Field(default=False, description="request reasoning from chat models")
    reasoning_effort: ReasoningEffort | None = Field(
        default=None, description="effort of reasoning; implies thinking_mode"
    )
    max_reasoning_tokens: int | None = Field(
        default=None, ge=1024, le=32000, description="maximum number of tokens of the reasoning; implies thinking_mode"
    )
    # The following options do not exist in `atroposlib`.
    service_timeout: float = Field(
        default=600, gt=0, description="seconds to wait for the trajectory service or a trainer"
    )
    service_token: str | None = Field(default=None, description="bearer token of the trajectory service")
    resume_file: str | None = Field(
        default=None,
        description="file with the environment's identity; a restart with the same file continues under the same name",
    )


class ServerBaseline(StrictModel):
    """Options of requests to model servers on this machine.

    If port 8001 is open, the only server is `rlframe serve policy` at this port. Otherwise the servers are at ports
    9004 to 9007, as in `atroposlib`.
    """

    timeout: int = Field(default=1200, gt=0, description="seconds for an answer, including all retries")
    num_max_requests_at_once: int = Field(
        default=512, ge=1, description="maximum number of concurrent requests to a server in training"
    )
    num_requests_for_eval: int = Field(
        default=64, ge=1, description="maximum requests to a server at once in evaluations"
    )
    model_name: str = Field(default="default", description="name of the model")
    rolling_buffer_length: int = Field(
        default=1000, ge=1, description="a server's statistics cover this number of recent requests"
    )
    server_type: Literal["openai", "vllm", "sglang"] = Field(
        default="openai",
        description="sglang: get token ids from /generate of SGLang; otherwise: from /v1/completions",
    )
    tokenizer_name: str = Field(
        default="none", description="default tokenizer of `managed_server()`; none: use model_name"
    )


class APIServerConfig(ServerBaseline):
    """Options of one model server."""

    api_key: str | None = Field(default="", description="None: use the environment variable OPENAI_API_KEY")
    base_url: str | None = Field(default="", description="URL such as http://HOST:PORT/v1; None: OpenAI's server")
    n_kwarg_is_ignored: bool = Field(
        default=False, description="the server ignores n and always returns one completion"
    )
    health_check: bool = Field(
        default=True, description="after a failure, list the server's models before the next request"
    )


OpenaiConfig = APIServerConfig  # older environments import this name


class ServerManagerConfig(StrictModel):
    """Options that apply to all model servers."""

    slurm: bool = Field(default=False, description="use the nodes of the Slurm job as model servers")
    testing: bool = Field(default=False, description="not supported; in `atroposlib`, it gives made-up answers")
    max_n_completions: int = Field(
        default=8, ge=1, description="maximum number of completions in a request; larger requests are split"
    )


@dataclasses.dataclass(frozen=True)
class ReasoningConfig:
    """Options that request reasoning from a chat model."""

    enabled: bool = False
    effort: str | None = None
    max_tokens: int | None = None

    def extra_body(self, base_url: str | None) -> dict[str, Any]:
        """Return the extra fields of a request to the provider; an empty dict if no reasoning is requested.

        A provider accepts either effort or max_tokens. If both are set, send only effort.
        """
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
