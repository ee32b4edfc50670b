"""A client of one model server. It uses the OpenAI API, with the `openai` package.

Servers return the sampled token ids in different ways: vLLM and rlframe use fields of completions, and SGLang uses the
responses of its `/generate`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import urllib.parse
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import numpy as np

from rlframe import extras, retry
from rlframe.errors import PeerError, UsageError
from rlframe.language.environments.collecting import current_attempt
from rlframe.language.environments.config import APIServerConfig, ReasoningConfig

_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds to wait before the first retry, and at most before any retry
_PROBE_TIMEOUT = 5.0  # seconds; timeout of a request that only checks whether the server answers
_AVOIDED = 10.0  # after a failure, new requests use other servers for this number of seconds
_TOKEN_ID = "token_id:"  # vLLM's prefix of token names if return_tokens_as_token_ids is set

logger = logging.getLogger(__name__)


class APIServer:
    """A client of one model server. It retries failed requests until the config's `timeout`.

    A request for a group first waits until the gate is open (`collecting.py: Gate`). So collecting can pause, and later
    continue where it stopped.

    Raises (every call):
        PeerError: The server did not answer in time.
        openai.APIStatusError: The server refused the request (status 400 to 499).
    """

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        if config.base_url == "":
            raise UsageError(
                "A model server needs a base_url, such as http://localhost:9001/v1. Give --openai.base_url, or set it "
                "in the APIServerConfig of config_init."
            )
        with extras.explain_import_error("BaseEnv", "envs"):
            import openai
        self.config = config
        is_here = urllib.parse.urlsplit(config.base_url or "").hostname in ("localhost", "127.0.0.1", "::1")
        self.openai = openai.AsyncOpenAI(
            # A proxy from the environment cannot reach servers on this machine.
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False) if is_here else None,
            api_key="none" if config.api_key == "" else config.api_key,
            base_url=config.base_url,
            timeout=config.timeout,
            max_retries=0,  # `_ask` does the retries instead, because pauses must not count for the timeout
        )
        self.sem = anyio.CapacityLimiter(config.num_max_requests_at_once)
        self.eval_sem = anyio.CapacityLimiter(config.num_requests_for_eval)
        self.server_healthy = True
        self._reasoning = reasoning_config or ReasoningConfig()
        self._retryable = (openai.APIConnectionError, openai.InternalServerError, openai.RateLimitError)
        self._rate_limit_error = openai.RateLimitError
        self._status_error = openai.APIStatusError
        self._failed_at = 0.0
        self._one_at_a_time = config.n_kwarg_is_ignored
        length = config.rolling_buffer_length
        self.request_timings, self.eval_request_timings = deque[float](maxlen=length), deque[float](maxlen=length)
        self.attempts_list, self.eval_attempts_list = deque[int](maxlen=length), deque[int](maxlen=length)

    @property
    def usable(self) -> bool:
        """True if new requests may use this server."""
        return self.server_healthy or time.monotonic() - self._failed_at > _AVOIDED

    async def chat_completion(self, **kwargs: Any) -> Any:
        """Call `openai.chat.completions.create` with the config's model.

        Args:
            split: "train" or "eval". The number of concurrent requests is limited for each of them separately.
            skip_reasoning: True requests no reasoning, even if the environment's config enables it.
        """
        if not kwargs.pop("skip_reasoning", False) and (body := self._reasoning.extra_body(self.config.base_url)):
            kwargs["extra_body"] = {**(kwargs.get("extra_body") or {}), **body}
            if "reasoning_effort" in body:  # then OpenAI's models refuse max_tokens, and any temperature except 1
                kwargs["temperature"] = 1.0
                if "max_tokens" in kwargs:
                    kwargs["max_completion_tokens"] = kwargs.pop("max_tokens")
        return await self._completions(self.openai.chat.completions.create, kwargs)

    async def completion(self, **kwargs: Any) -> Any:
        """Call `openai.completions.create` for one prompt with the config's model. See `chat_completion`."""
        check_one_prompt(kwargs.get("prompt"))
        return await self._completions(self.openai.completions.create, kwargs)

    async def tokens_and_logprobs_completion(
        self, **kwargs: Any
    ) -> tuple[list[int], list[list[int]], list[list[float]], list[str]]:
        """Sample completions. Return the token ids as the server sampled them.

        Args:
            prompt or input_ids: Text, or token ids.
            n, max_tokens, temperature, top_p, stop, seed, split, ...: See `completion`.

        Returns:
            (tokens of the prompt, tokens of each completion, log-probabilities of these tokens, finish reason of each
            completion: "stop" or "length").

        Raises:
            UsageError: The server does not return token ids.
        """
        sample = self._sample_with_sglang if self.config.server_type == "sglang" else self._sample_with_completions
        parts = await self._several(sample, lambda samples: len(samples.tokens), kwargs)
        tokens, logprobs, reasons = (
            [one for part in parts for one in getattr(part, name)] for name in ("tokens", "logprobs", "finish_reasons")
        )
        return parts[0].prompt_tokens, tokens, logprobs, reasons

    async def update_weight(self, weight: float) -> None:
        """Limit the number of concurrent requests to a fraction (0 to 1) of the configured limit. Allow at least 1."""
        part = min(1.0, max(0.0, weight))
        self.sem.total_tokens = max(1, int(self.config.num_max_requests_at_once * part))
        self.eval_sem.total_tokens = max(1, int(self.config.num_requests_for_eval * part))

    async def wandb_metrics(self, metrics_dict: dict[str, Any] | None, server_name: str | None) -> dict[str, Any]:
        """Add statistics of this server to the metrics, computed over the last `rolling_buffer_length` requests."""
        metrics, name = metrics_dict if metrics_dict is not None else {}, f"server/{server_name or 'server'}"
        for kind, timings in (("", self.request_timings), ("eval_", self.eval_request_timings)):
            if timings:
                metrics[f"{name}_{kind}request_time_avg"] = float(np.mean(timings))
                metrics[f"{name}_{kind}request_time_std"] = float(np.std(timings))
                metrics[f"{name}_{kind}request_time_99p"] = float(np.percentile(timings, 99))
        if self.attempts_list:
            metrics[f"{name}_average_num_attempts"] = float(np.mean(self.attempts_list))
        if self.eval_attempts_list:
            metrics[f"{name}_eval_retry_rate"] = float(np.mean(self.eval_attempts_list))
        return metrics

    async def close(self) -> None:
        await self.openai.close()

    async def _completions(self, create: Callable[..., Awaitable[Any]], kwargs: dict[str, Any]) -> Any:
        """Return one answer with n choices, even if the server needs several requests for them."""

        def ask(options: dict[str, Any], timeout: float) -> Awaitable[Any]:
            return create(**{**options, "model": self.config.model_name}, timeout=timeout)

        return merge_answers(await self._several(ask, lambda answer: len(answer.choices), kwargs))

    async def _several(
        self,
        ask: Callable[[dict[str, Any], float], Awaitable[Any]],
        count: Callable[[Any], int],
        kwargs: dict[str, Any],
    ) -> list[Any]:
        """Return a list with the answer to one request; if the server ignores n, with the answers to n requests.

        Args:
            ask: Sends a request. Its arguments are the options and a timeout in seconds.
            count: Returns the number of completions in an answer.
            kwargs: Options, including `split` and `n`.
        """
        options = dict(kwargs)
        split, n = options.pop("split", "train"), options.pop("n", None) or 1

        def part(start: int, size: int) -> Awaitable[Any]:
            request = {**options_with_derived_seed(options, start), **({"n": size} if size > 1 else {})}
            return self._ask(split, lambda timeout: ask(request, timeout))

        answers = [await part(0, 1 if self._one_at_a_time else n)]
        if count(answers[0]) == 1 < n:
            self._one_at_a_time = True
            answers += await asyncio.gather(*(part(start, 1) for start in range(1, n)))
        if (sent := sum(map(count, answers))) != n:
            raise PeerError(f"{n} completions were requested from {self.config.base_url}, but it returned {sent}.")
        return answers

    async def _ask(self, split: str, ask: Callable[[float], Awaitable[Any]]) -> Any:
        """Send a request, and repeat it until the server answers or the timeout is over.

        If the config enables health checks, then after a failure, first send a cheap request until the server answers.
        """
        attempt = current_attempt.get()
        evaluating = split != "train"
        end, attempts = time.monotonic() + self.config.timeout, 0
        pauses = retry.backoff(_PAUSE, _LONGEST_PAUSE)
        failure: Exception | None = None
        while True:
            if failure is not None:
                await asyncio.sleep(min(next(pauses), max(0.0, end - time.monotonic())))
                if time.monotonic() >= end:
                    raise PeerError(
                        f"The model server {self.config.base_url} did not answer within {self.config.timeout} s and "
                        f"{attempts} attempts. Last error: {failure}. Check the URL and the server."
                    ) from failure
                if self.config.health_check and not self.server_healthy and not await self._answers():
                    continue
            wait_start = time.monotonic()
            if attempt is not None:
                await attempt.gate.wait_open()
            async with self.eval_sem if evaluating else self.sem:
                attempts += 1
                began = time.monotonic()
                end += began - wait_start  # the time of pauses and of waiting for a free slot does not count
                try:
                    answer = await ask(max(1.0, end - began))
                except self._retryable as error:
                    failure = error
                else:
                    self._set_healthy(True)
                    (self.eval_request_timings if evaluating else self.request_timings).append(time.monotonic() - began)
                    (self.eval_attempts_list if evaluating else self.attempts_list).append(attempts)
                    if attempt is not None:
                        attempt.record_version(_oldest_version(answer))
                    return answer
            if not isinstance(failure, self._rate_limit_error):
                self._set_healthy(False, failure)
                self._failed_at = time.monotonic()

    async def _answers(self) -> bool:
        """Return True if the server answers a cheap request."""
        try:
            await self.openai.models.list(timeout=_PROBE_TIMEOUT)
        except self._retryable:
            return False
        except self._status_error:  # the server works, but it cannot list models
            return True
        self._set_healthy(True)
        return True

    async def _sample_with_completions(self, options: dict[str, Any], timeout: float) -> Samples:
        """Sample with `/v1/completions` and vLLM's fields `return_token_ids`, `token_ids` and `prompt_token_ids`."""
        options = _renamed(options)
        input_ids, prompt = options.pop("input_ids", None), options.pop("prompt", None)
        body = {"return_token_ids": True, "return_tokens_as_token_ids": True, **(options.pop("extra_body", None) or {})}
        answer = await self.openai.completions.create(
            model=self.config.model_name,
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
                    f"{self.config.base_url} answers without token ids and log-probabilities, which training needs. "
                    "Use `rlframe serve policy` or vLLM (0.10.2 or newer), or set server_type='sglang' for SGLang."
                )
            if len(ids) != len(listed):
                raise PeerError(
                    f"{self.config.base_url} returned {len(ids)} token ids but {len(listed)} log-probabilities."
                )
            tokens.append(list(ids))
            logprobs.append([float(value) for value in listed])
        if input_ids is None:
            input_ids = getattr(answer.choices[0], "prompt_token_ids", None)
            if input_ids is None:
                raise UsageError(
                    f"{self.config.base_url} does not return the tokens of a prompt. Give input_ids instead of text."
                )
        reasons = [choice.finish_reason or "stop" for choice in answer.choices]
        return Samples(list(input_ids), tokens, logprobs, reasons, _oldest_version(answer))

    async def _sample_with_sglang(self, options: dict[str, Any], timeout: float) -> Samples:
        """Sample with SGLang's `/generate`, which takes and returns token ids."""
        options = _renamed(options)
        input_ids = options.pop("input_ids", None)
        if input_ids is None:
            raise UsageError("SGLang does not return the tokens of a prompt. Give input_ids instead of text.")
        options.pop("prompt", None)
        if "max_tokens" in options:
            options["max_new_tokens"] = options.pop("max_tokens")
        root = self.openai.with_options(
            base_url=str(self.config.base_url).removesuffix("/").removesuffix("/v1"), timeout=timeout
        )
        body = {"input_ids": list(input_ids), "sampling_params": options, "return_logprob": True}
        answers: Any = await root.post("/generate", cast_to=object, body=body)
        infos = [answer["meta_info"] for answer in (answers if isinstance(answers, list) else [answers])]
        # One list for each answer. It contains (log-probability, id, text) for each token.
        sampled = [info["output_token_logprobs"] for info in infos]
        reasons = [info.get("finish_reason") or "stop" for info in infos]
        return Samples(
            prompt_tokens=list(input_ids),
            tokens=[[int(entry[1]) for entry in entries] for entries in sampled],
            logprobs=[[float(entry[0]) for entry in entries] for entries in sampled],
            finish_reasons=[reason["type"] if isinstance(reason, dict) else reason for reason in reasons],
            policy_version=None,
        )

    def _set_healthy(self, healthy: bool, failure: Exception | None = None) -> None:
        """Record whether the server answers. If this changes, write it to the log."""
        if healthy != self.server_healthy:
            if healthy:
                logger.info("The model server %s answers.", self.config.base_url)
            else:
                logger.info(
                    "The model server %s does not answer yet (%s). Retrying for up to %g s.",
                    self.config.base_url,
                    failure,
                    self.config.timeout,
                )
        self.server_healthy = healthy


@dataclasses.dataclass(frozen=True)
class Samples:
    """Completions of one prompt, as token ids."""

    prompt_tokens: list[int]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    finish_reasons: list[str]
    policy_version: int | None  # oldest version of the parameters among those that sampled the tokens


def merge_answers(answers: list[Any]) -> Any:
    """Merge the answers to the parts of a split request. Return the first answer, with all choices, numbered from 0."""
    first, *others = answers
    for other in others:
        first.choices.extend(other.choices)
    for index, choice in enumerate(first.choices):
        choice.index = index
    return first


def check_one_prompt(prompt: Any) -> None:
    """Raise `UsageError` if `prompt` is a list of several prompts: of texts, or of lists of token ids."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        raise UsageError(f"completion takes one prompt, got a list of {len(prompt)}. Call it once for each prompt.")


def options_with_derived_seed(options: dict[str, Any], start: int) -> dict[str, Any]:
    """Return the options for one part of a split request. `start` is the number of completions in the parts before it.

    Each part needs another seed, because a server returns the same completions for the same seed. The seed is not the
    given seed plus a small number, because vLLM uses consecutive seeds for the completions of one request.
    """
    body = options.get("extra_body") or {}
    seed = options.get("seed", body.get("seed"))
    if not isinstance(seed, int) or start == 0:
        return options
    (derived,) = np.random.SeedSequence([seed % 2**64, start]).generate_state(1, np.uint32)
    if options.get("seed") is not None:
        return {**options, "seed": int(derived)}
    return {**options, "extra_body": {**body, "seed": int(derived)}}


def _oldest_version(answer: Any) -> int | None:
    """Return the oldest parameter version that sampled a token of this answer or `Samples`; None if it has no versions.

    `rlframe serve policy` returns the version of each choice's last token. If the tokens of a choice have several
    versions, it returns all of them.
    """
    versions = [getattr(answer, "policy_version", None)]
    for choice in getattr(answer, "choices", ()):
        versions += [getattr(choice, "policy_version", None), *(getattr(choice, "policy_versions", None) or [])]
    return min((version for version in versions if version is not None), default=None)


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    """Rename `max_new_tokens` or `max_completion_tokens` to `max_tokens`, and drop `model`, which the config sets."""
    options = {name: value for name, value in options.items() if name != "model"}
    for name in ("max_new_tokens", "max_completion_tokens"):
        if name in options:
            options["max_tokens"] = options.pop(name)
    return options
