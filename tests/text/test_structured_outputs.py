"""What StructuredOutputs takes and refuses, and how constraints are written as grammars."""

import dataclasses
import json
import sys

import pytest

from jaxllm.errors import ParameterError
from jaxllm.structured_outputs import StructuredOutputs
from jaxllm.text.structured_gbnf import GbnfError, gbnf_to_lark
from jaxllm.text.structured_spec import (
    close_objects,
    is_gbnf,
    lark_text,
    special_token_names,
    whole_match,
)


def nested(depth: int) -> dict:
    """A schema of `depth` levels of JSON."""
    schema: dict = {"const": 1}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "field", "rule"),
    [
        ({}, "structured_outputs", "exactly one"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs", "exactly one"),
        ({"json": {}, "json_object": True}, "structured_outputs", "exactly one"),
        ({"structural_tag": "{}"}, "structural_tag", "not supported"),
        ({"json_object": False}, "json_object", "must be True"),
        ({"json_object": 1}, "json_object", "must be True"),
        ({"json": ""}, "json", "1 to 524288 characters"),
        ({"json": "{"}, "json", "is not JSON"),
        ({"json": "[]"}, "json", "JSON schema"),
        ({"json": "true"}, "json", "JSON schema"),
        ({"json": 3}, "json", "JSON schema"),
        ({"json": '{"const": NaN}'}, "json", "not a JSON number"),
        ({"json": {"const": float("inf")}}, "json", "not a JSON number"),
        ({"json": {"const": {1, 2}}}, "json", "is a set"),
        ({"json": {1: 2}}, "json", "is not a string"),
        ({"json": {"const": "a\0"}}, "json", "NUL"),
        ({"json": {"a\0": 1}}, "json", "NUL"),
        ({"json": r'{"const": "\u0000"}'}, "json", "NUL"),
        ({"json": {"const": "\ud800"}}, "json", "surrogate"),
        ({"json": nested(65)}, "json", "64 levels"),
        ({"json": json.dumps(nested(65))}, "json", "64 levels"),
        ({"json": '{"a":' * 3000 + "1" + "}" * 3000}, "json", "64 levels"),
        ({"json": "[" * 400_000}, "json", "64 levels"),
        ({"json": {"enum": ["x" * 600_000]}}, "json", "524288 characters"),
        ({"json": {"const": 10**5000}}, "json", "cannot be written"),
        ({"regex": ""}, "regex", "1 to 65536"),
        ({"regex": "a" * 65_537}, "regex", "1 to 65536"),
        ({"regex": "a\0"}, "regex", "NUL"),
        ({"regex": 3}, "regex", "must be a string"),
        ({"choice": []}, "choice", "1 to 10000 strings"),
        ({"choice": "abc"}, "choice", "1 to 10000 strings"),
        ({"choice": ["a"] * 10_001}, "choice", "1 to 10000 strings"),
        ({"choice": ["a", ""]}, "choice", "1 to 262144"),
        ({"choice": ["a", 1]}, "choice", "must be a string"),
        ({"choice": ["a" * 200_000, "b" * 100_000]}, "choice", "in all"),
        ({"grammar": ""}, "grammar", "1 to 262144"),
        ({"grammar": "start: \0"}, "grammar", "NUL"),
        ({"regex": "a", "disable_any_whitespace": 1}, "disable_any_whitespace", "True or False"),
        (
            {"regex": "a", "disable_additional_properties": None},
            "disable_additional_properties",
            "True or False",
        ),
        ({"json": {}, "whitespace_pattern": ""}, "whitespace_pattern", "1 to 256"),
        (
            {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
            "whitespace_pattern",
            "contradicts",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_refusals_name_the_field_and_the_limit(fields, field, rule):
    with pytest.raises(ParameterError, match=rule) as error:
        StructuredOutputs(**fields)
    assert error.value.field.removeprefix("structured_outputs.") == field
    assert len(str(error.value)) < 500


def test_schemas_that_refer_to_themselves_in_memory_are_refused():
    loop: dict = {}
    loop["a"] = loop["b"] = loop
    with pytest.raises(ParameterError, match="64 levels"):
        StructuredOutputs(json=loop)
    wide: dict = {"const": 1}
    for _ in range(40):
        wide = {"a": wide, "b": wide}
    with pytest.raises(ParameterError, match="524288"):
        StructuredOutputs(json=wide)


def test_schemas_are_kept_as_text_in_their_order():
    spec = StructuredOutputs(json={"b": 1, "a": [True, None, "é"]})
    assert spec.json == '{"b":1,"a":[true,null,"é"]}'
    assert spec == StructuredOutputs(json=' {"b": 1, "a": [true, null, "\\u00e9"]}')
    assert hash(spec) == hash(StructuredOutputs(json=spec.json))
    assert spec != StructuredOutputs(json={"a": [True, None, "é"], "b": 1})
    assert StructuredOutputs(json=nested(64)).kind == "json"


def test_choices_are_kept_once():
    assert StructuredOutputs(choice=["b", "a", "b"]).choice == ("b", "a")


def test_values_may_be_dicts():
    spec = StructuredOutputs.from_value({"regex": "a", "disable_any_whitespace": False})
    assert spec == StructuredOutputs(regex="a")
    assert StructuredOutputs.from_value(spec) is spec
    with pytest.raises(ParameterError, match="is not one of json, regex"):
        StructuredOutputs.from_value({"pattern": "a"})
    with pytest.raises(ParameterError, match="dict of its fields"):
        StructuredOutputs.from_value("a")
    again = StructuredOutputs(**dataclasses.asdict(StructuredOutputs(json={"a": 1})))
    assert again == StructuredOutputs(json={"a": 1})


def test_plain_data_needs_no_grammar_library():
    import subprocess

    code = (
        "import sys, jaxllm.structured_outputs; "
        "sys.exit('llguidance' in sys.modules or 'jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("regex", "inner"),
    [
        ("^a$", "a"),
        ("a", "a"),
        (r"a\$", r"a\$"),
        (r"^a\\$", r"a\\"),
        (r"\^a", r"\^a"),
        ("$", ""),
        ("^", ""),
    ],
)
def test_anchors_around_an_expression_are_implied(regex, inner):
    assert whole_match(regex) == inner


def closed(**schema):
    return {**schema, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "object"}, {"type": "object"}),
        ({"properties": {"a": {}}}, closed(properties={"a": {}})),
        (
            {"properties": {"a": {}}, "additionalProperties": True},
            {"properties": {"a": {}}, "additionalProperties": True},
        ),
        # A property may be called like a keyword, and constants are not schemas.
        (
            {"properties": {"properties": {"type": "string"}}},
            closed(properties={"properties": {"type": "string"}}),
        ),
        ({"const": {"properties": {"a": 1}}}, {"const": {"properties": {"a": 1}}}),
        (
            {"items": {"properties": {"a": {"patternProperties": {"b": {}}}}}},
            {"items": closed(properties={"a": closed(patternProperties={"b": {}})})},
        ),
        (
            {"$defs": {"x": {"properties": {}}}, "anyOf": [{"properties": {"a": {}}}]},
            {"$defs": {"x": closed(properties={})}, "anyOf": [closed(properties={"a": {}})]},
        ),
        # Closing one part of a combination would forbid what the other parts ask for.
        (
            {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
            {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        ),
        (
            {"properties": {"a": {"properties": {}}}, "anyOf": [{"properties": {"b": {}}}]},
            {
                "properties": {"a": closed(properties={})},
                "anyOf": [{"properties": {"b": {}}}],
            },
        ),
    ],
)
def test_objects_are_closed_where_they_stand_alone(schema, expected):
    before = json.dumps(schema)
    assert close_objects(schema) == expected
    assert json.dumps(schema) == before


def test_dialects_are_told_apart():
    assert is_gbnf('root ::= "a"')
    assert is_gbnf('# comment\n  root-1 ::= "a"')
    assert not is_gbnf('start: "root ::= a"')
    assert not is_gbnf("start: A\nA: /::=/")
    assert lark_text(StructuredOutputs(grammar='root ::= "a"')).startswith("start: R0_ROOT")
    assert lark_text(StructuredOutputs(grammar='start: "a"')).startswith('start: "a"')


def test_special_tokens_are_found_outside_strings():
    grammar = 'start: "<a>" <|b|> /<c>/ // <d>\n  # <e>\nx: <[1-2]> %json {"const": "<f>"}'
    assert special_token_names(grammar) == ["|b|", "[1-2]"]


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('start ::= "a"', "no rule named root"),
        ("root ::= a", "root refers to a, which is not defined"),
        ('root ::= "a"\nroot ::= "b"', "line 2.*defined twice"),
        ('root ::= ("a"', r"expected \)"),
        ('root ::= "a', "line 1: cannot read"),
        ('root ::= "a" )', "expected the name of a rule"),
        ('root ::= "a"**', "expected the name of a rule"),
        ('root ::= "a"\n\nb := "c"', "line 3: cannot read"),
        ("root ::= []", "empty set"),
        ("root ::= [z-a]", "ends before it begins"),
        (r'root ::= "\q"', "unknown escape"),
        (r'root ::= "\ud800"', "not a character"),
        (r"root ::= [\U00110000]", "not a character"),
        ("root ::= " + "(" * 5000, "nested more than 24"),
        ("root", "expected ::="),
    ],
)
def test_mistakes_in_gbnf_name_the_place(grammar, message):
    with pytest.raises(GbnfError, match=message):
        gbnf_to_lark(grammar)


def test_parts_without_recursion_become_one_terminal():
    lark = gbnf_to_lark('root ::= "a" b [x] root | "c" {2} | d?\nb ::= [^-a\\n]+\nd ::= "" | .')
    assert lark.splitlines() == [
        "start: r0_root",
        "r0_root: (T0 r0_root | T1 | T2)",
        r"R1_B: (/[^\x{2D}\x{61}\x{A}]/){1,}",
        'R2_D: ("" | /(?s:.)/)',
        r'T0: "a" R1_B /[\x{78}]/',
        'T1: ("c"){2,2}',
        "T2: (R2_D){0,1}",
    ]
