"""Completions with their tokens: what was sampled is kept as it was, through any number of turns."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Iterable
from typing import Any

from rlframe.errors import UsageError
from rlframe.language.environments.servers.server import APIServer
from rlframe.trajectories.client.groups import IGNORED

_NO_LOGPROB = 1.0  # by convention, where nothing was sampled


@dataclasses.dataclass
class SequenceNode:
    """A prompt and its completion, or all turns of a chat; the rows are equally long.

    Attributes:
        full_text: of all tokens; of a completion without the special token that ended it.
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


@dataclasses.dataclass
class _Kept:
    node: SequenceNode
    messages: list[Any] | None  # of a chat, with the last answer


class ManagedServer:
    """Answers as a server does, and keeps what was sampled in `get_state()["nodes"]`, in the order of the choices.

    A prompt that begins with the text of a node, or messages that begin with its messages, are its next turn: the
    node's tokens are sent as they are, only what follows is encoded, and the node takes the place of the earlier one.
    """

    def __init__(self, server: APIServer, tokenizer: Any) -> None:
        self.server = server
        self.tokenizer = tokenizer
        self._stops = getattr(tokenizer, "stop_token_ids", None) or (tokenizer.eos_token_id,)
        self._kept: list[_Kept] = []

    async def chat_completion(self, **kwargs: Any) -> Any:
        """As `openai.chat.completions.create`, without tools: the tokenizer's chat template makes the prompt."""
        from openai.types import chat

        if kwargs.pop("tools", None):
            raise UsageError("managed_server() knows no tools: write them into the prompt, and read the answer.")
        messages = list(kwargs.pop("messages"))
        earlier, added = self._next_turn(messages)
        texts, nodes = await self._sample(earlier, added, kwargs)
        for node in nodes:
            node.full_text = self.tokenizer.decode(node.tokens)
        answers = [{"role": "assistant", "content": text} for text in texts]
        self._keep(earlier, [_Kept(node, [*messages, answer]) for node, answer in zip(nodes, answers)])
        choices = [
            {"index": index, "finish_reason": node.metadata["finish_reason"], "message": answer}
            for index, (node, answer) in enumerate(zip(nodes, answers))
        ]
        return chat.ChatCompletion.model_validate({**self._header("chat.completion"), "choices": choices})

    async def completion(self, **kwargs: Any) -> Any:
        """As `openai.completions.create`, for one prompt."""
        from openai.types import Completion

        prompt = kwargs.pop("prompt")
        earlier = self._longest(
            kept for kept in self._kept if kept.messages is None and prompt.startswith(kept.node.full_text)
        )
        if earlier is None:
            added = self.tokenizer.encode(prompt, add_special_tokens=True)
        else:
            added = self.tokenizer.encode(prompt[len(earlier.node.full_text) :], add_special_tokens=False)
        texts, nodes = await self._sample(earlier, added, kwargs)
        for text, node in zip(texts, nodes):
            node.full_text = prompt + text
        self._keep(earlier, [_Kept(node, None) for node in nodes])
        choices = [
            {"index": index, "finish_reason": node.metadata["finish_reason"], "text": text, "logprobs": None}
            for index, (text, node) in enumerate(zip(texts, nodes))
        ]
        return Completion.model_validate({**self._header("text_completion"), "choices": choices})

    def get_state(self) -> dict[str, list[SequenceNode]]:
        """`nodes`: the sequences so far."""
        return {"nodes": [kept.node for kept in self._kept]}

    def reset(self) -> None:
        """Forgets the sequences so far."""
        self._kept.clear()

    async def _sample(
        self, earlier: _Kept | None, added: list[int], options: dict[str, Any]
    ) -> tuple[list[str], list[SequenceNode]]:
        """The completions' texts, and their sequences, whose text is still to be said."""
        known = SequenceNode("", [], [], []) if earlier is None else earlier.node
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

    def _next_turn(self, messages: list[Any]) -> tuple[_Kept | None, list[int]]:
        """What a chat goes on from, and the tokens that come in between, or those of the whole chat."""
        template, answered = self.tokenizer.apply_chat_template, bool(messages) and messages[-1]["role"] == "assistant"
        whole = list(template(messages, add_generation_prompt=not answered))
        earlier = self._longest(kept for kept in self._kept if _begins(messages, kept.messages))
        if earlier is None or earlier.messages is None:
            return None, whole
        turns = len(earlier.messages)
        so_far = list(template(messages[:turns], add_generation_prompt=False))
        if whole[: len(so_far)] != so_far:  # a template that leaves out of earlier turns what they thought, say
            return None, whole
        opened = len(template(messages[: turns - 1], add_generation_prompt=True))
        ends = [position for position in range(opened, len(so_far)) if so_far[position] in self._stops]
        closing = so_far[ends[-1] :] if ends else []
        if earlier.node.tokens[-1] in self._stops:
            closing = closing[1:]  # the model has ended its turn itself
        return earlier, closing + whole[len(so_far) :]

    def _longest(self, candidates: Iterable[_Kept]) -> _Kept | None:
        return max(candidates, key=lambda kept: len(kept.node.tokens), default=None)

    def _keep(self, earlier: _Kept | None, kept: list[_Kept]) -> None:
        """In the place of what they go on from, where that is still there."""
        places = [index for index, one in enumerate(self._kept) if one is earlier]
        at = places[0] if places else len(self._kept)
        self._kept[at : at + len(places)] = kept

    def _header(self, kind: str) -> dict[str, Any]:
        return {
            "id": uuid.uuid4().hex,
            "object": kind,
            "created": int(time.time()),
            "model": self.server.config.model_name,
        }


def _begins(messages: list[Any], earlier: list[Any] | None) -> bool:
    """Whether a chat goes on from an earlier one. Environments may strip what the model said."""
    return (
        earlier is not None
        and len(earlier) < len(messages)
        and all(
            one["role"] == other["role"] and _plain(one["content"]) == _plain(other["content"])
            for one, other in zip(messages, earlier)
        )
    )


def _plain(content: Any) -> Any:
    return content.strip() if isinstance(content, str) else content
