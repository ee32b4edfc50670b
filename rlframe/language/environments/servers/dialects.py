"""How servers say which tokens they sampled: vLLM and rlframe in completions, SGLang in answers of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlframe.errors import PeerError, UsageError
from rlframe.language.environments.servers.config import APIServerConfig

_TOKEN_ID = "token_id:"  # what vLLM calls tokens where it is asked to


@dataclasses.dataclass(frozen=True)
class Samples:
    """Completions of one prompt, as token ids."""

    prompt_tokens: list[int]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    finish_reasons: list[str]
    policy_version: int | None  # the oldest that sampled a token


async def completions(client: Any, config: APIServerConfig, options: dict[str, Any], timeout: float) -> Samples:
    """From `/v1/completions`, with the fields that vLLM added: `return_token_ids`, `token_ids`, `prompt_token_ids`."""
    options = _renamed(options)
    input_ids, prompt = options.pop("input_ids", None), options.pop("prompt", None)
    body = {"return_token_ids": True, "return_tokens_as_token_ids": True, **(options.pop("extra_body", None) or {})}
    answer = await client.completions.create(
        model=config.model_name,
        prompt=prompt if input_ids is None else list(input_ids),
        **{"logprobs": 1, **options},
        extra_body=body,
        timeout=timeout,
    )
    tokens, logprobs = [], []
    for choice in answer.choices:
        ids = getattr(choice, "token_ids", None)
        listed = None if choice.logprobs is None else choice.logprobs.token_logprobs
        if ids is None and choice.logprobs is not None:
            names = choice.logprobs.tokens or []
            if names and all(name.startswith(_TOKEN_ID) for name in names):
                ids = [int(name.removeprefix(_TOKEN_ID)) for name in names]
        if ids is None or listed is None:
            raise UsageError(
                f"{config.base_url} answers without token ids and log-probabilities, which training needs. `rlframe "
                "serve policy` and vLLM (from 0.10.2 on) send them; for SGLang say server_type='sglang'."
            )
        if len(ids) != len(listed):
            raise PeerError(f"{config.base_url} sent {len(ids)} token ids and {len(listed)} log-probabilities.")
        tokens.append(list(ids))
        logprobs.append([float(value) for value in listed])
    if input_ids is None:
        input_ids = getattr(answer.choices[0], "prompt_token_ids", None)
        if input_ids is None:
            raise UsageError(f"{config.base_url} does not say the tokens of a prompt: give input_ids, not text.")
    reasons = [choice.finish_reason or "stop" for choice in answer.choices]
    return Samples(list(input_ids), tokens, logprobs, reasons, oldest_version(answer))


async def sglang(client: Any, config: APIServerConfig, options: dict[str, Any], timeout: float) -> Samples:
    """From SGLang's `/generate`, which takes and gives token ids."""
    options = _renamed(options)
    input_ids = options.pop("input_ids", None)
    if input_ids is None:
        raise UsageError("SGLang is asked with input_ids, since it does not say the tokens of a prompt.")
    options.pop("prompt", None)
    if "max_tokens" in options:
        options["max_new_tokens"] = options.pop("max_tokens")
    root = client.with_options(base_url=str(config.base_url).removesuffix("/").removesuffix("/v1"), timeout=timeout)
    body = {"input_ids": list(input_ids), "sampling_params": options, "return_logprob": True}
    answers = await root.post("/generate", cast_to=object, body=body)
    infos = [answer["meta_info"] for answer in (answers if isinstance(answers, list) else [answers])]
    sampled = [info["output_token_logprobs"] for info in infos]  # of each token (log-probability, id, text)
    reasons = [info.get("finish_reason") or "stop" for info in infos]
    return Samples(
        prompt_tokens=list(input_ids),
        tokens=[[int(entry[1]) for entry in entries] for entries in sampled],
        logprobs=[[float(entry[0]) for entry in entries] for entries in sampled],
        finish_reasons=[reason["type"] if isinstance(reason, dict) else reason for reason in reasons],
        policy_version=None,
    )


def oldest_version(answer: Any) -> int | None:
    """Of the tokens of an answer; None where the server does not say it.

    `rlframe serve policy` says the version of each choice's last token, and where they are several those of all.
    """
    versions = [getattr(answer, "policy_version", None)]
    for choice in answer.choices:
        versions += [getattr(choice, "policy_version", None), *(getattr(choice, "policy_versions", None) or [])]
    return min((version for version in versions if version is not None), default=None)


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    """With the one name for the number of tokens that completions take; the model is the config's."""
    options = {name: value for name, value in options.items() if name != "model"}
    for name in ("max_new_tokens", "max_completion_tokens"):
        if name in options:
            options["max_tokens"] = options.pop(name)
    return options
