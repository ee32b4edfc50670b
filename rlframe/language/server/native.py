"""`/generate`, in the two dialects that environments ask for token ids in: vLLM's and SGLang's.

vLLM's is that of `example_trainer/vllm_api_server.py` of NousResearch/atropos, SGLang's its own.
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
    """A prompt as token ids."""

    model_config = ConfigDict(extra="forbid")
    prompt_token_ids: list[int]


class VllmRequest(SamplingFields):
    """`/generate` as vLLM has it: one prompt, and the fields of its `SamplingParams`."""

    prompt: Union[str, VllmPrompt]
    max_tokens: int = Field(default=16, description="of each answer")
    stream: Literal[False] = False
    logprobs: int | None = Field(
        default=None, ge=0, le=MAX_TOP_TOKENS, description="of the tokens that were sampled, and of so many top_tokens"
    )
    prompt_logprobs: int | None = Field(
        default=None, ge=0, le=MAX_TOP_TOKENS, description="of the prompt's tokens, and of so many top_tokens"
    )

    def asked(self, tokenizer: Tokenizer) -> ParsedRequest:
        """Return the request with texts as tokens."""
        given = self.prompt if isinstance(self.prompt, str) else self.prompt.prompt_token_ids
        prompts = encode_prompts(given, tokenizer, "prompt")
        sampling = self.sampled(tokenizer, self.max_tokens, self.logprobs or 0, self.prompt_logprobs)
        return ParsedRequest(prompts, sampling, self, [""], self.logprobs is not None)

    def reply(self, asked: ParsedRequest, pieces: list[AnswerPiece], tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the answer: lists with an entry for each of the `n` answers."""
        (prompt,) = asked.prompts
        answer: dict[str, Any] = {
            "text": [piece.text for piece in pieces],
            "prompt": self.prompt if isinstance(self.prompt, str) else tokenizer.decode(prompt),
            "finish_reasons": [piece.finish_reason for piece in pieces],
            "policy_versions": [piece.versions for piece in pieces],
        }
        if asked.log_probs:
            answer["logprobs"] = [
                [*map(_listed, piece.tokens, piece.log_probs, piece.top_tokens or [{}] * len(piece.tokens))]
                for piece in pieces
            ]
            answer |= {"prompt_token_ids": prompt, "token_ids": [piece.tokens for piece in pieces]}
        if (scores := pieces[0].prompt_scores) is not None:
            places = scores.places(prompt, self.prompt_logprobs or 0)
            answer["prompt_logprobs"] = [
                None if place is None else {str(token): log_prob for token, (log_prob, _) in place.items()}
                for place in places
            ]
        return answer


def _listed(token: int, log_prob: float, top_tokens: dict[int, float]) -> list[dict[str, float]]:
    """A place as vLLM has it: by token id, the one that was sampled first."""
    return [{str(one): value for one, value in {token: log_prob, **top_tokens}.items()}]


class SglangSampling(SamplingFields):
    """`sampling_params` of SGLang's `/generate`."""

    max_new_tokens: int = Field(default=128, description="of each answer")


class SglangRequest(StrictRequest):
    """`/generate` as SGLang has it: one prompt or a list of them, as text or as `input_ids`."""

    text: Union[str, list[str], None] = None
    input_ids: Union[list[int], list[list[int]], None] = None
    sampling_params: SglangSampling = Field(default_factory=SglangSampling)
    return_logprob: bool = Field(default=False, description="output_token_logprobs: (log-probability, id, text)")
    stream: Literal[False] = False
    return_text_in_logprobs: bool = Field(default=False, description="else the text is null")

    def asked(self, tokenizer: Tokenizer) -> ParsedRequest:
        """Return the request with texts as tokens. Raise `RefusedError` without just one of `text`, `input_ids`."""
        if (self.text is None) == (self.input_ids is None):
            raise RefusedError("Give either text or input_ids.", 400, param="input_ids")
        given, name = (self.text, "text") if self.input_ids is None else (self.input_ids, "input_ids")
        prompts, params = encode_prompts(given, tokenizer, name), self.sampling_params
        sampling = params.sampled(tokenizer, params.max_new_tokens)
        texts = [""] * len(prompts)
        return ParsedRequest(prompts, sampling, params, texts, self.return_logprob)

    def reply(self, asked: ParsedRequest, pieces: list[AnswerPiece], tokenizer: Tokenizer) -> Any:
        """Return the answer: an object, or a list of them where there is more than one answer."""
        several = isinstance(self.text if self.input_ids is None else self.input_ids[0], list) or asked.fields.n > 1
        answers = [self._answer(asked, piece, tokenizer) for piece in pieces]
        return answers if several else answers[0]

    def _answer(self, asked: ParsedRequest, piece: AnswerPiece, tokenizer: Tokenizer) -> dict[str, Any]:
        reason: dict[str, Any] = {"type": piece.finish_reason}
        if piece.finish_reason == "length":
            reason["length"] = len(piece.tokens)
        else:
            reason["matched"] = piece.stop_reason
        info: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "finish_reason": reason,
            "prompt_tokens": len(asked.prompts[piece.index // asked.fields.n]),
            "completion_tokens": len(piece.tokens),
            "policy_versions": piece.versions,
        }
        if asked.log_probs:
            info["output_token_logprobs"] = [
                (log_prob, token, tokenizer.decode([token]) if self.return_text_in_logprobs else None)
                for token, log_prob in zip(piece.tokens, piece.log_probs)
            ]
        return {"text": piece.text, "output_ids": piece.tokens, "meta_info": info}


def _dialect(body: Any) -> str:
    sglang = isinstance(body, dict) and not body.keys().isdisjoint(("input_ids", "text", "sampling_params"))
    return "sglang" if sglang else "vllm"


GenerateRequest = Annotated[
    Union[Annotated[VllmRequest, Tag("vllm")], Annotated[SglangRequest, Tag("sglang")]], Discriminator(_dialect)
]
