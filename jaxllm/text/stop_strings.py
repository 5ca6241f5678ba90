"""Stop strings in a stream of text: found across deltas, never leaked, nothing held without need.

One Aho-Corasick automaton (Aho and Corasick, 1975) follows all stop strings at once. Its state is
the longest end of the text that begins some stop string, which is just what must be held back.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxllm.text.errors import TextError

MAX_STOP_CHARACTERS = 16_384


class StopResult(NamedTuple):
    """Text that may go out now, and the stop string that ended the output, if one did."""

    text: str
    matched: str | None = None


class StopChecker:
    """Stop strings of one output stream.

    The stop string that is complete first ends the output; of several that are complete with the
    same character, the first in the list. The text ends before it, or with it if
    `include_stop_str_in_output`; then nothing needs to be held back at all.
    """

    __slots__ = ("_automaton", "_first", "_held", "_include", "_matched", "_state", "_stop")

    def __init__(self, stop: Sequence[str], include_stop_str_in_output: bool = False):
        if "" in stop:
            raise TextError("stop holds an empty string; each must have at least one character")
        if (characters := sum(map(len, stop))) > MAX_STOP_CHARACTERS:
            raise TextError(
                f"stop strings have {characters} characters together; "
                f"{MAX_STOP_CHARACTERS} are allowed"
            )
        self._stop = tuple(stop)
        self._automaton = _build(self._stop)
        self._first = self._automaton.first
        self._include = include_stop_str_in_output
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the output, None while there is none."""
        return self._matched

    def feed(self, delta: str, search: bool = True) -> StopResult:
        """Take the next text. Without `search` no stop string may complete in it (min_tokens).

        Text fed after a match is dropped.
        """
        if self._matched is not None:
            return StopResult("", self._matched)
        if self._state == 0 and self._first.search(delta) is None:
            return StopResult(delta)
        end, found = self._follow(delta, search)
        text = self._held + delta
        if found is None:
            keep = 0 if self._include else self._automaton.hold[self._state]
            self._held = text[len(text) - keep :]
            return StopResult(text[: len(text) - keep])
        self._matched = self._stop[found]
        cut = len(self._held) + end
        self._held = ""
        return StopResult(
            text[:cut] if self._include else text[: cut - len(self._matched)], self._matched
        )

    def finish(self) -> StopResult:
        """Release what is held: the output is over, so it will not become a stop string."""
        text, self._held = self._held, ""
        return StopResult(text, self._matched)

    def _follow(self, delta: str, search: bool) -> tuple[int, int | None]:
        """Advance over `delta`; the place after the first completion and its index in the list."""
        automaton = self._automaton
        children, fail, found = automaton.children, automaton.fail, automaton.found
        state, at, length = self._state, 0, len(delta)
        while at < length:
            if state == 0:
                begin = self._first.search(delta, at)
                if begin is None:
                    break
                at = begin.start()
            character = delta[at]
            at += 1
            while (after := children[state].get(character)) is None and state:
                state = fail[state]
            state = after or 0
            if search and (index := found[state]) is not None:
                self._state = state
                return at, index
        self._state = state
        return at, None


@dataclass(frozen=True, slots=True)
class _Automaton:
    """States are the beginnings of stop strings; 0 is the empty one.

    children[s][c]: the state of s with c added. fail[s]: the longest proper end of s that is a
    state. found[s]: the first stop string in the list that is an end of s. hold[s]: length of the
    longest end of s that a further character could bring closer to a stop string.
    """

    children: list[dict[str, int]]
    fail: list[int]
    found: list[int | None]
    hold: list[int]
    first: re.Pattern[str]


def _build(stop: tuple[str, ...]) -> _Automaton:
    children: list[dict[str, int]] = [{}]
    depth = [0]
    found: list[int | None] = [None]
    for index, text in enumerate(stop):
        state = 0
        for character in text:
            if character not in children[state]:
                children[state][character] = len(children)
                children.append({})
                depth.append(depth[state] + 1)
                found.append(None)
            state = children[state][character]
        found[state] = index if found[state] is None else found[state]
    fail = [0] * len(children)
    hold = [0] * len(children)
    queue = [0]
    for state in queue:  # breadth first: the queue grows while it is read
        for character, child in children[state].items():
            back = fail[state]
            while character not in children[back] and back:
                back = fail[back]
            fail[child] = children[back].get(character, 0) if state else 0
            own, behind = found[child], found[fail[child]]
            if own is None or (behind is not None and behind < own):
                found[child] = behind
            hold[child] = depth[child] if children[child] else hold[fail[child]]
            queue.append(child)
    characters = "".join(re.escape(character) for character in children[0])
    # No character is in an empty class; "(?!)" never matches either.
    return _Automaton(
        children, fail, found, hold, re.compile(f"[{characters}]" if characters else "(?!)")
    )
