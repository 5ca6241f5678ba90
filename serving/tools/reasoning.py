"""Reasoning between `<think>` and `</think>`, apart from the answer."""

from collections.abc import Sequence

from serving.tools.pieces import Piece, Reasoning, TagFinder, TextParser

REASONING_PARSERS = ("deepseek_r1", "qwen3")


class ThinkParser:
    """Splits reasoning off, and gives the rest to another parser.

    Args:
      inner: parses the answer.
      starts_inside: the prompt ends with `<think>`, or the model leaves it out, so the text begins
        as reasoning; a text without `</think>` is then all reasoning.
    """

    def __init__(self, inner: TextParser, starts_inside: bool):
        self._inner = inner
        self._open = TagFinder("<think>")
        self._close = TagFinder("</think>")
        self._otherwise = "inside" if starts_inside else "after"
        self._mode = "before"
        self._start = ""
        self._trim = True

    def feed(self, text: str) -> Sequence[Piece]:
        out: list[Piece] = []
        if self._mode == "before" and not (text := self._begin(text)):
            return out
        if self._mode == "inside":
            before, rest = self._close.feed(text)
            self._reasoning(before, out)
            if rest is None:
                return out
            self._mode, self._trim = "after", True
            text = rest
        if self._trim:
            # The line ends between reasoning and answer belong to neither.
            text = text.lstrip("\n")
            self._trim = not text
        if text:
            out += self._inner.feed(text)
        return out

    def finish(self) -> Sequence[Piece]:
        out: list[Piece] = []
        if self._mode == "inside":
            self._reasoning(self._close.finish(), out)
        elif self._mode == "before" and self._start:
            if self._otherwise == "inside":
                out.append(Reasoning(self._start))
            else:
                out += self._inner.feed(self._start)
        return [*out, *self._inner.finish()]

    def _begin(self, text: str) -> str:
        """Finds out whether the text begins with the tag; "" while that is open."""
        self._start += text
        body = self._start.lstrip("\n ")
        if body.startswith("<think>"):
            self._mode = "inside"
            return body[len("<think>") :]
        if "<think>".startswith(body):
            return ""
        self._mode, self._trim = self._otherwise, self._otherwise == "inside"
        return self._start

    def _reasoning(self, text: str, out: list[Piece]) -> None:
        if self._trim:
            text = text.lstrip("\n")
            self._trim = not text
        if text:
            out.append(Reasoning(text))
