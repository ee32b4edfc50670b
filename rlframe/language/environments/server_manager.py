"""`ServerManager`: all model servers of an environment. `ManagedServer`: records the tokens of multi-turn chats."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import socket
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from rlframe.errors import UsageError
from rlframe.language.environments.config import APIServerConfig, ReasoningConfig, ServerBaseline
from rlframe.language.environments.model_server import (
    APIServer,
    check_one_prompt,
    merge_answers,
    options_with_derived_seed,
)
from rlframe.language.model.published_tokenizer import plain_messages
from rlframe.language.model.tokenizers import load_tokenizer
from rlframe.trajectories.messages import IGNORED

_POLICY_PORT, _POLICY_MODEL = 8001, "policy"  # default port and model name of `rlframe serve policy`
_LOCAL_PORTS = range(9004, 9008)  # `atroposlib`'s ports for ServerBaseline
_SLURM_PORT = 9000  # `atroposlib`'s first port on each node of a Slurm job
_GPUS_PER_NODE = 8
_NO_LOGPROB = 1.0  # `atroposlib`'s placeholder for tokens that were not sampled


@dataclasses.dataclass
class SequenceNode:
    """A sequence: a prompt with its completion, or all turns of a chat. The three lists of tokens have equal lengths.

    Attributes:
        full_text: Text of all tokens. For a completion, the special token that ended it is omitted.
        tokens: Token ids of the model.
        masked_tokens: The token ids, with -100 for tokens that the model did not sample.
        logprobs: Log-probabilities, with 1.0 for tokens that the model did not sample.
        metadata: `finish_reason` of the last turn: "stop" or "length".
        messages: Messages of a chat, including the last answer. None for a completion.
    """

    full_text: str
    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    messages: list[Any] | None = None


class ManagedServer:
    """Sends requests to a model server, and records the sampled sequences, each as a `SequenceNode`.

    `get_state()["nodes"]` contains the nodes in the order of the choices.

    If a prompt begins with the text of a node, or a chat with a node's messages, it continues this node: the tokens of
    the node are sent unchanged, only the new text is encoded, and a new node replaces the old node.
    """

    def __init__(self, server: APIServer, tokenizer: Any) -> None:
        self.server = server
        self.tokenizer = tokenizer
        self._stops = getattr(tokenizer, "stop_token_ids", None) or (tokenizer.eos_token_id,)
        self._nodes: list[SequenceNode] = []

    async def chat_completion(self, **kwargs: Any) -> Any:
        """Complete a chat, with the arguments of `openai.chat.completions.create`.

        The tokenizer's chat template converts the messages to a prompt. Tools are not supported.
        """
        from openai.types import chat

        if kwargs.pop("tools", None):
            raise UsageError(
                "managed_server() does not support tools. Write them into the prompt, and parse the answer."
            )
        messages = plain_messages(kwargs.pop("messages"))
        earlier, added = self._next_turn(messages)
        texts, nodes = await self._sample(earlier, added, kwargs)
        answers = [{"role": "assistant", "content": text} for text in texts]
        for node, answer in zip(nodes, answers):
            node.full_text, node.messages = self.tokenizer.decode(node.tokens), [*messages, answer]
        self._replace(earlier, nodes)
        choices = [{"message": answer} for answer in answers]
        return chat.ChatCompletion.model_validate(self._answer("chat.completion", nodes, choices))

    async def completion(self, **kwargs: Any) -> Any:
        """Complete one prompt, with the arguments of `openai.completions.create`."""
        from openai.types import Completion

        prompt = kwargs.pop("prompt")
        check_one_prompt(prompt)
        earlier = _longest(node for node in self._nodes if node.messages is None and prompt.startswith(node.full_text))
        if earlier is None:
            added = self.tokenizer.encode(prompt, add_special_tokens=True)
        else:
            added = self.tokenizer.encode(prompt[len(earlier.full_text) :], add_special_tokens=False)
        texts, nodes = await self._sample(earlier, added, kwargs)
        for text, node in zip(texts, nodes):
            node.full_text = prompt + text
        self._replace(earlier, nodes)
        choices = [{"text": text, "logprobs": None} for text in texts]
        return Completion.model_validate(self._answer("text_completion", nodes, choices))

    def get_state(self) -> dict[str, list[SequenceNode]]:
        """Return a dict with the recorded sequences in `nodes`."""
        return {"nodes": list(self._nodes)}

    def reset(self) -> None:
        """Delete the recorded sequences."""
        self._nodes.clear()

    async def _sample(
        self, earlier: SequenceNode | None, added: list[int], options: dict[str, Any]
    ) -> tuple[list[str], list[SequenceNode]]:
        """Return (texts of the completions, their nodes). The caller must set each node's `full_text`."""
        known = earlier or SequenceNode("", [], [], [])
        input_ids = known.tokens + list(added)
        _, outputs, logprobs, reasons = await self.server.tokens_and_logprobs_completion(
            **{**options, "input_ids": input_ids}
        )
        nodes = [
            SequenceNode(
                full_text="",
                tokens=input_ids + output,
                masked_tokens=known.masked_tokens + [IGNORED] * len(added) + output,
                logprobs=known.logprobs + [_NO_LOGPROB] * len(added) + logprob,
                metadata={"finish_reason": reason},
            )
            for output, logprob, reason in zip(outputs, logprobs, reasons)
        ]
        return [self.tokenizer.decode(output, skip_special_tokens=True) for output in outputs], nodes

    def _next_turn(self, messages: list[Any]) -> tuple[SequenceNode | None, list[int]]:
        """Return (node that the chat continues, tokens to append to it), or (None, tokens of the whole chat)."""
        template, answered = self.tokenizer.apply_chat_template, bool(messages) and messages[-1]["role"] == "assistant"
        whole = list(template(messages, add_generation_prompt=not answered))
        earlier = _longest(node for node in self._nodes if _continues(messages, node.messages))
        if earlier is None or earlier.messages is None:
            return None, whole
        turns = len(earlier.messages)
        so_far = list(template(messages[:turns], add_generation_prompt=False))
        if whole[: len(so_far)] != so_far:  # the template changes earlier turns; for example, it removes their thoughts
            return None, whole
        opened = len(template(messages[: turns - 1], add_generation_prompt=True))
        ends = [position for position in range(opened, len(so_far)) if so_far[position] in self._stops]
        closing = so_far[ends[-1] :] if ends else []
        if earlier.tokens[-1] in self._stops:
            closing = closing[1:]  # the model has sampled the first closing token, so `earlier` contains it
        return earlier, closing + whole[len(so_far) :]

    def _replace(self, earlier: SequenceNode | None, nodes: list[SequenceNode]) -> None:
        """Replace the node `earlier` by the new nodes. If `earlier` is no longer recorded, append the new nodes."""
        indices = [index for index, node in enumerate(self._nodes) if node is earlier]
        at = indices[0] if indices else len(self._nodes)
        self._nodes[at : at + len(indices)] = nodes

    def _answer(self, kind: str, nodes: list[SequenceNode], choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": uuid.uuid4().hex,
            "object": kind,
            "created": int(time.time()),
            "model": self.server.config.model_name,
            "choices": [
                {"index": index, "finish_reason": node.metadata["finish_reason"], **choice}
                for index, (node, choice) in enumerate(zip(nodes, choices))
            ],
        }


def _longest(nodes: Iterable[SequenceNode]) -> SequenceNode | None:
    return max(nodes, key=lambda node: len(node.tokens), default=None)


def _continues(messages: list[Any], earlier: list[Any] | None) -> bool:
    """Return True if a chat continues an earlier chat.

    White space around contents is ignored, because an environment may have stripped it.
    """
    return (
        earlier is not None
        and len(earlier) < len(messages)
        and all(
            one["role"] == other["role"]
            and _plain(one.get("content")) == _plain(other.get("content"))
            and (one.get("tool_calls") or None) == (other.get("tool_calls") or None)
            for one, other in zip(messages, earlier)
        )
    )


def _plain(content: Any) -> Any:
    return content.strip() if isinstance(content, str) else content


class ServerManager:
    """A client of all model servers. It sends each request to the healthy server with the most free slots.

    Args:
        configs: Configs of the servers. A ServerBaseline means the servers of this machine.
        slurm: True uses the nodes of the Slurm job, if this process runs in one.
        testing: Must be False. Made-up answers are not supported.
        server_class: APIServer, or a subclass.
        reasoning_config: Options that request reasoning.
        max_n_completions: Maximum number of completions in one request. Requests with a larger n are split.
    """

    def __init__(
        self,
        configs: ServerBaseline | Sequence[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
        server_class: type[APIServer] = APIServer,
        reasoning_config: ReasoningConfig | None = None,
        max_n_completions: int = 8,
    ) -> None:
        if testing:
            raise UsageError("testing=True (made-up answers) is not supported. Configure a model server.")
        self.max_n_completions = max_n_completions
        self.servers = [server_class(config, reasoning_config) for config in resolve_servers(configs, slurm)]

    async def chat_completion(self, **kwargs: Any) -> Any:
        """See `APIServer.chat_completion`."""
        return merge_answers(await self._split_request("chat_completion", kwargs))

    async def completion(self, **kwargs: Any) -> Any:
        """See `APIServer.completion`."""
        return merge_answers(await self._split_request("completion", kwargs))

    async def tokens_and_logprobs_completion(
        self, **kwargs: Any
    ) -> tuple[list[int], list[list[int]], list[list[float]], list[str]]:
        """See `APIServer.tokens_and_logprobs_completion`."""
        answers = await self._split_request("tokens_and_logprobs_completion", kwargs)
        tokens, logprobs, reasons = (list(itertools.chain(*parts)) for parts in list(zip(*answers))[1:])
        return answers[0][0], tokens, logprobs, reasons

    @contextlib.asynccontextmanager
    async def dedicated_server(self) -> AsyncIterator[APIServer]:
        """Yield one server for all turns of a trajectory. Its cache then contains the earlier turns."""
        yield self._choose_server("train")

    @contextlib.asynccontextmanager
    async def managed_server(self, tokenizer: Any = None) -> AsyncIterator[ManagedServer]:
        """Yield a `ManagedServer`, which records the tokens of all requests in the `async with` block."""
        server = self._choose_server("train")
        if tokenizer is None:
            named = server.config.tokenizer_name
            tokenizer = load_tokenizer(server.config.model_name if named == "none" else named)
        yield ManagedServer(server, tokenizer)

    async def update_weight(self, weight: float) -> None:
        """See `APIServer.update_weight`."""
        for server in self.servers:
            await server.update_weight(weight)

    async def close(self) -> None:
        for server in self.servers:
            await server.close()

    def _choose_server(self, split: str) -> APIServer:
        def fitness(server: APIServer) -> tuple[bool, float]:
            return server.usable, (server.sem if split == "train" else server.eval_sem).available_tokens

        return max(self.servers, key=fitness)

    async def _split_request(self, method: str, kwargs: dict[str, Any]) -> list[Any]:
        """Split a request for n completions into smaller requests, and return their answers."""
        n, split = kwargs.pop("n", None) or 1, kwargs.get("split", "train")
        full, rest = divmod(n, self.max_n_completions)
        counts = [self.max_n_completions] * full + [rest] * (rest > 0)
        chosen = [self._choose_server(split) for _ in counts]
        starts = range(0, n, self.max_n_completions)
        calls = [
            getattr(server, method)(**options_with_derived_seed(kwargs, start), n=count)
            for server, start, count in zip(chosen, starts, counts)
        ]
        return list(await asyncio.gather(*calls))


def resolve_servers(configs: ServerBaseline | Sequence[APIServerConfig], slurm: bool) -> list[APIServerConfig]:
    """Return one config for each server.

    In a Slurm job with several nodes, the first NUM_TRAINING_NODES nodes train. Each further node has 8 GPUs, and one
    model server for each INFER_TP of them, at ports 9000, 9001, ... This is the same in `atroposlib`.
    """
    listed: list[Any] = [configs] if isinstance(configs, ServerBaseline) else list(configs)
    if not listed:
        raise UsageError("There is no model server: the list of server configs is empty.")
    first = listed[0]
    if slurm and len(nodes := _slurm_nodes()) > 1:
        training, each = (os.environ.get(name, "1") for name in ("NUM_TRAINING_NODES", "INFER_TP"))
        is_valid = training.isdecimal() and each.isdecimal() and 0 < int(each) <= _GPUS_PER_NODE
        if not is_valid or int(training) >= len(nodes):
            raise UsageError(
                f"The Slurm job has {len(nodes)} nodes, NUM_TRAINING_NODES={training} and INFER_TP={each}, so there is "
                f"no node for inference. NUM_TRAINING_NODES must be below {len(nodes)}, and INFER_TP between 1 and "
                f"{_GPUS_PER_NODE}."
            )
        ports = range(_SLURM_PORT, _SLURM_PORT + _GPUS_PER_NODE // int(each))
        return [_at(first, f"http://{node}:{port}/v1") for node in nodes[int(training) :] for port in ports]
    if not isinstance(first, APIServerConfig):
        if _is_listening(_POLICY_PORT):
            named = first.model_name if "model_name" in first.model_fields_set else _POLICY_MODEL
            return [_at(first.model_copy(update={"model_name": named}), f"http://localhost:{_POLICY_PORT}/v1")]
        return [_at(first, f"http://localhost:{port}/v1") for port in _LOCAL_PORTS]
    return listed


def _at(config: ServerBaseline, url: str) -> APIServerConfig:
    return APIServerConfig(**{"api_key": "x", **config.model_dump(), "base_url": url})


def _is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("localhost", port), timeout=1.0):
        return True
    return False


def _slurm_nodes() -> list[str]:
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        return []
    listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=60)
    if listed.returncode:
        raise UsageError(f"`scontrol show hostnames {nodes}` failed: {listed.stderr.strip()}")
    return listed.stdout.split()
