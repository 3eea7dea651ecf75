"""What a request may say. Fields that are not here are refused by name; null means not given."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from lspec.params import SamplingParams
from lspec.request import MAX_LOGPROBS, Gamma, check_gamma

MAX_CHOICES = 64  # of a reply
MAX_STOPS = 16

# Fields of lspec.params.SamplingParams that a request may set.
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repeat_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
)

Prompt = str | list[int]
Count = Annotated[int, Field(ge=0)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class Strict(BaseModel):
    """An object without unknown fields, whose values have just the types that they should have."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_null(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data


def _join_parts(content: Any) -> Any:
    """Return the text of a content that is a list of text parts."""
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"only parts of type 'text' with a 'text' are supported, not {kind!r}")
    return "".join(part["text"] for part in content)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> Any:
    """Return a text, ids, or a list of either, as a list of prompts."""
    if isinstance(value, str) or (value and _is_ids(value)):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(v, str) or _is_ids(v) for v in value):
        raise ValueError("a prompt is a text, a list of token ids, or a list of these")
    if not value:
        raise ValueError("there is no prompt")
    return value


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _by_id(bias: Any) -> Any:
    """Return a logit bias with its ids as numbers, which JSON cannot have as keys."""
    try:
        return {int(token): value for token, value in bias.items()}
    except (AttributeError, ValueError):
        raise ValueError("a logit bias maps token ids to numbers") from None


def _json_object(text: Any) -> Any:
    """Return the object that the text of a call's arguments is: templates want it so."""
    if not isinstance(text, str):
        raise ValueError("the arguments of a call are JSON in a text")
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError("the arguments of a call are a JSON object")
    return value


class CalledFunction(Strict):
    """A function that the model called."""

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_json_object)]


class ToolCall(Strict):
    """A call that the model made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_join_parts)] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _makes_sense(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only a message of the assistant has tool_calls")
        if self.reasoning_content is not None and self.role != "assistant":
            raise ValueError("only a message of the assistant has reasoning_content")
        if self.content is None and not self.tool_calls and not self.reasoning_content:
            raise ValueError("the content is missing")
        return self


class Function(Strict):
    """What the model is told of a function; `parameters` is a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] = {"type": "object", "additionalProperties": False}
    strict: bool = False


class Tool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """The name of a function."""

    name: str


class NamedTool(Strict):
    """A function that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class StreamOptions(Strict):
    """What a stream brings beside the answer."""

    include_usage: bool = False
    include_obfuscation: bool = False  # padding against listeners on the way: changes no answer


class Body(Strict):
    """What both endpoints understand."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: Count | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        BeforeValidator(_as_list),
        Field(max_length=MAX_STOPS),
    ] = []
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_by_id)] = {}
    cache_prompt: bool = True
    speculate: bool = True
    gamma: Annotated[Gamma, AfterValidator(check_gamma)] | None = None
    # Changes nothing here, and clients send it.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @field_validator(*SAMPLING)
    @classmethod
    def _is_possible(cls, value: Any, info: ValidationInfo) -> Any:
        SamplingParams(**{str(info.field_name): value})
        return value


class ChatBody(Body):
    """A request to continue a chat."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Logprobs | None = None
    response_format: dict[str, Any] = {"type": "text"}
    tools: list[Tool] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    modalities: list[Literal["text"]] = ["text"]
    chat_template_kwargs: dict[str, Any] = {}


class CompletionBody(Body):
    """A request to continue one text, or several."""

    prompt: Annotated[list[Prompt], BeforeValidator(_prompts)]
    suffix: str | None = None
    logprobs: Logprobs | None = None
    echo: Literal[False] = False
    best_of: Literal[1] = 1

    @model_validator(mode="after")
    def _is_not_too_much(self) -> CompletionBody:
        if self.n * len(self.prompt) > MAX_CHOICES:
            raise ValueError(f"a reply has at most {MAX_CHOICES} choices")
        return self
