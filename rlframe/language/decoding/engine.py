"""The decode engine, which answers requests by continuous batching (Yu et al. 2022, Orca).

The engine has a fixed number of slots. A slot holds one request, and has its part of the cache of keys and values. The
engine repeats three steps: move requests from a bounded queue into free slots; sample a few tokens for all slots in one
jitted call; deliver the tokens.

The next call after an update uses the new parameters, and running requests continue. So an answer can contain tokens
from several versions of the parameters. Every answer lists the version of each token. Cached keys and values are not
recomputed, as in PipelineRL (Piché et al. 2025).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlframe.errors import PeerError, RlframeError, UnavailableError, UsageError
from rlframe.interprocess.heartbeat import COMPUTING
from rlframe.language.decoding.sampling import Sampled, SamplingParams, TopTokens, check_prompt, power_of_two, row_key
from rlframe.language.decoding.slots import Answer, DecodeRequest, EngineConfig, Handle, OnTokens, Slots
from rlframe.language.model.config import ModelConfig
from rlframe.shutdown import Closeable
from rlframe.types import Params

CLOSE_TIMEOUT = 60.0  # seconds


class DecodeEngine(Closeable):
    """A thread that answers requests of any number of other threads. It is a context manager; `close` ends the thread.

    If the engine fails, it closes, and all pending requests fail with its error.

    Args:
        model_config: Architecture of the model.
        params: Parameters of the model. The engine copies them.
        engine_config: Sizes of the engine.
        version: Version of the parameters.
        seed: The engine uses it to draw a seed for each request that has none.

    Raises:
        UsageError: `EngineConfig.length` is more than the model's max_position_embeddings.

    Attributes:
        closed: Reason why the engine is closed. Empty while it is open.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        params: Params,
        engine_config: EngineConfig = EngineConfig(),  # noqa: B008  frozen
        *,
        version: int = 0,
        seed: int = 0,
    ) -> None:
        self.model_config, self.config = model_config, engine_config
        self.length = engine_config.length or model_config.max_position_embeddings
        if self.length > model_config.max_position_embeddings:
            raise UsageError(
                f"EngineConfig.length is {self.length}, more than the model's max_position_embeddings of "
                f"{model_config.max_position_embeddings}."
            )
        self._slots = Slots(model_config, engine_config, self.length)
        self._params = version, _copy(params, model_config)
        self._seeds = np.random.default_rng(seed)
        self._changed = threading.Condition()  # guards the attributes below
        self._waiting: collections.deque[Handle] = collections.deque()
        self.closed = ""
        self._running: dict[int, Handle] = {}  # number of the slot -> request in this slot
        self._counts = {"requests": 0, "tokens": 0, "prompt_tokens": 0, "calls": 0}
        self._thread = threading.Thread(target=self._run, name="decode engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  frozen
        on_tokens: OnTokens | None = None,
    ) -> Handle:
        """Submit one request for a completion.

        Args:
            prompt: Token ids, at least one.
            sampling: Sampling options. The same seed, prompt and parameters give the same answer. Other requests do not
                affect it, with one exception: rounding depends on the size of the batch, and can decide between two
                almost equally likely tokens.
            on_tokens: Called with each new piece of the answer, in the engine's thread. It must not block.

        Raises:
            UsageError: The prompt and the answer are too long, or there are too many stop tokens.
            UnavailableError: The queue is full, or the engine is closed.
        """
        return self.submit_many([prompt], sampling, None if on_tokens is None else [on_tokens])[0]

    def submit_many(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  frozen
        on_tokens: Sequence[OnTokens] | None = None,
    ) -> list[Handle]:
        """Submit several requests, as `submit` does. If one of them cannot be accepted, all are refused.

        The model reads equal prompts only once. Request i uses stream i of the seed's random numbers. `submit` uses
        stream 0.
        """
        if len(sampling.stop_tokens) > self.config.max_stop_tokens:
            raise UsageError(
                f"There are {len(sampling.stop_tokens)} stop_tokens; EngineConfig.max_stop_tokens is "
                f"{self.config.max_stop_tokens}."
            )
        for prompt in prompts:
            least = 1 if sampling.max_tokens is None else sampling.max_tokens
            check_prompt(prompt, least, self.model_config.vocab_size, self.length)
        with self._changed:
            seed = int(self._seeds.integers(2**63)) if sampling.seed is None else sampling.seed
        handles = []
        for i, prompt in enumerate(prompts):
            max_tokens = self.length - len(prompt) if sampling.max_tokens is None else sampling.max_tokens
            request = DecodeRequest(tuple(prompt), sampling, max_tokens, row_key(seed, i))
            handles.append(Handle(request, None if on_tokens is None else on_tokens[i]))
        with self._changed:
            if self.closed:
                raise UnavailableError(self.closed)
            if len(self._waiting) + len(handles) > self.config.max_waiting:
                raise UnavailableError(
                    f"{len(self._waiting)} requests wait for the decode engine; at most {self.config.max_waiting} "
                    f"may wait, so {len(handles)} more are refused. Retry later."
                )
            self._waiting += handles
            self._counts["requests"] += len(handles)
            self._changed.notify_all()
        for handle in handles:
            handle.future.add_done_callback(functools.partial(self._remove_cancelled, handle))
        return handles

    def set_params(self, version: int, params: Params) -> None:
        """Copy `params`, and use the copy in all later calls. Running requests continue with the new parameters.

        Raises:
            UsageError: The shapes differ from the model's shapes, or `version` is lower than the current version.
        """
        expected, got = (jax.tree.map(jnp.shape, tree) for tree in (self._params[1], params))
        if got != expected:
            raise UsageError(f"The parameters of version {version} are not the model's: {_difference(got, expected)}.")
        copied = jax.block_until_ready(_copy(params, self.model_config))
        with self._changed:
            if version < self.version:
                raise UsageError(
                    f"The decode engine has version {self.version} already, but got the older version {version}."
                )
            self._params = version, copied

    @property
    def version(self) -> int:
        """Version of the parameters that the next call uses."""
        return self._params[0]

    def stats(self) -> dict[str, int]:
        """Return the totals requests, tokens, prompt_tokens and calls, and the current version, running and waiting."""
        with self._changed:
            return {
                **self._counts,
                "version": self.version,
                "running": len(self._running),
                "waiting": len(self._waiting),
            }

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """End the engine. Waiting and running requests fail with `UnavailableError`. Later calls do nothing more.

        Raises:
            PeerError: The current jitted call did not end within `timeout` seconds. JAX may still compile it.
        """
        self._fail(UnavailableError("The decode engine was closed."))
        if threading.current_thread() is self._thread:
            return  # `on_tokens` called `close`; a thread cannot join itself
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise PeerError(f"The decode engine's thread did not end within {timeout:g} s.")

    def _run(self) -> None:
        try:
            while self._wait():
                with COMPUTING:
                    self._fill()
                    self._decode()
        except Exception as error:
            failure = UnavailableError(f"The decode engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail(failure)

    def _wait(self) -> bool:
        """Wait for a request. Return False if the engine is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._waiting or self._running)
            return not self.closed

    def _fill(self) -> None:
        """Move requests from the queue into free slots."""
        with self._changed:
            self._running = {slot: handle for slot, handle in self._running.items() if not handle.done}
            free = [slot for slot in range(self.config.slots) if slot not in self._running]
            taken = [(slot, self._waiting.popleft()) for slot in free[: len(self._waiting)]]
            self._running.update(taken)
        for group in self._groups(taken):
            version, params = self._params
            requests = [handle.request for _, handle in group]
            sampled, scores = self._slots.fill(params, [slot for slot, _ in group], requests)
            for (_, handle), of_prompt in zip(group, scores):
                handle.prompt_scores = of_prompt and of_prompt._replace(version=version)
            self._counts["prompt_tokens"] += sum(len(handle.request.prompt) for _, handle in group)
            self._deliver(group, sampled, version)

    def _groups(self, taken: list[tuple[int, Handle]]) -> Iterator[list[tuple[int, Handle]]]:
        """Yield a list of (slot, handle) for each prefill call.

        All prompts of a list have the same padded length (bucket). At most `Slots.batch` of them differ.
        """
        buckets = collections.defaultdict(list)
        for slot, handle in taken:
            buckets[self._slots.bucket(handle.request.prompt)].append((slot, handle))
        for bucket, members in buckets.items():
            group: list[tuple[int, Handle]] = []
            prompts: set[tuple[int, ...]] = set()
            for slot, handle in members:
                if handle.request.prompt not in prompts and len(prompts) == self._slots.batch(bucket):
                    yield group
                    group, prompts = [], set()
                group.append((slot, handle))
                prompts.add(handle.request.prompt)
            yield group

    def _decode(self) -> None:
        running = list(self._running.items())
        if not running:
            return
        longest = max(len(handle.request.prompt) + handle.sampled for _, handle in running)
        version, params = self._params
        sampled = self._slots.decode(params, {slot: handle.request for slot, handle in running}, longest)
        self._deliver(running, sampled, version)

    def _deliver(self, rows: list[tuple[int, Handle]], sampled: Sampled, version: int) -> None:
        """Append each column of `sampled` to the answer of its request, and free the slots of completed requests."""
        counts = (sampled.tokens >= 0).sum(axis=0)
        self._counts["calls"] += 1
        self._counts["tokens"] += int(counts.sum())
        columns = zip(rows, sampled.tokens.T.tolist(), sampled.log_probs.T.tolist(), counts.tolist())
        for i, ((slot, handle), tokens, log_probs, count) in enumerate(columns):
            if not all(map(math.isfinite, log_probs[:count])):
                handle.fail(UnavailableError(f"The parameters of version {version} give logits that are not finite."))
            ranked = TopTokens(*(array[:count, i] for array in sampled.ranked))
            if handle.add(tokens[:count], log_probs[:count], version, ranked):
                with self._changed:
                    del self._running[slot]

    def _remove_cancelled(self, handle: Handle, _: object) -> None:
        """Remove a request from the queue if it was cancelled."""
        if handle.future.cancelled():
            with (
                self._changed,
                contextlib.suppress(ValueError),
            ):  # a running request is not in the queue; `_fill` frees its slot
                self._waiting.remove(handle)

    def _fail(self, error: RlframeError) -> None:
        """Close the engine, and fail all pending requests with this error."""
        with self._changed:
            self.closed = self.closed or str(error)
            left = [*self._waiting, *self._running.values()]
            self._waiting.clear()
            self._running.clear()
            self._changed.notify_all()
        for handle in left:
            handle.fail(error)


def generate(
    params: Params,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    seed: int,
    sampling: SamplingParams,
) -> list[Answer]:
    """Answer all prompts with a temporary `DecodeEngine`.

    Args:
        params, config: The model.
        prompts: Token ids, at least one for each prompt.
        seed: Seed of the answers. `sampling.seed` is ignored.
        sampling: Sampling options.

    Raises:
        UsageError: A prompt is empty or too long.
    """
    if not prompts:
        return []
    stops, sampling = max(1, len(sampling.stop_tokens)), dataclasses.replace(sampling, seed=seed)
    slots = min(power_of_two(len(prompts)), EngineConfig.slots)
    sizes = EngineConfig(slots=slots, max_waiting=len(prompts), max_stop_tokens=stops)
    with DecodeEngine(config, params, sizes) as engine:
        return [handle.result() for handle in engine.submit_many(prompts, sampling)]


def _copy(params: Params, config: ModelConfig) -> Params:
    # Always copy, because the learner can donate its arrays to a jitted call, which deletes them.
    return jax.tree.map(lambda leaf: jnp.array(leaf, config.array_dtype), params)


def _difference(new: Any, old: Any) -> str:
    new, old = (dict(jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_shape)) for tree in (new, old))
    for path in [*old, *new]:
        if new.get(path) != old.get(path):
            name = jax.tree_util.keystr(path)
            return f"{name} has the shape {new.get(path, 'none')}, expected {old.get(path, 'none')}"
    return "their containers differ"


def _is_shape(tree: Any) -> bool:
    return isinstance(tree, tuple) and all(isinstance(size, int) for size in tree)
