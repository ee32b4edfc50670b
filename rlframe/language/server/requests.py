"""Bodies of requests: the fields of OpenAI's completions and chats, and additional fields of vLLM.

An unsupported field is refused with a message. It is accepted only if its value has no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from typing_extensions import Self

from rlframe.language.decoding.sampling import MAX_TOP_TOKENS, SamplingParams
from rlframe.language.model.tokenizers import Tokenizer
from rlframe.language.server.errors import RefusedError

_MAX_STOPS = 16  # maximum number of stop strings

# Unsupported field -> values that have no effect, and are accepted.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "detokenize": (True,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprob_start_len": (-1,),
    "min_new_tokens": (0,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs_num": (0,),
    "use_beam_search": (False,),
}
_LABELS = ("metadata", "prompt_cache_key", "safety_identifier", "store", "user")  # fields that do not affect answers


def _replace_surrogates(text_or_list: Any) -> Any:
    """Replace invalid Unicode by question marks, in a text or a list of texts. JSON can contain invalid Unicode."""
    if isinstance(text_or_list, list):
        return [_replace_surrogates(one) if isinstance(one, str) else one for one in text_or_list]
    return text_or_list.encode(errors="replace").decode() if isinstance(text_or_list, str) else text_or_list


_Text = Annotated[str, AfterValidator(_replace_surrogates)]


def encode_prompts(
    given: Any, tokenizer: Tokenizer, name: str = "prompt", add_special_tokens: bool = True
) -> list[list[int]]:
    """Encode prompts as tokens.

    Args:
        given: A text, a list of texts, a list of token ids, or a list of such lists.
        name: Name of the field in error messages.
    """
    if isinstance(given, str) or (isinstance(given, list) and given and all(type(one) is int for one in given)):
        given = [given]
    if isinstance(given, list) and given:
        if all(isinstance(one, str) for one in given):
            return [list(tokenizer.encode(one, add_special_tokens=add_special_tokens)) for one in given]
        if all(isinstance(one, list) and all(type(token) is int for token in one) for one in given):
            return given
    raise RefusedError(
        f"{name} must be a text, a list of texts, a list of token ids, or a list of such lists.", 400, param=name
    )


class ParsedRequest(NamedTuple):
    """A request after its texts were encoded as tokens."""

    prompts: list[list[int]]
    sampling: SamplingParams
    fields: SamplingFields  # the request's body
    log_probs: bool  # True if log-probabilities are requested
    offsets: bool = False  # True if the positions of tokens in the text are requested
    # Only for completions: for each prompt, the text before its answers (the prompt if `echo` is set, else "").
    texts: Sequence[str] = ()


class StrictRequest(BaseModel):
    """Base class of request bodies. Refuses unsupported fields, and drops fields that have no effect."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, fields: Any) -> Any:
        """Remove fields that have no effect. Raise `RefusedError` for an unsupported field."""
        if not isinstance(fields, dict):
            return fields
        kept = {}
        for name, value in fields.items():
            if value is None or name in _LABELS:
                continue
            if name in _UNSUPPORTED:
                if value not in _UNSUPPORTED[name]:
                    raise RefusedError(f"{name} is not supported by this server.", 400, param=name)
            elif name == "best_of":
                if value != (fields.get("n") or 1):
                    message = "best_of is not supported by this server. Request n answers and choose the best one."
                    raise RefusedError(message, 400, param="best_of")
            else:
                kept[name] = value
        return kept


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = Field(default=False, description="send a final event with the number of tokens")


class SamplingFields(StrictRequest):
    """Sampling options that all endpoints share."""

    n: int = Field(default=1, ge=1, description="number of answers to each prompt")
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = Field(default=0, description="sample from this number of top tokens; 0 or -1: all")
    seed: int | None = None
    stop: Union[str, list[str]] = Field(
        default=[], description="strings that end an answer; they are not part of the answer"
    )
    stop_token_ids: list[int] = []
    ignore_eos: bool = Field(default=False, description="do not stop at the tokenizer's end-of-text tokens")
    skip_special_tokens: bool = True

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def to_sampling_params(
        self, tokenizer: Tokenizer, max_tokens: int | None, top_tokens: int = 0, score_prompt: int | None = None
    ) -> SamplingParams:
        """Convert the fields to `SamplingParams`. Raise `RefusedError` or `UsageError` for invalid values."""
        if len(self.stops) > _MAX_STOPS or not all(self.stops):
            raise RefusedError(f"stop may have at most {_MAX_STOPS} strings, and none may be empty.", 400, param="stop")
        ends = () if self.ignore_eos else tokenizer.stop_token_ids
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0) if self.top_k >= -1 else self.top_k,
            stop_tokens=tuple(dict.fromkeys((*ends, *self.stop_token_ids))),
            seed=self.seed,
            top_tokens=top_tokens,
            score_prompt=score_prompt,
        )


class _Request(SamplingFields):
    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = Field(default=False, description="return token_ids and prompt_token_ids")
    return_tokens_as_token_ids: bool = Field(default=False, description="name tokens in logprobs as token_id:N")
    prompt_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_TOP_TOKENS,
        description="return log-probabilities of the prompt's tokens and this number of top tokens; not with stream",
    )

    @model_validator(mode="after")
    def _check_prompt_logprobs(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            message = "prompt_logprobs is not supported with stream. Request only one of them."
            raise RefusedError(message, 400, param="prompt_logprobs")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(_Request):
    """The body of `/v1/completions`."""

    prompt: Annotated[Any, AfterValidator(_replace_surrogates)] = Field(
        description="a text, a list of texts, a list of token ids, or a list of such lists"
    )
    max_tokens: int = Field(
        default=16, description="maximum tokens of each answer; 0 with echo or prompt_logprobs: only score the prompt"
    )
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_TOP_TOKENS,
        description="return log-probabilities of the sampled tokens and, if above 1, of this number of top tokens",
    )
    echo: bool = Field(default=False, description="return the prompt's text before the answer")
    add_special_tokens: bool = Field(default=True, description="add the tokenizer's special tokens to the prompt")

    def parse(self, tokenizer: Tokenizer) -> ParsedRequest:
        """Encode the texts as tokens. Raise `RefusedError` or `UsageError` for invalid values."""
        prompts = encode_prompts(self.prompt, tokenizer, add_special_tokens=self.add_special_tokens)
        return ParsedRequest(
            prompts=prompts,
            sampling=self.to_sampling_params(tokenizer, self.max_tokens, self.top_tokens, self._prompt_top_tokens),
            fields=self,
            log_probs=self.logprobs is not None,
            offsets=self.logprobs is not None,
            texts=[self._text(i, tokens, tokenizer) if self.echo else "" for i, tokens in enumerate(prompts)],
        )

    @property
    def top_tokens(self) -> int:
        """Number of top tokens to return at each position of the answer."""
        return self.logprobs if self.logprobs is not None and self.logprobs > 1 else 0

    @property
    def _prompt_top_tokens(self) -> int | None:
        echoed = self.top_tokens if self.echo and self.logprobs is not None else None
        alone = 0 if self.echo and self.max_tokens == 0 else None  # only score the prompt
        wanted = [count for count in (self.prompt_logprobs, echoed, alone) if count is not None]
        return max(wanted, default=None)

    def _text(self, index: int, tokens: list[int], tokenizer: Tokenizer) -> str:
        if isinstance(self.prompt, str):
            return self.prompt
        given = self.prompt[index]
        return given if isinstance(given, str) else tokenizer.decode(tokens, skip_special_tokens=True)


def _check_messages(messages: Any) -> Any:
    """Raise `RefusedError` if a message has tool calls, or a content that is not text."""
    for i, message in enumerate(messages if isinstance(messages, list) else []):
        if not isinstance(message, dict):
            continue
        for name in ("tool_calls", "function_call"):
            if message.get(name):
                raise RefusedError(
                    f"messages[{i}].{name} is not supported by this server, which answers only in text. Write tools "
                    "into the prompt and the calls into the content.",
                    400,
                    param=f"messages[{i}].{name}",
                )
        _check_content(f"messages[{i}].content", message.get("content"))
    return messages


def _check_content(name: str, content: Any) -> None:
    if not isinstance(content, (str, list)):
        got = "null" if content is None else type(content).__name__
        raise RefusedError(f"{name} must be a text or a list of text parts, got {got}.", 400, param=name)
    for j, part in enumerate(content if isinstance(content, list) else []):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RefusedError(
                f"{name}[{j}] has the type {kind!r}, but this model reads only text, so a part must be "
                '{"type": "text", "text": "..."}.',
                400,
                param=f"{name}[{j}]",
            )
        if more := [key for key, value in part.items() if key not in ("type", "text") and value is not None]:
            raise RefusedError(
                f"{name}[{j}].{more[0]} is not supported by this server.", 400, param=f"{name}[{j}].{more[0]}"
            )


class TextPart(BaseModel):
    """A text part of a message."""

    model_config = ConfigDict(extra="ignore")  # null fields
    type: Literal["text"]
    text: _Text


class ChatMessage(BaseModel):
    """A turn of a conversation."""

    model_config = ConfigDict(extra="forbid")
    role: _Text
    content: Union[_Text, list[TextPart]]
    name: _Text | None = None
    tool_call_id: _Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_fields(cls, fields: Any) -> Any:
        # Clients send earlier answers back as messages, with fields that are null or empty.
        if isinstance(fields, dict):
            filled = {name: value for name, value in fields.items() if value is not None and value != []}
            return {**filled, "content": fields["content"]} if fields.get("content") == [] else filled
        return fields

    @property
    def as_dict(self) -> dict[str, str]:
        """The message as a dict for chat templates."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        named = {"name": self.name, "tool_call_id": self.tool_call_id}
        return {"role": self.role, "content": text, **{name: value for name, value in named.items() if value}}


class ChatRequest(_Request):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], BeforeValidator(_check_messages)] = Field(min_length=1)
    max_tokens: int | None = Field(
        default=None, description="maximum tokens of each answer; default: the server's limit"
    )
    max_completion_tokens: int | None = Field(default=None, description="replaces max_tokens if both are given")
    logprobs: bool = Field(default=False, description="return log-probabilities of the sampled tokens")
    top_logprobs: int = Field(
        default=0, ge=0, le=MAX_TOP_TOKENS, description="also return log-probabilities of this number of top tokens"
    )
    add_generation_prompt: bool = Field(
        default=True, description="append the beginning of an assistant's turn to the prompt"
    )

    def parse(self, tokenizer: Tokenizer) -> ParsedRequest:
        """Encode the messages as tokens. Raise `RefusedError` or `UsageError` for invalid values."""
        if self.top_logprobs and not self.logprobs:
            raise RefusedError("top_logprobs needs logprobs: true.", 400, param="top_logprobs")
        messages = [message.as_dict for message in self.messages]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=self.add_generation_prompt)
        both = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return ParsedRequest(
            prompts=[list(prompt)],
            sampling=self.to_sampling_params(tokenizer, both, self.top_logprobs, self.prompt_logprobs),
            fields=self,
            log_probs=self.logprobs,
        )
