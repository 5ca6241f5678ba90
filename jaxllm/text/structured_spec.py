"""StructuredOutputs written as a grammar of the llguidance library.

All constraints become one text in that library's variant of Lark, so that the same options apply to
all: nothing but the text decides which tokens are allowed (`no_forcing`), also where only one
spelling in tokens would be the tokenizer's own.
"""

import json
import re
from typing import Any

import llguidance

from jaxllm.structured_outputs import StructuredOutputs
from jaxllm.text.structured_gbnf import gbnf_to_lark

_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
# At the end, so that line numbers in the library's messages are those of the caller's text.
_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z_][\w-]*[ \t]*::=", re.MULTILINE)
_LARK_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*')
_SPECIAL_TOKEN = re.compile(r"<([^<>\s]+)>")

# Where a schema holds further schemas: one, a list of them, or a mapping of names to them.
_ONE = (
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COMBINED = ("allOf", "anyOf", "oneOf", "$ref", "if", "then", "else", "dependentSchemas")


def grammar_text(spec: StructuredOutputs) -> str:
    """The constraint as JSON text of a grammar list of llguidance.

    Raises `ValueError` for a GBNF grammar that cannot be read; other mistakes are found when the
    library compiles the text.
    """
    return json.dumps({"grammars": [{"lark_grammar": lark_text(spec)}]})


def lark_text(spec: StructuredOutputs) -> str:
    """The constraint in llguidance's variant of Lark."""
    kind = spec.kind
    if kind == "json":
        body = _json_rule(json.loads(str(spec.json)), spec)
    elif kind == "json_object":
        body = _json_rule({"type": "object"}, spec)
    elif kind == "regex":
        body = f"start: /{llguidance.regex_to_lark(whole_match(str(spec.regex)), '')}/"
    elif kind == "choice":
        strings = " | ".join(json.dumps(text, ensure_ascii=False) for text in spec.choice or ())
        body = f"start: CHOICE\nCHOICE: {strings}"
    elif is_gbnf(str(spec.grammar)):
        body = gbnf_to_lark(str(spec.grammar))
    else:
        body = str(spec.grammar)
    return body + _OPTIONS


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar is in GBNF (rules are written `name ::= ...`) and not in Lark."""
    return _GBNF_RULE.search(grammar) is not None


def special_token_names(grammar: str) -> list[str]:
    """The special tokens `<name>` that a Lark grammar refers to; its strings are not searched."""
    return _SPECIAL_TOKEN.findall(_LARK_TEXT.sub('""', grammar))


def whole_match(regex: str) -> str:
    """The expression without `^` at its start and `$` at its end: matches are of the whole text."""
    if regex.startswith("^"):
        regex = regex[1:]
    without = regex.removesuffix("$")
    slashes = len(without) - len(without.rstrip("\\"))
    return without if slashes % 2 == 0 else regex


def close_objects(schema: Any) -> Any:
    """The schema with `additionalProperties: false` on every object that names properties.

    Left as they are: objects that say something about further properties themselves, and parts
    that are combined with others (`allOf`, `$ref`, or `anyOf` next to properties): closing one part
    would forbid the properties of the other parts.
    """
    return _closed(schema, combined=False)


def _closed(schema: Any, combined: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    combined = combined or (
        any(key in schema for key in _COMBINED)
        and any(key in schema for key in ("properties", "patternProperties", "allOf", "if"))
    )
    result: dict[str, Any] = {}
    for key, value in schema.items():
        within = combined if key in _COMBINED else False
        if key in _LISTS and isinstance(value, list):
            result[key] = [_closed(part, within) for part in value]
        elif key in _MAPS and isinstance(value, dict):
            result[key] = {name: _closed(part, within) for name, part in value.items()}
        elif key in _ONE:
            result[key] = _closed(value, within)
        else:
            result[key] = value
    named = "properties" in schema or "patternProperties" in schema
    said = "additionalProperties" in schema or "unevaluatedProperties" in schema
    if named and not said and not combined:
        result["additionalProperties"] = False
    return result


def _json_rule(schema: dict[str, Any], spec: StructuredOutputs) -> str:
    if spec.disable_additional_properties:
        schema = close_objects(schema)
    given = schema.get("x-guidance")
    options = dict(given) if isinstance(given, dict) else {}
    if spec.disable_any_whitespace:
        options["whitespace_flexible"] = False
        options.pop("whitespace_pattern", None)
    elif spec.whitespace_pattern is not None:
        options["whitespace_pattern"] = spec.whitespace_pattern
    if options:
        schema = {**schema, "x-guidance": options}
    return "start: %json " + json.dumps(schema, ensure_ascii=False)
