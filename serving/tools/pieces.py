"""What a model's text consists of, as chat clients see it."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolStart:
    """A call begins; its arguments follow."""

    index: int
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolArguments:
    """More of the arguments of a call, as JSON text."""

    index: int
    text: str


type Piece = Content | Reasoning | ToolStart | ToolArguments


class TextParser(Protocol):
    """Cuts text into pieces. How the text is cut into deltas never changes what they join to."""

    def feed(self, text: str) -> Sequence[Piece]:
        """Takes the next text; returns what is certain."""

    def finish(self) -> Sequence[Piece]:
        """Ends the text; returns what was held back."""


class PlainText:
    """The parser of text that is nothing but content."""

    def feed(self, text: str) -> Sequence[Piece]:
        return [Content(text)] if text else []

    def finish(self) -> Sequence[Piece]:
        return []


class TagFinder:
    """Looks for a tag in a stream, and holds back an end of the text that may begin it."""

    def __init__(self, tag: str):
        self.tag = tag
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text before the tag, text after it), the latter None while it is not found."""
        text = self._held + text
        at = text.find(self.tag)
        if at >= 0:
            self._held = ""
            return text[:at], text[at + len(self.tag) :]
        keep = 0
        for length in range(min(len(self.tag) - 1, len(text)), 0, -1):
            if text.endswith(self.tag[:length]):
                keep = length
                break
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held
