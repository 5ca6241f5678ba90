"""Reads one tool call, `{"name": ..., "arguments": {...}}`, while it is written.

A state machine over characters: linear in the text, no backtracking, nothing evaluated. Arguments
are passed on as the very text the model wrote.
"""

import enum

import msgspec

_SPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")


class _State(enum.Enum):
    START = 0
    BEFORE_KEY = 1
    IN_KEY = 2
    COLON = 3
    BEFORE_VALUE = 4
    IN_VALUE = 5
    AFTER_VALUE = 6
    END = 7
    MALFORMED = 8


class ValueScanner:
    """Finds the end of one JSON value."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_is_string", "_started")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = self._is_string = self._started = False

    @property
    def is_string(self) -> bool:
        return self._is_string

    def take(self, character: str) -> tuple[bool, bool]:
        """(the character belongs to the value, the value is complete)."""
        if not self._started:
            self._started = True
            self._is_string = character == '"'
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                return True, self._depth == 0
            return True, False
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            if self._depth == 0:
                return False, True
            self._depth -= 1
            return True, self._depth == 0
        elif self._depth == 0 and (character == "," or character in _SPACE):
            return False, True
        return True, False


class CallScanner:
    """One call.

    Attributes:
      name: of the tool, None until it is complete.
      raw: everything read so far, kept only while the name is unknown.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.raw: list[str] = []
        self._state = _State.START
        self._key: list[str] = []
        self._escaped = False
        self._current_key = ""
        self._value = ValueScanner()
        self._text: list[str] = []
        self._arguments: list[str] = []
        self._has_arguments = False

    @property
    def is_complete(self) -> bool:
        return self._state is _State.END

    @property
    def is_malformed(self) -> bool:
        """It is no call, or no JSON."""
        return self._state is _State.MALFORMED

    def feed(self, text: str) -> int:
        """Reads on; returns how many characters were the call's."""
        for place, character in enumerate(text):
            if self.name is None:
                self.raw.append(character)
            self._take(character)
            if self._state in (_State.END, _State.MALFORMED):
                return place + 1
        return len(text)

    def take_arguments(self) -> str:
        """New text of the arguments; "" while the name is unknown."""
        if self.name is None:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _take(self, character: str) -> None:
        state = self._state
        if state is _State.IN_VALUE:
            self._take_value(character)
        elif state is _State.IN_KEY:
            self._take_key(character)
        elif character in _SPACE:
            return
        elif state is _State.START:
            self._state = _State.BEFORE_KEY if character == "{" else _State.MALFORMED
        elif state is _State.BEFORE_KEY:
            if character == '"':
                self._key = []
                self._state = _State.IN_KEY
            elif character == "}":
                self._end()
            else:
                self._state = _State.MALFORMED
        elif state is _State.COLON:
            self._state = _State.BEFORE_VALUE if character == ":" else _State.MALFORMED
        elif state is _State.BEFORE_VALUE:
            self._value = ValueScanner()
            self._text = []
            self._state = _State.IN_VALUE
            self._take_value(character)
        elif state is _State.AFTER_VALUE:
            if character == ",":
                self._state = _State.BEFORE_KEY
            elif character == "}":
                self._end()
            else:
                self._state = _State.MALFORMED

    def _take_key(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
            self._key.append(character)
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._current_key = "".join(self._key)
            self._state = _State.COLON
        else:
            self._key.append(character)

    def _take_value(self, character: str) -> None:
        belongs, complete = self._value.take(character)
        is_arguments = self._current_key in _ARGUMENT_KEYS and not self._has_arguments
        if belongs:
            if is_arguments and not self._value.is_string:
                self._arguments.append(character)
            elif is_arguments or self._current_key == "name":
                self._text.append(character)
        if not complete:
            return
        self._state = _State.AFTER_VALUE
        if is_arguments:
            self._has_arguments = True
            if self._value.is_string:
                # Arguments that are JSON inside a JSON string.
                self._arguments.append(_string("".join(self._text)) or "")
        elif self._current_key == "name" and self.name is None:
            self.name = _string("".join(self._text))
            if not self.name:
                self.name = None
                self._state = _State.MALFORMED
                return
            self.raw.clear()
        if not belongs:
            self._take(character)

    def _end(self) -> None:
        if self.name is None:
            self._state = _State.MALFORMED
            return
        if not self._has_arguments:
            self._arguments.append("{}")
        self._state = _State.END


def _string(text: str) -> str | None:
    try:
        return msgspec.json.decode(text.encode("utf-8", "replace"), type=str)
    except msgspec.DecodeError:
        return None
