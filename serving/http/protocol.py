"""Bodies of requests, as types: unknown fields are accepted, wrong types are not.

None stands for "not given" throughout, since clients send null for it. Every integer has a bound,
so that none outgrows the engine's; the narrower ranges are checked where the values are used.
"""

from typing import Annotated, Any

import msgspec

type Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
type Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
type TokenIds = Annotated[list[Int32], msgspec.Meta(max_length=2**20)]
type Messages = Annotated[list[dict[str, Any]], msgspec.Meta(max_length=2**14)]
type Items = Annotated[list[Any], msgspec.Meta(max_length=2**20)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What completions and chats have in common."""

    model: str | None = None
    n: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: TokenIds | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    min_tokens: Int32 | None = None
    max_tokens: Int64 | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: Int32 | None = None
    truncate_prompt_tokens: Int32 | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    skip_reading_prefix_cache: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Int32 | None = None
    echo: bool | None = None
    priority: Int64 | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    logprob_token_ids: Any = None
    repetition_detection: Any = None
    thinking_token_budget: Int32 | None = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    user: str | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/completions."""

    prompt: str | Items | None = None
    logprobs: Int32 | bool | None = None
    best_of: Int32 | None = None
    suffix: str | None = None
    prompt_embeds: Any = None


class FunctionDefinition(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: str
    function: FunctionDefinition


class NamedFunction(msgspec.Struct, kw_only=True):
    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    function: NamedFunction
    type: str = "function"


class ChatRequest(SamplingFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Messages | None = None
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: TokenIds
    model: str | None = None
