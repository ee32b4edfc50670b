"""The endpoint `/generate`, which returns token ids, in the formats of vLLM and SGLang.

The vLLM format comes from `example_trainer/vllm_api_server.py` in NousResearch/atropos, and the SGLang format from
SGLang's server.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from rlframe.language.decoding.sampling import MAX_TOP_TOKENS
from rlframe.language.model.tokenizers import Tokenizer
from rlframe.language.server.errors import RefusedError
from rlframe.language.server.generation import AnswerPiece
from rlframe.language.server.requests import ParsedRequest, SamplingFields, StrictRequest, encode_prompts


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
