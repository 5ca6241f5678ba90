"""Bodies of requests, as types: unknown fields are accepted, wrong types are not.

None stands for "not given" throughout, since clients send null for it. Ranges are checked where the
values are used.
"""

from typing import Any

import msgspec

type Ints = list[int]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What completions and chats have in common."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Ints | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: Ints | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    skip_reading_prefix_cache: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    logprob_token_ids: Any = None
    repetition_detection: Any = None
    thinking_token_budget: int | None = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    user: str | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any] | None = None
    logprobs: int | bool | None = None
    best_of: int | None = None
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

    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
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
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: Ints
    model: str | None = None
