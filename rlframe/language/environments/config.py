"""Options of environments and of their model servers. Names and defaults are the published ones, unless a comment
says otherwise."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlframe.errors import suggest

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class EvalHandlingEnum(Enum):
    """Mode of collecting while an evaluation runs: it pauses, goes on with fewer workers, or goes on."""

    STOP_TRAIN = "STOP_TRAIN"
    LIMIT_TRAIN = "LIMIT_TRAIN"
    NONE = "NONE"


class StrictModel(BaseModel):
    """Options of which a misspelt one is refused, and the nearest one named."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), validate_assignment=False)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for name in values:
                if name not in cls.model_fields:
                    raise ValueError(
                        f"{cls.__name__} has no option {name!r}.{suggest(str(name), cls.model_fields)}"
                        " What an environment reads beside the options of all, its own config class declares."
                    )
            for name, value in values.items():
                if isinstance(value, bool) and not takes_bool(cls.model_fields[name].annotation):
                    raise ValueError(f"{name} cannot be {value}.")  # pydantic makes the number 1 of it
        return values


def takes_bool(annotation: Any) -> bool:
    """Return whether true and false are values of this type, and not numbers that they stand for."""
    return annotation in (bool, Any) or any(map(takes_bool, get_args(annotation)))


class BaseEnvConfig(StrictModel):
    """Options of every environment; a subclass adds its own."""

    group_size: int = Field(default=4, ge=1, description="sequences that answer one item and are scored together")
    max_num_workers: int = Field(
        default=-1,
        ge=-1,
        description="groups that are collected at once; -1: max_num_workers_per_node for each model server",
    )
    max_num_workers_per_node: int = Field(
        default=8, ge=1, description="groups that are collected at once per model server"
    )
    max_eval_workers: int = Field(default=16, ge=1, description="tasks of `gather_eval` that run at once")
    steps_per_eval: int = Field(default=100, description="training steps from one evaluation to the next; 0: none")
    max_token_length: int = Field(default=2048, ge=1, description="of a sequence, prompt and all turns together")
    eval_handling: EvalHandlingEnum = Field(
        default=EvalHandlingEnum.STOP_TRAIN, description="what becomes of collecting while an evaluation runs"
    )
    eval_limit_ratio: float = Field(
        default=0.5, ge=0, le=1, description="the part of the workers that go on under eval_handling LIMIT_TRAIN"
    )
    inference_weight: float = Field(
        default=1.0,
        description="how much of the model servers is this environment's, against others'; -1: all it can get",
    )
    batch_size: int = Field(default=-1, description="sequences of a batch, where the service does not say")
    max_batches_offpolicy: int = Field(default=3, ge=1, description="batches that may wait before collecting pauses")
    tokenizer_name: str = Field(
        default="byte",  # published: a tokenizer that would have to be downloaded
        description="`byte`, or a folder with a tokenizer.json: `rlframe.language.model.tokenizers.load_tokenizer`",
    )
    use_wandb: bool = Field(default=True, description="log to Weights & Biases")
    rollout_server_url: str = Field(default="http://localhost:8000", description="of the trajectory service")
    total_steps: int = Field(
        default=1000, ge=-1, description="training steps to serve, groups to process; -1: the trainer's"
    )
    wandb_name: str | None = Field(
        default=None, description="what the run, and the environment at the service, is called"
    )
    num_rollouts_to_keep: int = Field(default=32, ge=1, description="groups that the table of rollouts shows")
    num_rollouts_per_group_for_logging: int = Field(default=1, ge=-1, description="sequences of each of them; -1: all")
    ensure_scores_are_not_same: bool = Field(default=True, description="send no group whose scores are all the same")
    data_path_to_save_groups: str | None = Field(
        default=None, description="JSONL file that groups are written to as well"
    )
    data_dir_to_save_evals: str | None = Field(default=None, description="folder of `evaluate_log`")
    min_items_sent_before_logging: int = Field(default=2, description="groups sent without which a step is not logged")
    include_messages: bool = Field(
        default=False, description="send sequences as text too, where a group has no messages"
    )
    min_batch_allocation: float | None = Field(
        default=None, ge=0, le=1, description="the part of each batch that is its own"
    )
    worker_timeout: float = Field(default=600, description="seconds for a group, not counting pauses; -1: none")
    thinking_mode: bool = Field(default=False, description="ask chat models to reason")
    reasoning_effort: ReasoningEffort | None = Field(default=None, description="how much; switches thinking_mode on")
    max_reasoning_tokens: int | None = Field(
        default=None, ge=1024, le=32000, description="tokens for it; switches thinking_mode on"
    )
    # What follows is rlframe's own.
    service_timeout: float = Field(
        default=600, gt=0, description="seconds without the trajectory service, or without a trainer, before giving up"
    )
    service_token: str | None = Field(default=None, description="that the trajectory service was started with")
    resume_file: str | None = Field(
        default=None, description="keeps who this environment is: started again with it, it comes back under its name"
    )


class ServerBaseline(StrictModel):
    """Options of requests to the model servers of this machine.

    That is what `rlframe serve policy` listens at, port 8001, if something does; else ports 9004 to 9007, as published.
    """

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
    """Ask a chat model to reason, in the words of its provider."""

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
