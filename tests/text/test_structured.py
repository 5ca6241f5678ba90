"""Masks against brute force, and outputs drawn under masks against independent checkers."""

import ast
import json
import random
import re
import threading

import jsonschema
import numpy as np
import pytest
import regex as regex_module

from jaxllm.structured_outputs import StructuredOutputs
from jaxllm.text.structured import GrammarCompiler, GrammarError
from jaxllm.text.tokenizer import Tokenizer
from tests.text.small_tokenizers import sentencepiece_backend, word_backend
from tests.text.structured_walks import Walker, accepts, allowed

EOS = 2
WIDE = "日本é😀"


@pytest.fixture(scope="module")
def bytes_compiler(byte_level):
    compiler = GrammarCompiler(byte_level, 352, [1])
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def pieces():
    # Without a Strip decoder the bytes of a token are what decode shows.
    return Tokenizer(sentencepiece_backend(strip=False), name="pieces", eos_token_id=EOS)


@pytest.fixture(scope="module")
def pieces_compiler(pieces):
    compiler = GrammarCompiler(pieces, pieces.vocab_size, [EOS, 3])
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def real_compiler(smollm2):
    compiler = GrammarCompiler(smollm2, smollm2.vocab_size, [smollm2.eos_token_id])
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def walker(real_compiler, smollm2):
    return Walker(real_compiler, smollm2, smollm2.eos_token_id)


def completions(data: bytes) -> list[str]:
    """The texts that `data` can begin, as far as an unfinished character at its end matters."""
    for cut in range(min(4, len(data) + 1)):
        head, tail = data[: len(data) - cut], data[len(data) - cut :]
        try:
            text = head.decode()
        except UnicodeDecodeError:
            continue
        if not tail:
            return [text]
        return [text + c for c in WIDE if c.encode().startswith(tail) and c.encode() != tail]
    return []


def viable_regex(pattern):
    compiled = regex_module.compile(pattern)

    def viable(data: bytes) -> bool:
        return any(compiled.fullmatch(text, partial=True) for text in completions(data))

    def complete(data: bytes) -> bool:
        try:
            return re.fullmatch(pattern, data.decode()) is not None
        except UnicodeDecodeError:
            return False

    return viable, complete


def viable_finite(texts):
    whole = [text.encode() for text in texts]
    return (lambda data: any(t.startswith(data) for t in whole)), (lambda data: data in whole)


def viable_parentheses():
    """`root ::= "(" root ")" | "x"*`"""
    shape = re.compile(rb"\(*x*\)*")

    def viable(data: bytes) -> bool:
        opened, closed = data.count(b"("), data.count(b")")
        return shape.fullmatch(data) is not None and closed <= opened

    return viable, lambda data: viable(data) and data.count(b"(") == data.count(b")")


FINITE = ["the fox", "the", "日本語", "日本", "é", '"quoted"', "</s>", "<s>", "a\nb", "/x/"]
SMALL_SCHEMA = {
    "type": "object",
    "properties": {"the": {"enum": ["fox", "日", 'a"b', 1, None]}, "b": {"type": "boolean"}},
    "required": ["the"],
    "additionalProperties": False,
}
SMALL_OBJECTS = [
    json.dumps({"the": value} | more, separators=(",", ":"), ensure_ascii=False)
    for value in SMALL_SCHEMA["properties"]["the"]["enum"]
    for more in ({}, {"b": True}, {"b": False})
]
BRUTE_FORCE = {
    "choice": (StructuredOutputs(choice=FINITE), viable_finite(FINITE)),
    "regex": (
        StructuredOutputs(regex="(the|fo+x )*[0-9]{2,3}"),
        viable_regex("(the|fo+x )*[0-9]{2,3}"),
    ),
    "wide regex": (
        StructuredOutputs(regex="^[日本é😀]{2,5}( |日a)*$"),
        viable_regex("[日本é😀]{2,5}( |日a)*"),
    ),
    "json": (
        StructuredOutputs(json=SMALL_SCHEMA, disable_any_whitespace=True),
        viable_finite(SMALL_OBJECTS),
    ),
    "lark": (
        StructuredOutputs(grammar='start: "(" start ")" | X\nX: "x"*'),
        viable_parentheses(),
    ),
    "gbnf": (
        StructuredOutputs(grammar='root ::= "(" root ")" | "x"*'),
        viable_parentheses(),
    ),
}


@pytest.mark.parametrize("name", BRUTE_FORCE)
@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_a_token_is_allowed_exactly_where_the_text_can_go_on(kind, name, request):
    compiler = request.getfixturevalue(f"{kind}_compiler")
    tokenizer = request.getfixturevalue("byte_level" if kind == "bytes" else "pieces")
    eos = {1} if kind == "bytes" else {EOS, 3}
    spec, (viable, complete) = BRUTE_FORCE[name]
    draw = random.Random(name)
    text_tokens = [
        (token, data)
        for token in range(tokenizer.vocab_size)
        if token not in tokenizer.special_ids and (data := tokenizer.token_to_bytes(token))
    ]
    for _ in range(6):
        state, text = compiler.compile(spec).new_state(), b""
        for _ in range(25):
            expected = {token for token, data in text_tokens if viable(text + data)}
            if complete(text):
                expected |= eos
            tokens = set(allowed(state, compiler))
            assert tokens == expected, text
            assert state.can_end == complete(text), text
            assert state.is_terminated == (tokens <= eos)
            if not tokens - eos:
                break
            refused = draw.choice([t for t in range(tokenizer.vocab_size) if t not in tokens])
            assert not state.accept(refused)
            token = draw.choice(sorted(tokens - eos))
            assert state.accept(token)
            text += tokenizer.token_to_bytes(token)


def test_rows_beyond_the_vocabulary_are_never_allowed(byte_level, bytes_compiler):
    assert bytes_compiler.vocab_size > byte_level.vocab_size
    for spec in (
        StructuredOutputs(regex="(?s:.*)"),
        StructuredOutputs(grammar='start: (<[0-351]> | "a")*'),
        StructuredOutputs(grammar='start: (<[*]> | "a")*'),
    ):
        state = bytes_compiler.compile(spec).new_state()
        tokens = allowed(state, bytes_compiler)
        assert max(tokens) < byte_level.vocab_size
        assert not state.accept(byte_level.vocab_size)
        assert not state.accept(bytes_compiler.vocab_size)
        assert not state.accept(-1)
        assert state.accept(tokens[-1])


def test_special_tokens_never_stand_for_their_names(byte_level, bytes_compiler):
    tool = byte_level.encode("<|tool|>")
    assert tool == [2]
    state = bytes_compiler.compile(StructuredOutputs(choice=["<|tool|>", "</s>"])).new_state()
    assert not state.accept(tool[0])
    assert not state.accept(1)
    for byte in b"</s>":
        assert allowed(state, bytes_compiler) != [1]
        token = next(t for t in range(320) if byte_level.token_to_bytes(t) == bytes([byte]))
        assert state.accept(token)
    assert allowed(state, bytes_compiler) == [1]


def test_a_grammar_may_name_special_tokens_but_not_the_end(byte_level, bytes_compiler):
    grammar = bytes_compiler.compile(StructuredOutputs(grammar='start: <|tool|> "a" | "b"'))
    state = grammar.new_state()
    names = [byte_level.token_to_bytes(t) for t in allowed(state, bytes_compiler)]
    assert names == [b"<|tool|>", b"b"]
    assert state.accept(2)
    assert [byte_level.token_to_bytes(t) for t in allowed(state, bytes_compiler)] == [b"a"]
    with pytest.raises(GrammarError, match="names </s>"):
        bytes_compiler.compile(StructuredOutputs(grammar='start: "a" </s>'))


def test_end_tokens_inside_a_range_do_not_end_the_output(bytes_compiler):
    state = bytes_compiler.compile(StructuredOutputs(grammar='start: <[0-2]> "a"')).new_state()
    assert allowed(state, bytes_compiler) == [0, 2]
    assert not state.accept(1)
    assert state.accept(0)
    stuck = bytes_compiler.compile(StructuredOutputs(grammar='start: "a" <[1]>')).new_state()
    mask = np.full(bytes_compiler.mask_words, -1, np.int32)
    assert stuck.accept(next(t for t in allowed(stuck, bytes_compiler)))
    with pytest.raises(GrammarError, match="only an end token fits"):
        stuck.fill_mask(mask)
    assert not mask.any()


def test_after_the_end_only_end_tokens_are_accepted(bytes_compiler, pieces_compiler, byte_level):
    for compiler, ends in ((bytes_compiler, [1]), (pieces_compiler, [EOS, 3])):
        for end in ends:
            state = compiler.compile(StructuredOutputs(regex="x?")).new_state()
            assert state.can_end
            assert not state.is_terminated
            assert state.accept(end)
            assert state.is_terminated
            assert allowed(state, compiler) == ends
            assert state.accept(ends[0])
            others = [t for t in range(compiler.vocab_size) if t not in ends]
            assert not any(state.accept(token) for token in others)


def test_without_end_tokens_a_complete_text_allows_nothing(byte_level):
    compiler = GrammarCompiler(byte_level, byte_level.vocab_size, [])
    state = compiler.compile(StructuredOutputs(choice=["a"])).new_state()
    assert state.accept(allowed(state, compiler)[0])
    assert state.is_terminated
    assert allowed(state, compiler) == []
    compiler.close()


def test_copies_go_their_own_ways(bytes_compiler):
    first = bytes_compiler.compile(StructuredOutputs(regex="ab|ac")).new_state()
    assert first.accept(allowed(first, bytes_compiler)[0])
    second = first.copy()
    b, c = allowed(first, bytes_compiler)
    assert first.accept(b)
    assert allowed(second, bytes_compiler) == [b, c]
    assert second.accept(c)
    assert first.is_terminated
    assert second.is_terminated


def test_masks_of_many_states_are_those_of_each_alone(bytes_compiler, byte_level):
    draw = random.Random(1)
    specs = [spec for spec, _ in BRUTE_FORCE.values()]
    states = [bytes_compiler.compile(draw.choice(specs)).new_state() for _ in range(32)]
    rows = draw.sample(range(48), 32)
    out = np.full((48, bytes_compiler.mask_words), 7, np.int32)
    for _ in range(8):
        assert bytes_compiler.fill_masks(states, rows, out) == {}
        for state, row in zip(states, rows, strict=True):
            alone = np.zeros(bytes_compiler.mask_words, np.int32)
            state.fill_mask(alone)
            assert (out[row] == alone).all()
            state.accept(draw.choice(allowed(state, bytes_compiler)))
    assert (out[[row for row in range(48) if row not in rows]] == 7).all()
    assert bytes_compiler.fill_masks([], [], out) == {}


def test_masks_of_the_wrong_shape_are_refused(bytes_compiler):
    state = bytes_compiler.compile(StructuredOutputs(regex="a")).new_state()
    words = bytes_compiler.mask_words
    for out in (
        np.zeros(words + 1, np.int32),
        np.zeros(words, np.uint8),
        np.zeros((1, words), np.int32),
        np.zeros(2 * words, np.int32)[::2],
    ):
        with pytest.raises(ValueError, match="masks must be"):
            state.fill_mask(out)
    with pytest.raises(ValueError, match="masks must be"):
        bytes_compiler.fill_masks([state], [0], np.zeros((2, 2 * words), np.int32)[:, ::2])
    with pytest.raises(ValueError, match="out of bounds"):
        bytes_compiler.fill_masks([state], [3], np.zeros((2, words), np.int32))


def test_grammars_and_refusals_are_kept(byte_level):
    compiler = GrammarCompiler(byte_level, byte_level.vocab_size, [1], cache_size=2)
    specs = [StructuredOutputs(regex=text) for text in ("a", "b", "c")]
    a, b = map(compiler.compile, specs[:2])
    assert compiler.compile(StructuredOutputs(regex="a")) is a
    compiler.compile(specs[2])
    assert compiler.compile(specs[0]) is a
    assert compiler.compile(specs[1]) is not b
    bad = StructuredOutputs(regex="(")
    messages = []
    for _ in range(2):
        with pytest.raises(GrammarError, match="unclosed group") as error:
            compiler.compile(bad)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    with pytest.raises(GrammarError, match="unclosed group"):
        compiler.compile_later(bad).result(30)
    assert compiler.compile_later(specs[0]).result(30).new_state().can_end is False
    compiler.close()


def test_threads_that_ask_for_the_same_grammar_get_the_same(byte_level):
    compiler = GrammarCompiler(byte_level, byte_level.vocab_size, [1])
    found = []
    spec = StructuredOutputs(json={"type": "array", "items": {"type": "integer"}})
    threads = [
        threading.Thread(target=lambda: found.append(compiler.compile(spec))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
    compiler.close()


def test_tokenizers_whose_tokens_have_no_bytes_of_their_own_are_refused():
    words = Tokenizer(word_backend(), name="words")
    with pytest.raises(GrammarError, match="words"):
        GrammarCompiler(words, words.vocab_size, [2])


NODE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": -5, "maximum": 5},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS = {
    "string": {"type": "string", "maxLength": 12},
    "string of a length": {"type": "string", "minLength": 3, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
    "integer": {"type": "integer", "minimum": -17, "maximum": 1200},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    "number": {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5},
    "enum": {"enum": ["a", 1, None, True, {"x": [1, 2]}, 'quo"te', "日本"]},
    "const": {"const": {"fixed": ["value", 0.5]}},
    "nullable": {"type": ["string", "null"], "maxLength": 4},
    "object": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": {"const": 3}},
        "required": ["c"],
        "additionalProperties": False,
    },
    "map": {
        "type": "object",
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
        "maxProperties": 3,
    },
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer", "maximum": 9, "minimum": 0}, {"enum": ["x", "y"]}],
        "items": False,
        "minItems": 2,
    },
    "nested": {
        "type": "object",
        "properties": {
            "point": {
                "type": "object",
                "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
                "required": ["x", "y"],
                "additionalProperties": False,
            },
            "tags": {
                "type": "array",
                "items": {"type": "string", "maxLength": 3},
                "maxItems": 3,
            },
        },
        "required": ["point", "tags"],
        "additionalProperties": False,
    },
    "any of": {
        "anyOf": [
            {"type": "string", "maxLength": 2},
            {"type": "array", "items": {"type": "null"}, "maxItems": 2},
            {
                "type": "object",
                "properties": {"kind": {"const": "z"}},
                "required": ["kind"],
                "additionalProperties": False,
            },
        ]
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"enum": [3]}}, "required": ["b"]},
        ],
    },
    "recursive": NODE,
    "date": {"type": "string", "format": "date"},
    "address": {"type": "string", "format": "ipv4"},
    "identifier": {"type": "string", "format": "uuid"},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x[0-9]{1,2}$": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "definition": {
        "definitions": {"word": {"type": "string", "pattern": "^[a-z]{1,6}$"}},
        "type": "array",
        "items": {"$ref": "#/definitions/word"},
        "minItems": 2,
        "maxItems": 3,
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_walks_under_a_schema_are_valid_json(name, walker):
    schema = SCHEMAS[name]
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for seed in range(6):
        spec = StructuredOutputs(
            json=schema if seed % 2 else json.dumps(schema),
            disable_any_whitespace=seed % 3 == 0,
            whitespace_pattern=" " if seed % 3 == 1 else None,
            disable_additional_properties=seed % 2 == 0,
        )
        text = walker.output(spec, seed)
        value = json.loads(text)
        validator.validate(value)
        if spec.disable_any_whitespace and not re.search(r'"[^"]*\s', text):
            assert not re.search(r"\s", text)


def test_walks_of_any_object_are_objects(walker):
    for seed in range(5):
        text = walker.output(StructuredOutputs(json_object=True, disable_any_whitespace=True), seed)
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{3}-\d{4}",
        r"[A-Z][a-z]{1,8}( [A-Z][a-z]{1,8}){0,2}",
        r"(yes|no|maybe)[.!?]",
        r"^#[0-9a-fA-F]{6}$",
        r"https?://[a-z0-9.-]{1,20}/[^\s?#]{0,10}",
        r"(?i:hello) w(or)?ld/\w{1,4}",
        r"[^a-z]{2,4}\n?\$",
        r"(a|ab)(c|bcd)(d*){0,2}",
    ],
)
def test_walks_under_a_regex_match_it(pattern, walker):
    for seed in range(5):
        text = walker.output(StructuredOutputs(regex=pattern), seed)
        assert re.fullmatch(pattern, text), text


def test_walks_under_choices_give_each_of_them(walker):
    choices = ["positive", "negative", "pos", " leading", "日本語", 'with "quotes" and \\', "a\tb"]
    found = {walker.output(StructuredOutputs(choice=choices), seed) for seed in range(60)}
    assert found == set(choices)


ARITHMETIC = """
start: expr
expr: expr ("+" | "-") term | term
term: term ("*" | "/") factor | factor
factor: NUMBER | "(" expr ")"
NUMBER: /[1-9][0-9]{0,3}/
"""
ARITHMETIC_GBNF = r"""
# the same, right-recursive, with a comment
root   ::= term ([-+] term)*
term   ::= factor ([*/] factor)*
factor ::= number | "(" root ")"
number ::= [1-9] [0-9]{0,3}
"""


@pytest.mark.parametrize("grammar", [ARITHMETIC, ARITHMETIC_GBNF], ids=["lark", "gbnf"])
def test_walks_under_a_grammar_parse(grammar, walker):
    for seed in range(8):
        text = walker.output(StructuredOutputs(grammar=grammar), seed, hurry_after=15)
        ast.parse(text, mode="eval")
        assert re.fullmatch(r"[-+*/()0-9]+", text)


def test_whitespace_between_parts_of_json(bytes_compiler, byte_level):
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}

    def ok(text, **options):
        spec = StructuredOutputs(json=schema, **options)
        return accepts(bytes_compiler, byte_level, spec, text)

    loose, compact, two = '{\n "a"  : 1}', '{"a":1}', '{"a": 1, "b":  2}'
    assert ok(loose)
    assert ok(compact)
    assert ok(two)
    assert not ok(" " + compact)
    assert ok(compact, disable_any_whitespace=True)
    assert not ok(loose, disable_any_whitespace=True)
    assert ok('{"a": 1}', whitespace_pattern="[ ]?")
    assert ok(compact, whitespace_pattern="[ ]?")
    assert not ok(two, whitespace_pattern="[ ]?")
    assert not ok('{"a": 1, "b":2}', disable_additional_properties=True)
