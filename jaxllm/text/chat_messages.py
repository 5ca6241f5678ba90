"""Conversations as chat templates see them: checked, copied, and of plain data only."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jaxllm.text.errors import ChatMessageError

MAX_MESSAGES = 16_384
MAX_CHARACTERS = 16 * 1024 * 1024
MAX_DEPTH = 64
MAX_INTEGER_BITS = 127

# Names under which a message may carry the model's reasoning; templates read one of the first two.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def _refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise TypeError("a chat template may not change its input")


class FrozenList(list[Any]):
    """A list that its methods cannot change: templates can call methods of what they are given."""

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse

    def copy(self) -> "FrozenList":
        return self


class FrozenDict(dict[str, Any]):
    """A dict whose methods cannot change it."""

    update = pop = popitem = clear = setdefault = fromkeys = _refuse

    def copy(self) -> "FrozenDict":
        return self


class PlainData:
    """Copies values into frozen plain data, counting characters against one budget.

    `characters` is the number of characters taken so far, keys included.
    """

    def __init__(self) -> None:
        self.characters = 0

    def copy(self, value: Any, where: str) -> Any:
        """A copy of `value` made of str, int, float, bool, None, frozen lists and dicts.

        Raises `ChatMessageError` naming `where` for any other type, for keys that are not strings,
        and beyond `MAX_CHARACTERS`, `MAX_DEPTH` or `MAX_INTEGER_BITS`.
        """
        return self._copy(value, where, MAX_DEPTH)

    def _copy(self, value: Any, where: str, depth: int) -> Any:
        if value is None or isinstance(value, (bool, float)):
            return value
        if isinstance(value, str):
            self._count(len(value))
            return str(value)
        if isinstance(value, int):
            if value.bit_length() > MAX_INTEGER_BITS:
                raise ChatMessageError(f"{where} is an integer beyond {MAX_INTEGER_BITS} bits")
            return int(value)
        if depth == 0:
            raise ChatMessageError(f"{where} is nested more than {MAX_DEPTH} levels deep")
        self._count(1)
        if isinstance(value, Mapping):
            result = FrozenDict()
            for key, item in value.items():
                if not isinstance(key, str):
                    raise ChatMessageError(f"{where} has the key {key!r}; keys must be strings")
                self._count(len(key))
                dict.__setitem__(result, key, self._copy(item, f"{where}.{key}", depth - 1))
            return result
        if isinstance(value, (list, tuple)):
            return FrozenList(
                self._copy(item, f"{where}[{i}]", depth - 1) for i, item in enumerate(value)
            )
        raise ChatMessageError(
            f"{where} is {type(value).__name__}; only strings, numbers, booleans, null, lists and "
            "dicts can be passed to a chat template"
        )

    def _count(self, characters: int) -> None:
        self.characters += characters
        if self.characters > MAX_CHARACTERS:
            raise ChatMessageError(
                f"the conversation has more than {MAX_CHARACTERS} characters, tools included"
            )


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as fresh dicts, in the form templates expect.

    Each needs a string `role`; `content` is a string, a list of strings and text parts
    (`{"type": "text", "text": str}`), or absent. Keys whose value is None are dropped. Arguments of
    tool calls given as JSON text become the object they stand for. Reasoning is offered under each
    name in use. Raises `ChatMessageError` otherwise, naming message and field.
    """
    if not isinstance(messages, (list, tuple)):
        raise ChatMessageError(f"messages must be a list, not {type(messages).__name__}")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise ChatMessageError(
            f"the conversation has {len(messages)} messages; 1 to {MAX_MESSAGES} are allowed"
        )
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def join_text_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with a list content joined to one string, a line per part."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatMessageError(f"{where} must be a dict, not {type(message).__name__}")
    checked = {key: value for key, value in message.items() if value is not None}
    role = checked.get("role")
    if not isinstance(role, str) or not role:
        raise ChatMessageError(f"{where}.role is {role!r}; a non-empty string is needed")
    content = checked.get("content")
    if isinstance(content, (list, tuple)):
        checked["content"] = [
            _check_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)
        ]
    elif content is not None and not isinstance(content, str):
        raise ChatMessageError(
            f"{where}.content is {type(content).__name__}; a string or a list of text parts is "
            "needed"
        )
    if "tool_calls" in checked:
        checked["tool_calls"] = _tool_calls(checked["tool_calls"], f"{where}.tool_calls")
    if (reasoning := next((checked[n] for n in _REASONING if n in checked), None)) is not None:
        checked = {"thinking": reasoning, **checked, "reasoning_content": reasoning}
    return checked


def _check_part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise ChatMessageError(f"{where} must be a dict or a string, not {type(part).__name__}")
    if (kind := part.get("type")) != "text":
        raise ChatMessageError(f"{where}.type {kind!r} is not supported; only 'text' is")
    if not isinstance(part.get("text"), str):
        raise ChatMessageError(
            f"{where}.text must be a string, not {type(part.get('text')).__name__}"
        )
    return dict(part)


def _tool_calls(calls: Any, where: str) -> list[Any]:
    if not isinstance(calls, (list, tuple)):
        raise ChatMessageError(f"{where} must be a list, not {type(calls).__name__}")
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> Any:
    if not isinstance(call, Mapping):
        raise ChatMessageError(f"{where} must be a dict, not {type(call).__name__}")
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    text = function["arguments"]
    try:
        arguments = json.loads(text) if text.strip() else {}
    except RecursionError:
        raise ChatMessageError(
            f"{where}.function.arguments is nested more than {MAX_DEPTH} levels deep"
        ) from None
    except ValueError as error:
        raise ChatMessageError(
            f"{where}.function.arguments is not a JSON object: {error}"
        ) from None
    if not isinstance(arguments, dict):
        raise ChatMessageError(
            f"{where}.function.arguments is a JSON {type(arguments).__name__}, not an object"
        )
    return {**call, "function": {**function, "arguments": arguments}}
