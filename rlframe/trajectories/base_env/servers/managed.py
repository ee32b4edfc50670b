"""Completions with their tokens: what was sampled is kept as it was, through any number of turns."""

from __future__ import annotations

import dataclasses
import time
import uuid
from typing import Any

from rlframe.errors import UsageError
from rlframe.trajectories.base_env.servers.server import APIServer
from rlframe.trajectories.groups import IGNORED

_NO_LOGPROB = 1.0  # by convention, where nothing was sampled


@dataclasses.dataclass
class SequenceNode:
    """A prompt and its completion, or all turns of a chat; the rows are equally long.

    Attributes:
        full_text: without the special token that ended the last turn.
        tokens: as the model had them.
        masked_tokens: -100 where the model did not write them.
        logprobs: 1.0 where the model did not write them.
        metadata: `finish_reason` of the last turn: "stop" or "length".
    """

    full_text: str
    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


class ManagedServer:
    """Answers as a server does, and keeps what was sampled in `get_state()["nodes"]`, in the order of the choices.

    A prompt that begins with the text of a node is its next turn: the node's tokens are sent as they are, only what
    follows is encoded, and the node takes the place of the earlier one.
    """

    def __init__(self, server: APIServer, tokenizer: Any) -> None:
        self.server = server
        self.tokenizer = tokenizer
        self._nodes: list[SequenceNode] = []

    async def chat_completion(self, **kwargs: Any) -> Any:
        """As `openai.chat.completions.create`, without tools: the tokenizer's chat template makes the prompt."""
        from openai.types import chat

        if kwargs.pop("tools", None):
            raise UsageError("managed_server() knows no tools: write them into the prompt, and read the answer.")
        messages = list(kwargs.pop("messages"))
        prompt = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not messages or messages[-1]["role"] != "assistant"
        )
        texts, reasons = await self._sample(prompt, kwargs, special=False)
        choices = [
            {"index": index, "finish_reason": reason, "message": {"role": "assistant", "content": text}}
            for index, (text, reason) in enumerate(zip(texts, reasons))
        ]
        return chat.ChatCompletion.model_validate({**self._header("chat.completion"), "choices": choices})

    async def completion(self, **kwargs: Any) -> Any:
        """As `openai.completions.create`, for one prompt."""
        from openai.types import Completion

        texts, reasons = await self._sample(kwargs.pop("prompt"), kwargs, special=True)
        choices = [
            {"index": index, "finish_reason": reason, "text": text, "logprobs": None}
            for index, (text, reason) in enumerate(zip(texts, reasons))
        ]
        return Completion.model_validate({**self._header("text_completion"), "choices": choices})

    def get_state(self) -> dict[str, list[SequenceNode]]:
        """`nodes`: the sequences so far."""
        return {"nodes": list(self._nodes)}

    def reset(self) -> None:
        """Forgets the sequences so far."""
        self._nodes.clear()

    async def _sample(self, prompt: str, options: dict[str, Any], special: bool) -> tuple[list[str], list[str]]:
        """The completions' texts, and why each ended. `special`: a first prompt is encoded with a BOS token."""
        earlier = self._continued(prompt)
        if earlier is None:
            known = SequenceNode("", [], [], [])
            added = self.tokenizer.encode(prompt, add_special_tokens=special)
        else:
            known = earlier
            added = self.tokenizer.encode(prompt[len(earlier.full_text) :], add_special_tokens=False)
            if added and added[0] == known.tokens[-1] == self.tokenizer.eos_token_id:
                added = added[1:]  # the template ends a turn that the model has ended itself
        input_ids = known.tokens + list(added)
        _, outputs, logprobs, reasons = await self.server.tokens_and_logprobs_completion(
            **{**options, "input_ids": input_ids}
        )
        texts = [self.tokenizer.decode(output, skip_special_tokens=True) for output in outputs]
        nodes = [
            SequenceNode(
                full_text=prompt + text,
                tokens=input_ids + output,
                masked_tokens=known.masked_tokens + [IGNORED] * len(added) + output,
                logprobs=known.logprobs + [_NO_LOGPROB] * len(added) + logprob,
                metadata={"finish_reason": reason},
            )
            for text, output, logprob, reason in zip(texts, outputs, logprobs, reasons)
        ]
        if earlier is None:
            self._nodes += nodes
        else:
            at = next(index for index, node in enumerate(self._nodes) if node is earlier)
            self._nodes[at : at + 1] = nodes
        return texts, reasons

    def _continued(self, prompt: str) -> SequenceNode | None:
        """The longest sequence that the prompt begins with."""
        begun = [node for node in self._nodes if prompt.startswith(node.full_text)]
        return max(begun, key=lambda node: len(node.full_text), default=None)

    def _header(self, kind: str) -> dict[str, Any]:
        return {
            "id": uuid.uuid4().hex,
            "object": kind,
            "created": int(time.time()),
            "model": self.server.config.model_name,
        }
