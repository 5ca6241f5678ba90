"""Chat templates, rendered in a bounded sandbox.

A template comes with a model file, so it is untrusted. It runs in minijinja, which cannot reach
Python objects beyond the plain, frozen data passed in, and stops when its fuel is used up. The
result is the one that `transformers` gives, except that whole floats of 1e16 and more print without
an exponent.

Fuel counts instructions and the length of strings that are made, so loops, recursion and growing
strings end. It does not count comparisons, nor the text of a nested list before it exists, nor how
deep lists are nested: with long conversations, a template written to abuse that can waste time or
memory out of proportion, or exhaust the stack. It can never read or run anything.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal

import minijinja

from jaxllm.text.chat_messages import PlainData, check_messages, join_text_parts
from jaxllm.text.errors import ChatMessageError, ChatTemplateError
from jaxllm.text.tokenizer import Tokenizer

BASE_FUEL = 1_000_000
FUEL_PER_CHARACTER = 40
BASE_JSON = 100_000
JSON_PER_CHARACTER = 16
MAX_TEMPLATE_CHARACTERS = 1024 * 1024

ContentFormat = Literal["auto", "string", "openai"]

_RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "bos_token",
        "eos_token",
        "chat_template",
        "raise_exception",
        "strftime_now",
    }
)
_GENERATION_TAG = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
# The space at its end shows whether the template trims the message it ends.
_CONTINUE_MARK = "CONTINUE_THIS_MESSAGE_FROM_HERE "
_PROBE = "TEXT_OF_THE_ONLY_PART"
_MAX_INDENT = 16
_MAX_TIME_FORMAT = 128


class _RefusalError(Exception):
    """What `raise_exception` in a template raises."""


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    bos_token: str | None = None,
    eos_token: str | None = None,
    extra: Mapping[str, Any] | None = None,
    content_format: ContentFormat = "auto",
) -> str:
    """The prompt text of a conversation.

    `continue_final_message` leaves the last message open, so that the model goes on with it; it
    excludes `add_generation_prompt`. `extra` are further template variables; they cannot replace
    the others. `content_format` says what the template is given for a content of text parts: their
    text joined by line ends ("string"), the parts themselves ("openai"), or whichever the template
    can read ("auto").

    Raises `ChatMessageError` for bad messages, tools, documents or options, and `ChatTemplateError`
    if there is no template, or it does not parse, fails, refuses the conversation or runs out of
    fuel.
    """
    if template is None:
        raise ChatTemplateError(
            "the model has no chat template; pass one with chat_template, or use a plain prompt"
        )
    if content_format not in ("auto", "string", "openai"):
        raise ChatMessageError(
            f"content_format is {content_format!r}; auto, string and openai are allowed"
        )
    checked = check_messages(messages)
    if continue_final_message and add_generation_prompt:
        raise ChatMessageError(
            "continue_final_message and add_generation_prompt exclude each other: either the last "
            "message goes on, or a new one begins"
        )
    if content_format == "string" or (content_format == "auto" and not reads_parts(template)):
        checked = [join_text_parts(message) for message in checked]
    final_text = _mark_end(template, checked) if continue_final_message else ""
    plain = PlainData()
    variables = {
        **_extra(plain, extra or {}),
        "messages": plain.copy(checked, "messages"),
        "tools": _list_of_dicts(plain, tools, "tools"),
        "documents": _list_of_dicts(plain, documents, "documents"),
        "add_generation_prompt": add_generation_prompt,
    }
    for name, token in (("bos_token", bos_token), ("eos_token", eos_token)):
        if token is not None:
            variables[name] = token
    text = _render(template, variables, plain.characters)
    return _cut_at_mark(text, final_text) if continue_final_message else text


def render_conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    extra: Mapping[str, Any] | None = None,
    **options: Any,
) -> str:
    """`render_chat` with `chat_template`, or else the tokenizer's own, and its special tokens."""
    if chat_template is None:
        chat_template = tokenizer.tool_chat_template if tools else tokenizer.chat_template
    special = dict(tokenizer.special_tokens)
    return render_chat(
        chat_template,
        messages,
        tools=tools,
        bos_token=special.pop("bos_token", None),
        eos_token=special.pop("eos_token", None),
        extra={**special, **(extra or {})},
        **options,
    )


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Any
) -> list[int]:
    """Token ids of a conversation; `options` are those of `render_conversation`.

    The template writes BOS if the model wants it, so none is added again.
    """
    return tokenizer.encode(
        render_conversation(tokenizer, messages, **options), add_special_tokens=False
    )


@lru_cache(maxsize=64)
def reads_parts(template: str) -> bool:
    """Whether `template` takes a list of text parts as content: it shows their text, not a repr."""
    message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
    try:
        text = render_chat(template, [message], content_format="openai")
    except ChatTemplateError:
        return False
    return re.search(rf"""(?<!['"]){_PROBE}(?!['"])""", text) is not None


def _render(template: str, variables: dict[str, Any], input_characters: int) -> str:
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise ChatTemplateError(
            f"the chat template has {len(template)} characters; "
            f"{MAX_TEMPLATE_CHARACTERS} are allowed"
        )
    fuel = BASE_FUEL + FUEL_PER_CHARACTER * input_characters
    environment = minijinja.Environment(
        fuel=fuel,
        trim_blocks=True,
        lstrip_blocks=True,
        pycompat=True,
        filters={"tojson": _Json(BASE_JSON + JSON_PER_CHARACTER * input_characters)},
        globals={"raise_exception": _raise_exception, "strftime_now": _strftime_now},
        auto_escape_callback=lambda _name: False,
    )
    source = _GENERATION_TAG.sub(r"\1\2with\3", template)
    try:
        return environment.render_str(source, **variables)
    except _RefusalError as refusal:
        raise ChatTemplateError(f"the chat template refuses the conversation: {refusal}") from None
    except minijinja.TemplateError as error:
        if error.kind == "OutOfFuel":
            raise ChatTemplateError(
                f"the chat template runs too long: more than {fuel} steps for {input_characters} "
                "characters of input"
            ) from None
        place = f" at line {error.line}" if error.line else ""
        raise ChatTemplateError(f"the chat template fails{place}: {error.message}") from None
    except (TypeError, ValueError, AttributeError, LookupError, RecursionError) as error:
        # What the values' own methods raise when a template calls them wrongly.
        raise ChatTemplateError(f"the chat template fails: {error}") from None


def _extra(plain: PlainData, extra: Mapping[str, Any]) -> dict[str, Any]:
    if reserved := sorted(_RESERVED & extra.keys()):
        raise ChatMessageError(f"template variable {reserved[0]!r} cannot be replaced")
    return {name: plain.copy(value, name) for name, value in extra.items()}


def _list_of_dicts(plain: PlainData, value: Any, name: str) -> Any:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        raise ChatMessageError(f"{name} must be a list, not {type(value).__name__}")
    for i, item in enumerate(value):
        if not isinstance(item, Mapping):
            raise ChatMessageError(f"{name}[{i}] must be a dict, not {type(item).__name__}")
    return plain.copy(value, name)


def _mark_end(template: str, messages: list[dict[str, Any]]) -> str:
    """Put the mark behind the text of the last message; return that text."""
    final = messages[-1]
    content = final.get("content")
    if content is None:
        raise ChatMessageError("continue_final_message: the last message has no content")
    if "content" not in template:
        raise ChatMessageError("continue_final_message: the chat template does not read `content`")
    if isinstance(content, str):
        final["content"] = content + _CONTINUE_MARK
        return content
    if not content:
        raise ChatMessageError("continue_final_message: the last message has no text")
    text = content[-1]["text"]
    final["content"] = [*content[:-1], {**content[-1], "text": text + _CONTINUE_MARK}]
    return text


def _cut_at_mark(text: str, final_text: str) -> str:
    mark = _CONTINUE_MARK.rstrip()
    at = text.rfind(mark)
    if at < 0 or final_text.strip() not in text:
        raise ChatTemplateError(
            "continue_final_message: the chat template does not show the last message as it is, "
            "so it cannot be continued"
        )
    if text.startswith(_CONTINUE_MARK, at):
        return text[:at]
    return text[:at].rstrip()


def _raise_exception(message: Any = "") -> Any:
    raise _RefusalError(str(message))


def _strftime_now(time_format: str) -> str:
    if not isinstance(time_format, str) or len(time_format) > _MAX_TIME_FORMAT:
        raise ValueError(f"strftime_now takes a string of at most {_MAX_TIME_FORMAT} characters")
    return datetime.now().strftime(time_format)


class _Json:
    """The filter `tojson`, which makes at most `characters` of text in one rendering."""

    def __init__(self, characters: int):
        self._left = characters

    def __call__(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        if isinstance(indent, (int, str)):
            width = len(indent) if isinstance(indent, str) else indent
            if width > _MAX_INDENT:
                raise ValueError(f"tojson indents by at most {_MAX_INDENT}, not {width}")
        if separators is not None:
            item, key = separators
            if len(item) + len(key) > _MAX_INDENT:
                raise ValueError(f"tojson separators have at most {_MAX_INDENT} characters")
            separators = (item, key)
        text = json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )
        self._left -= len(text)
        if self._left < 0:
            raise ValueError("tojson makes far more text than the conversation has")
        return text
