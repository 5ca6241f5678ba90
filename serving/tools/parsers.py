"""Parsers of the ways in which models write tool calls."""

import re
from collections.abc import Callable, Sequence

from serving.tools.call_scanner import CallScanner, ValueScanner
from serving.tools.pieces import (
    Content,
    Piece,
    TagFinder,
    TextParser,
    ToolArguments,
    ToolStart,
)

_SPACE = " \t\r\n"


class _Calls:
    """Numbers calls, and turns what a scanner read into pieces."""

    def __init__(self) -> None:
        self.count = 0
        self._scanner: CallScanner | None = None
        self._announced = False

    @property
    def scanner(self) -> CallScanner:
        if self._scanner is None:
            self._scanner = CallScanner()
            self._announced = False
        return self._scanner

    @property
    def announced(self) -> bool:
        return self._announced

    def feed(self, text: str, out: list[Piece]) -> int:
        """Reads on in the current call; returns how many characters were its own."""
        scanner = self.scanner
        used = scanner.feed(text)
        if scanner.name is not None:
            if not self._announced:
                out.append(ToolStart(self.count, scanner.name))
                self.count += 1
                self._announced = True
            arguments = scanner.take_arguments()
            if arguments:
                out.append(ToolArguments(self.count - 1, arguments))
        return used

    def drop(self) -> str:
        """Ends the current call; returns its text if it turned out to be none."""
        raw = "" if self._announced or self._scanner is None else "".join(self._scanner.raw)
        self._scanner = None
        return raw


class HermesParser:
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`, any number, text around them."""

    def __init__(self, tools: frozenset[str] = frozenset()):
        self._calls = _Calls()
        self._open = TagFinder("<tool_call>")
        self._close = TagFinder("</tool_call>")
        self._mode = "content"
        self._space = ""

    def feed(self, text: str) -> Sequence[Piece]:
        out: list[Piece] = []
        rest: str | None = text
        while rest:
            if self._mode == "content":
                before, rest = self._open.feed(rest)
                self._content(before, out)
                if rest is not None:
                    self._mode = "call"
            elif self._mode == "call":
                used = self._calls.feed(rest, out)
                rest = rest[used:]
                scanner = self._calls.scanner
                if scanner.is_complete:
                    self._calls.drop()
                    self._mode = "after"
                elif scanner.is_malformed:
                    was_call = self._calls.announced
                    raw = self._calls.drop()
                    self._mode = "after" if was_call else "content"
                    if not was_call:
                        self._content("<tool_call>" + raw, out)
            else:
                _, rest = self._close.feed(rest)
                if rest is not None:
                    self._mode = "content"
        return out

    def finish(self) -> Sequence[Piece]:
        out: list[Piece] = []
        if self._mode == "content":
            self._content(self._open.finish(), out)
            if self._space and not self._calls.count:
                out.append(Content(self._space))
        elif self._mode == "call" and not self._calls.announced:
            out.append(Content("<tool_call>" + self._calls.drop()))
        return out

    def _content(self, text: str, out: list[Piece]) -> None:
        # White space next to a call belongs to the notation.
        text = self._space + text
        body = text.rstrip(_SPACE)
        self._space = text[len(body) :]
        if self._calls.count and body == body.lstrip(_SPACE) == "":
            return
        if body:
            out.append(Content(body))


class LlamaJsonParser:
    """`{"name": ..., "parameters": ...}` as the whole answer; several are parted by `;`."""

    def __init__(self, tools: frozenset[str] = frozenset()):
        self._tools = tools
        self._calls = _Calls()
        self._mode = "start"
        self._start = ""

    def feed(self, text: str) -> Sequence[Piece]:
        out: list[Piece] = []
        while text:
            if self._mode == "content":
                out.append(Content(text))
                break
            if self._mode == "start":
                text = self._begin(text, out)
            else:
                text = self._call(text, out)
        return out

    def finish(self) -> Sequence[Piece]:
        if self._mode == "start" and self._start and not self._calls.count:
            return [Content(self._start)]
        if self._mode == "call" and not self._calls.announced:
            return [Content(self._start + self._calls.drop())]
        return []

    def _begin(self, text: str, out: list[Piece]) -> str:
        tag = "<|python_tag|>"
        self._start += text
        body = self._start.lstrip(_SPACE + (";" if self._calls.count else ""))
        if body.startswith(tag):
            body = body[len(tag) :].lstrip(_SPACE)
        elif tag.startswith(body):
            return ""
        if not body:
            return ""
        if body[0] == "{":
            self._start = self._start[: len(self._start) - len(body)]
            self._mode = "call"
            return body
        self._mode = "content"
        out.append(Content(self._start))
        return ""

    def _call(self, text: str, out: list[Piece]) -> str:
        scanner = self._calls.scanner
        # A JSON answer that only looks like a call must stay text, so the name decides.
        made: list[Piece] = []
        raw_before = "".join(scanner.raw)
        used = self._calls.feed(text, made)
        start = next((piece for piece in made if isinstance(piece, ToolStart)), None)
        if start is not None and self._tools and start.name not in self._tools:
            self._calls.count -= 1
            self._mode = "content"
            out.append(Content(self._start + raw_before + text))
            return ""
        out += made
        if scanner.is_complete or (scanner.is_malformed and self._calls.announced):
            self._calls.drop()
            self._mode, self._start = "start", ""
        elif scanner.is_malformed:
            out.append(Content(self._start + self._calls.drop()))
            self._mode = "content"
        return text[used:]


class ArrayParser:
    """`[{"name": ..., "arguments": ...}, ...]`, which a grammar forces."""

    def __init__(self, tools: frozenset[str] = frozenset()):
        self._calls = _Calls()
        self._in_call = False

    def feed(self, text: str) -> Sequence[Piece]:
        out: list[Piece] = []
        while text:
            if not self._in_call:
                text = text.lstrip(_SPACE + "[,]")
                self._in_call = bool(text)
                continue
            used = self._calls.feed(text, out)
            text = text[used:]
            scanner = self._calls.scanner
            if scanner.is_complete or scanner.is_malformed:
                raw = self._calls.drop()
                self._in_call = False
                if raw:
                    out.append(Content(raw))
        return out

    def finish(self) -> Sequence[Piece]:
        raw = self._calls.drop() if self._in_call else ""
        return [Content(raw)] if raw else []


class MistralParser:
    """`[TOOL_CALLS]` before an array of calls, or before each `name{...}` or `name[ARGS]{...}`."""

    _tag = "[TOOL_CALLS]"

    def __init__(self, tools: frozenset[str] = frozenset()):
        self._finder = TagFinder(self._tag)
        self._array = ArrayParser()
        self._mode = "content"
        self._name = ""
        self._count = 0
        self._value = ValueScanner()

    def feed(self, text: str) -> Sequence[Piece]:
        out: list[Piece] = []
        rest: str | None = text
        while rest:
            if self._mode == "content":
                before, rest = self._finder.feed(rest)
                if before and not (self._count and not before.strip(_SPACE)):
                    out.append(Content(before))
                if rest is not None:
                    self._mode, self._name = "name", ""
            elif self._mode == "array":
                out += self._array.feed(rest)
                break
            elif self._mode == "name":
                rest = self._read_name(rest, out)
            else:
                rest = self._read_arguments(rest, out)
        return out

    def finish(self) -> Sequence[Piece]:
        if self._mode == "array":
            return self._array.finish()
        if self._mode == "name":
            return [Content(self._tag + self._name)]
        held = self._finder.finish()
        return [Content(held)] if held else []

    def _read_name(self, text: str, out: list[Piece]) -> str:
        self._name += text
        body = self._name.lstrip(_SPACE)
        if not body:
            return ""
        if body[0] == "[":
            self._mode = "array"
            return body
        at = body.find("{")
        if at < 0:
            return ""
        name = re.split(r"\[ARGS\]|\[CALL_ID\]", body[:at])[0].strip(_SPACE)
        if not name:
            out.append(Content(self._tag + self._name))
            self._mode = "content"
            return ""
        out.append(ToolStart(self._count, name))
        self._count += 1
        self._mode = "arguments"
        self._value = ValueScanner()
        return body[at:]

    def _read_arguments(self, text: str, out: list[Piece]) -> str:
        for place, character in enumerate(text):
            _, complete = self._value.take(character)
            if complete:
                out.append(ToolArguments(self._count - 1, text[: place + 1]))
                self._mode = "content"
                return text[place + 1 :]
        out.append(ToolArguments(self._count - 1, text))
        return ""


class NamedToolParser:
    """The text is the arguments of one given tool, which a grammar forces."""

    def __init__(self, name: str):
        self._name = name
        self._started = False

    def feed(self, text: str) -> Sequence[Piece]:
        out: list[Piece] = []
        if not self._started:
            self._started = True
            out.append(ToolStart(0, self._name))
        if text:
            out.append(ToolArguments(0, text))
        return out

    def finish(self) -> Sequence[Piece]:
        return [] if self._started else self.feed("")


PARSERS: dict[str, Callable[[frozenset[str]], TextParser]] = {
    "hermes": HermesParser,
    "llama3_json": LlamaJsonParser,
    "mistral": MistralParser,
}
# What a chat template of a kind of model contains.
_SIGNS = (("<tool_call>", "hermes"), ("[TOOL_CALLS]", "mistral"), ("<|python_tag|>", "llama3_json"))


def detect_parser(chat_template: str | None) -> str | None:
    """The name of the parser that fits a model's chat template, None if none is known to."""
    for sign, name in _SIGNS:
        if chat_template is not None and sign in chat_template:
            return name
    return None
