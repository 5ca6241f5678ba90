"""StructuredOutputs: what the text of an output must look like. Plain data, checked at the door."""

import dataclasses
import json as json_module
import math
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from jaxllm.errors import ParameterError

MAX_JSON_NESTING = 64
MAX_JSON_CHARACTERS = 524_288
MAX_REGEX_CHARACTERS = 65_536
MAX_GRAMMAR_CHARACTERS = 262_144
MAX_CHOICES = 10_000
MAX_CHOICE_CHARACTERS = 262_144
MAX_WHITESPACE_PATTERN_CHARACTERS = 256

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_FIELD = "structured_outputs"
_SHORT = reprlib.Repr(maxlevel=3, maxstring=100, maxother=100)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """One constraint on the text of an output. Names are vLLM's; exactly one constraint is given.

    Immutable and hashable: equal objects ask for the same text.

    Attributes:
      json: a JSON schema, as a dict or as JSON text; kept as text, keys in the order given (it is
        the order in which the properties are written). At most 64 levels and 524,288 characters.
      regex: the whole text matches this regular expression (at most 65,536 characters).
      choice: the text is one of these strings; kept as a tuple without repetitions. At most
        10,000 strings with 262,144 characters in all.
      grammar: a context-free grammar in Lark or GBNF (EBNF) form, at most 262,144 characters.
      json_object: True asks for any JSON object.
      structural_tag: not supported.
      disable_any_whitespace: JSON without whitespace between its parts.
      disable_additional_properties: objects hold only properties that the schema names, where it
        does not say otherwise.
      whitespace_pattern: the whitespace that may stand between parts of the JSON, as a regular
        expression; none is always possible.

    Raises:
      ParameterError: names the field, the value and the limit.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if self.structural_tag is not None:
            raise _error(
                "structural_tag",
                self.structural_tag,
                "is not supported; use json, regex, choice, grammar or json_object",
            )
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ParameterError(
                _FIELD,
                given,
                f"exactly one of {', '.join(CONSTRAINTS[:-1])} must be given",
            )
        set_field = object.__setattr__
        if self.json is not None:
            set_field(self, "json", _checked_schema(self.json))
        if self.regex is not None:
            _check_text("regex", self.regex, MAX_REGEX_CHARACTERS)
        if self.choice is not None:
            set_field(self, "choice", _checked_choices(self.choice))
        if self.grammar is not None:
            _check_text("grammar", self.grammar, MAX_GRAMMAR_CHARACTERS)
        if self.json_object is not None and self.json_object is not True:
            raise _error("json_object", self.json_object, "must be True or left out")
        self._check_options()

    def _check_options(self) -> None:
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise _error(name, getattr(self, name), "must be True or False")
        if self.whitespace_pattern is None:
            return
        _check_text(
            "whitespace_pattern", self.whitespace_pattern, MAX_WHITESPACE_PATTERN_CHARACTERS
        )
        if self.disable_any_whitespace:
            raise _error(
                "whitespace_pattern",
                self.whitespace_pattern,
                "contradicts disable_any_whitespace=True",
            )

    @classmethod
    def from_value(cls, value: "StructuredOutputs | Mapping[str, Any]") -> "StructuredOutputs":
        """The object itself, or one made from a mapping of its fields.

        Raises `ParameterError` for anything else and for unknown fields.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ParameterError(_FIELD, value, "must be StructuredOutputs or a dict of its fields")
        names = [field.name for field in dataclasses.fields(cls)]
        for name in value:
            if name not in names:
                raise ParameterError(_FIELD, name, f"is not one of {', '.join(names)}")
        return cls(**value)

    @property
    def kind(self) -> str:
        """Which constraint is given: the name of its field."""
        return next(name for name in CONSTRAINTS if getattr(self, name) is not None)


def _checked_schema(schema: object) -> str:
    """The schema as JSON text, keys in the order given."""
    if isinstance(schema, str):
        _check_text("json", schema, MAX_JSON_CHARACTERS)
        schema = _parsed(schema)
    if not isinstance(schema, dict):
        raise _error("json", schema, "must be a JSON schema: a dict, or JSON text of an object")
    too_long = f"must have at most {MAX_JSON_CHARACTERS} characters"
    for count, (node, depth) in enumerate(_nodes(schema)):
        if depth > MAX_JSON_NESTING:
            raise _error("json", schema, f"must be nested at most {MAX_JSON_NESTING} levels deep")
        if count > MAX_JSON_CHARACTERS:
            raise _error("json", schema, too_long)
        _check_node(node)
    try:
        text = json_module.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    except ValueError as error:
        raise _error("json", schema, f"cannot be written as JSON: {error}") from None
    if len(text) > MAX_JSON_CHARACTERS:
        raise _error("json", text, too_long)
    return text


def _parsed(text: str) -> object:
    try:
        return json_module.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise _error(
            "json", text, f"must be nested at most {MAX_JSON_NESTING} levels deep"
        ) from None
    except ParameterError:
        raise
    except ValueError as error:
        raise _error("json", text, f"is not JSON: {error}") from None


def _refuse_constant(name: str) -> None:
    raise _error("json", name, "is not a JSON number")


def _nodes(schema: object) -> Iterator[tuple[object, int]]:
    """Every key and value with its depth; the schema itself has depth 1. Stops below the limit."""
    pending = [(schema, 1)]
    while pending:
        node, depth = pending.pop()
        yield node, depth
        if depth > MAX_JSON_NESTING:
            continue
        if isinstance(node, dict):
            pending.extend((key, depth) for key in node)
            pending.extend((value, depth + _is_nested(value)) for value in node.values())
        elif isinstance(node, (list, tuple)):
            pending.extend((value, depth + _is_nested(value)) for value in node)


def _is_nested(value: object) -> bool:
    return isinstance(value, (dict, list, tuple))


def _check_node(node: object) -> None:
    if isinstance(node, dict):
        for key in node:
            if not isinstance(key, str):
                raise _error("json", key, "is not a string; keys of JSON objects are")
    elif isinstance(node, str):
        _check_characters("json", node)
    elif isinstance(node, float):
        if not math.isfinite(node):
            raise _error("json", node, "is not a JSON number")
    elif not (node is None or isinstance(node, (bool, int, list, tuple))):
        raise _error("json", node, f"is a {type(node).__name__}, which JSON cannot hold")


def _checked_choices(choices: object) -> tuple[str, ...]:
    if not isinstance(choices, (list, tuple)) or not 1 <= len(choices) <= MAX_CHOICES:
        raise _error("choice", choices, f"must be a list of 1 to {MAX_CHOICES} strings")
    for choice in choices:
        _check_text("choice", choice, MAX_CHOICE_CHARACTERS)
    if (total := sum(map(len, choices))) > MAX_CHOICE_CHARACTERS:
        raise _error(
            "choice",
            f"{len(choices)} strings of {total} characters",
            f"must have at most {MAX_CHOICE_CHARACTERS} characters in all",
        )
    return tuple(dict.fromkeys(choices))


def _check_text(field: str, text: object, limit: int) -> None:
    if not isinstance(text, str) or not text or len(text) > limit:
        raise _error(field, text, f"must be a string of 1 to {limit} characters")
    _check_characters(field, text)


def _check_characters(field: str, text: str) -> None:
    if "\0" in text:
        raise _error(field, text, "must not contain NUL characters")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _error(field, text, "has a lone surrogate, which no UTF-8 text can hold") from None


def _error(field: str, value: object, rule: str) -> ParameterError:
    """An error that shows the beginning of the value: some are megabytes long."""
    return ParameterError(f"{_FIELD}.{field}", _Shown(value), rule)


class _Shown:
    """A value whose `repr` is short, however long or deep it is."""

    __slots__ = ("_text",)

    def __init__(self, value: object):
        try:
            self._text = _SHORT.repr(value)
        except ValueError:
            # An integer of more digits than Python writes.
            self._text = f"<{type(value).__name__}>"

    def __repr__(self) -> str:
        return self._text
