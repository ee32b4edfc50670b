"""Complete and streamed responses in OpenAI's formats, with additional fields of vLLM and rlframe, and the endpoint
`/generate`, which returns token ids in the formats of vLLM and SGLang.

The vLLM format comes from `example_trainer/vllm_api_server.py` in NousResearch/atropos, and the SGLang format from
SGLang's server.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from rlframe.language.decoding.sampling import MAX_TOP_TOKENS
from rlframe.language.model.tokenizers import Tokenizer
from rlframe.language.server.errors import RefusedError
from rlframe.language.server.generation import AnswerPiece, TextDecoder
from rlframe.language.server.requests import (
    ChatRequest,
    CompletionRequest,
    ParsedRequest,
    SamplingFields,
    StrictRequest,
    encode_prompts,
)


class Replies:
    """Makes the response to one request: one object, or several events.

    A choice has these additional fields: `policy_version` of its last token; `policy_versions` of all its tokens, if
    they differ; `stop_reason`; and, if requested, `token_ids` and `prompt_token_ids`. The response has the field
    `policy_version`: the newest version of all choices.
    """

    prefix = ""  # prefix of the response's id
    kinds = ("", "")  # value of the field `object`: in a complete response, in an event
    partial = ""  # prefix of a token's name if the token is a part of a character
    # arguments: piece; True if it is streamed; True if it is the first piece of its answer
    _content: Callable[[AnswerPiece, bool, bool], dict[str, Any]]
    _log_probs: Callable[[AnswerPiece], dict[str, Any]]

    def __init__(self, request: CompletionRequest | ChatRequest, parsed: ParsedRequest, tokenizer: Tokenizer) -> None:
        self._request, self._parsed, self._tokenizer = request, parsed, tokenizer
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": request.model}
        self._begun: set[int] = set()  # indices of the answers whose first piece was sent
        self._sampled, self._version = 0, -1

    def whole(self, pieces: list[AnswerPiece]) -> dict[str, Any]:
        """Return the complete response."""
        choices = [self._choice(piece, streamed=False) for piece in pieces]
        return {**self._frame(0), "choices": choices, "usage": self._usage()}

    def event(self, piece: AnswerPiece) -> dict[str, Any] | None:
        """Return the event for a piece, or None if the piece needs no event."""
        wanted = (
            piece.text or piece.finish_reason is not None or self._parsed.log_probs or self._request.return_token_ids
        )
        if not wanted:
            self._count(piece)
            return None
        choice = self._choice(piece, streamed=True)
        return {**self._frame(1), "choices": [choice], **({"usage": None} if self._request.include_usage else {})}

    def last_event(self) -> dict[str, Any] | None:
        """Return the final event, which contains the usage; None if the request does not ask for it."""
        return {**self._frame(1), "choices": [], "usage": self._usage()} if self._request.include_usage else None

    def _frame(self, kind: int) -> dict[str, Any]:
        return {**self._head, "object": self.kinds[kind], "policy_version": self._version}

    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self._parsed.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._sampled,
            "total_tokens": prompt + self._sampled,
        }

    def _count(self, piece: AnswerPiece) -> None:
        self._sampled += len(piece.tokens)
        self._version = max(self._version, -1 if piece.version is None else piece.version)

    def _choice(self, piece: AnswerPiece, streamed: bool) -> dict[str, Any]:
        self._count(piece)
        first = piece.index not in self._begun
        self._begun.add(piece.index)
        choice = {
            "index": piece.index,
            **self._content(piece, streamed, first),
            "logprobs": self._log_probs(piece) if self._parsed.log_probs else None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if piece.version is not None:
            choice["policy_version"] = piece.version
        if len(set(piece.versions)) > 1:
            choice["policy_versions"] = piece.versions
        if self._request.return_token_ids:
            choice["token_ids"] = piece.tokens
            if first:
                choice["prompt_token_ids"] = self._parsed.prompts[piece.index // self._parsed.fields.n]
        return choice

    def _prompt_log_probs(self, piece: AnswerPiece) -> list[Any]:
        """Return vLLM's prompt_logprobs: for each token of the prompt a dict whose keys are token ids.

        The first token has None.
        """
        assert piece.prompt_scores is not None
        prompt = self._parsed.prompts[piece.index // self._parsed.fields.n]
        positions = piece.prompt_scores.positions(prompt, self._request.prompt_logprobs or 0)
        return [
            None if position is None else {str(token): self._ranked(token, *position[token]) for token in position}
            for position in positions
        ]

    def _ranked(self, token: int, log_prob: float, rank: int) -> dict[str, Any]:
        return {"logprob": log_prob, "rank": rank, "decoded_token": self._tokenizer.decode([token])}

    def _name(self, token: int) -> str:
        """Return a token's name for log-probabilities: its text; escaped bytes if it is a part of a character."""
        if self._request.return_tokens_as_token_ids:
            return f"token_id:{token}"
        content = self._tokenizer.token_bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return self.partial + repr(content)[2:-1]


class CompletionReplies(Replies):
    """Responses of `/v1/completions`."""

    prefix = "cmpl"
    kinds = ("text_completion", "text_completion")
    partial = "bytes:"

    def _content(self, piece: AnswerPiece, streamed: bool, first: bool) -> dict[str, Any]:
        return {"text": self._parsed.texts[piece.index // self._parsed.fields.n] + piece.text if first else piece.text}

    def _choice(self, piece: AnswerPiece, streamed: bool) -> dict[str, Any]:
        choice = super()._choice(piece, streamed)
        if self._request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_log_probs(piece)
        return choice

    def _log_probs(self, piece: AnswerPiece) -> dict[str, Any]:
        assert isinstance(self._request, CompletionRequest)
        count, scores = self._request.top_tokens, piece.prompt_scores
        tokens, log_probs, top_tokens = piece.tokens, list[Any](piece.log_probs), list[Any](piece.top_tokens)
        text = self._parsed.texts[piece.index // self._parsed.fields.n]
        offsets = [len(text) + offset for offset in piece.offsets]
        if self._request.echo and scores is not None:
            prompt = self._parsed.prompts[piece.index // self._parsed.fields.n]
            tokens, offsets = prompt + tokens, self._offsets(prompt, text) + offsets
            log_probs = [None, *scores.log_probs, *log_probs]
            top_tokens = [None, *scores.top_tokens, *top_tokens]
        return {
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": log_probs,
            "top_logprobs": [*map(self._top, tokens, log_probs, top_tokens)] if count else None,
            "text_offset": offsets,
        }

    def _offsets(self, prompt: list[int], text: str) -> list[int]:
        """Return, for each token, the position in the prompt's text at which it starts."""
        for skips in (False, True):  # special tokens are in the text, or the tokenizer added them
            decoder = TextDecoder(self._tokenizer, skip_special_tokens=skips, with_offsets=True)
            if decoder.add(prompt, last=True)[0] == text:
                break
        return [min(offset, len(text)) for offset in decoder.offsets]

    def _top(self, token: int, log_prob: float, top_tokens: dict[int, float] | None) -> dict[str, float] | None:
        """Return the top tokens at one position, and the token at this position, with their log-probabilities."""
        if top_tokens is None:
            return None
        kept = dict([*top_tokens.items()][: self._request.top_tokens])  # type: ignore[union-attr]
        return {self._name(one): value for one, value in {**kept, token: log_prob}.items()}


class ChatReplies(Replies):
    """Responses of `/v1/chat/completions`."""

    prefix = "chatcmpl"
    kinds = ("chat.completion", "chat.completion.chunk")

    def whole(self, pieces: list[AnswerPiece]) -> dict[str, Any]:
        """See `Replies`."""
        answer = super().whole(pieces)
        if self._request.return_token_ids:
            answer["prompt_token_ids"] = self._parsed.prompts[0]
        if self._request.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_log_probs(pieces[0])
        return answer

    def _content(self, piece: AnswerPiece, streamed: bool, first: bool) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text}
        if not streamed:
            return {"message": {**message, "refusal": None}}
        return {"delta": message if first else {"content": piece.text}}

    def _log_probs(self, piece: AnswerPiece) -> dict[str, Any]:
        positions = piece.top_tokens or [{}] * len(piece.tokens)
        content = [
            {**self._entry(token, log_prob), "top_logprobs": [self._entry(*one) for one in top_tokens.items()]}
            for token, log_prob, top_tokens in zip(piece.tokens, piece.log_probs, positions)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, log_prob: float) -> dict[str, Any]:
        content = [*self._tokenizer.token_bytes(token)]
        return {"token": self._name(token), "logprob": log_prob, "bytes": content}


class VllmPrompt(BaseModel):
    """A prompt that is given as token ids."""

    model_config = ConfigDict(extra="forbid")
    prompt_token_ids: list[int]


class VllmRequest(SamplingFields):
    """The body of `/generate` in vLLM's format: one prompt, and the fields of vLLM's `SamplingParams`."""

    prompt: Union[str, VllmPrompt]
    max_tokens: int = Field(default=16, description="maximum tokens of each answer")
    stream: Literal[False] = False
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_TOP_TOKENS,
        description="return log-probabilities of the sampled tokens and of this number of top tokens",
    )
    prompt_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_TOP_TOKENS,
        description="return log-probabilities of the prompt's tokens and of this number of top tokens",
    )

    def parse(self, tokenizer: Tokenizer) -> ParsedRequest:
        """Encode the prompt as tokens, and check the options."""
        given = self.prompt if isinstance(self.prompt, str) else self.prompt.prompt_token_ids
        prompts = encode_prompts(given, tokenizer, "prompt")
        sampling = self.to_sampling_params(tokenizer, self.max_tokens, self.logprobs or 0, self.prompt_logprobs)
        return ParsedRequest(prompts, sampling, self, self.logprobs is not None)

    def reply(self, parsed: ParsedRequest, pieces: list[AnswerPiece], tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the response. Most of its fields are lists with one entry for each of the `n` answers."""
        (prompt,) = parsed.prompts
        answer: dict[str, Any] = {
            "text": [piece.text for piece in pieces],
            "prompt": self.prompt if isinstance(self.prompt, str) else tokenizer.decode(prompt),
            "finish_reasons": [piece.finish_reason for piece in pieces],
            "policy_versions": [piece.versions for piece in pieces],
        }
        if parsed.log_probs:
            answer["logprobs"] = [
                [*map(_listed, piece.tokens, piece.log_probs, piece.top_tokens or [{}] * len(piece.tokens))]
                for piece in pieces
            ]
            answer |= {"prompt_token_ids": prompt, "token_ids": [piece.tokens for piece in pieces]}
        if (scores := pieces[0].prompt_scores) is not None:
            positions = scores.positions(prompt, self.prompt_logprobs or 0)
            answer["prompt_logprobs"] = [
                None if position is None else {str(token): log_prob for token, (log_prob, _) in position.items()}
                for position in positions
            ]
        return answer


def _listed(token: int, log_prob: float, top_tokens: dict[int, float]) -> list[dict[str, float]]:
    """Return vLLM's entry for one position: a dict, token id -> log-probability. The sampled token is first."""
    return [{str(one): value for one, value in {token: log_prob, **top_tokens}.items()}]


class SglangSampling(SamplingFields):
    """The field `sampling_params` of SGLang's `/generate`."""

    max_new_tokens: int = Field(default=128, description="maximum tokens of each answer")


class SglangRequest(StrictRequest):
    """The body of `/generate` in SGLang's format: one prompt or a list, as text or as `input_ids`."""

    text: Union[str, list[str], None] = None
    input_ids: Union[list[int], list[list[int]], None] = None
    sampling_params: SglangSampling = Field(default_factory=SglangSampling)
    return_logprob: bool = Field(default=False, description="return output_token_logprobs: (log-probability, id, text)")
    stream: Literal[False] = False
    return_text_in_logprobs: bool = Field(
        default=False, description="return texts in output_token_logprobs, instead of null"
    )

    def parse(self, tokenizer: Tokenizer) -> ParsedRequest:
        """Encode the texts as tokens. Raise `RefusedError` if `text` and `input_ids` are both given or both missing."""
        if (self.text is None) == (self.input_ids is None):
            raise RefusedError("Give either text or input_ids, not both.", 400, param="input_ids")
        given, name = (self.text, "text") if self.input_ids is None else (self.input_ids, "input_ids")
        prompts, params = encode_prompts(given, tokenizer, name), self.sampling_params
        sampling = params.to_sampling_params(tokenizer, params.max_new_tokens)
        return ParsedRequest(prompts, sampling, params, self.return_logprob)

    def reply(self, parsed: ParsedRequest, pieces: list[AnswerPiece], tokenizer: Tokenizer) -> Any:
        """Return the response: an object, or a list if there are several answers."""
        several = isinstance(self.text if self.input_ids is None else self.input_ids[0], list) or parsed.fields.n > 1
        answers = [self._answer(parsed, piece, tokenizer) for piece in pieces]
        return answers if several else answers[0]

    def _answer(self, parsed: ParsedRequest, piece: AnswerPiece, tokenizer: Tokenizer) -> dict[str, Any]:
        reason: dict[str, Any] = {"type": piece.finish_reason}
        if piece.finish_reason == "length":
            reason["length"] = len(piece.tokens)
        else:
            reason["matched"] = piece.stop_reason
        info: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "finish_reason": reason,
            "prompt_tokens": len(parsed.prompts[piece.index // parsed.fields.n]),
            "completion_tokens": len(piece.tokens),
            "policy_versions": piece.versions,
        }
        if parsed.log_probs:
            info["output_token_logprobs"] = [
                (log_prob, token, tokenizer.decode([token]) if self.return_text_in_logprobs else None)
                for token, log_prob in zip(piece.tokens, piece.log_probs)
            ]
        return {"text": piece.text, "output_ids": piece.tokens, "meta_info": info}


def _request_format(body: Any) -> str:
    sglang = isinstance(body, dict) and not body.keys().isdisjoint(("input_ids", "text", "sampling_params"))
    return "sglang" if sglang else "vllm"


GenerateRequest = Annotated[
    Union[Annotated[VllmRequest, Tag("vllm")], Annotated[SglangRequest, Tag("sglang")]], Discriminator(_request_format)
]
