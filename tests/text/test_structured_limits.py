"""Hostile constraints: a typed error or bounded work, within a time bound, and for them alone."""

import json
import random
import signal
import threading
import time

import numpy as np
import pytest

from jaxllm.structured_outputs import StructuredOutputs
from jaxllm.text import structured_grammar
from jaxllm.text.structured import GrammarCompiler, GrammarError, GrammarLimits
from jaxllm.text.structured_check import GrammarChecker
from jaxllm.text.structured_library import TokenTable, compile_matcher, library_tokenizer
from jaxllm.text.structured_spec import grammar_text
from tests.text.structured_walks import allowed

# Generous beside the limits: the tests may share their processors.
SECONDS = 40.0
LIMITS = GrammarLimits(compile_seconds=2.0)


@pytest.fixture(scope="module")
def compiler(byte_level):
    compiler = GrammarCompiler(byte_level, byte_level.vocab_size, [1], limits=LIMITS)
    compiler.compile(StructuredOutputs(regex="warm up"))
    yield compiler
    compiler.close()


def chain(length: int) -> dict:
    links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)}
    return {"$defs": {**links, f"a{length}": {"type": "null"}}, "$ref": "#/$defs/a0"}


def deep(levels: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED = {
    "open group": ({"regex": "("}, "unclosed group"),
    "bad escape": ({"regex": r"a\Z"}, "unrecognized escape"),
    "look-ahead": ({"regex": "(?=a)b"}, "look-around"),
    "look-behind": ({"regex": "(?<!a)b"}, "look-around"),
    "word border": ({"regex": r"\bfoo\b"}, "lookarounds not supported"),
    "back reference": ({"regex": r"(a)\1"}, "backreferences"),
    "5000 groups": ({"regex": "(" * 5000 + "a" + ")" * 5000}, "nest limit|regex"),
    "unknown type": ({"json": {"type": "strin"}}, "strin"),
    "unknown format": ({"json": {"type": "string", "format": "haiku"}}, "haiku"),
    "remote reference": ({"json": {"$ref": "https://example.org/x.json"}}, "example"),
    "missing reference": ({"json": {"$ref": "#/$defs/no"}}, "no"),
    "refers to itself": ({"json": {"$ref": "#"}}, "no token"),
    "unsatisfiable": ({"json": {"type": "integer", "minimum": 3, "maximum": 1}}, "nsatisfiable"),
    "overlapping oneOf": (
        {"json": {"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 1}]}},
        "oneOf",
    ),
    "bad pattern": ({"json": {"type": "string", "pattern": "["}}, "regex"),
    "bad whitespace": ({"json": {}, "whitespace_pattern": "("}, "regex|unclosed"),
    "products of alternatives": (
        {
            "json": {
                "allOf": [
                    {"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(4)]}
                    for i in range(12)
                ]
            }
        },
        "too large|takes more than",
    ),
    "no start": ({"grammar": 'a: "b"'}, "start"),
    "undefined rule": ({"grammar": "start: foo"}, "unknown name"),
    "recursive terminal": ({"grammar": 'start: A\nA: A "x"'}, "circular"),
    "endless rule": ({"grammar": "start: start"}, "no token"),
    "5000 parentheses": ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "nested"),
    "doubling": (
        {
            "grammar": "start: A0\n"
            + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(60))
            + '\nA60: "y"'
        },
        "too big|takes more than",
    ),
    "deep JSON in Lark": (
        {"grammar": 'start: %json {"a":' + "[" * 3000 + "]" * 3000 + "}"},
        "recursion limit",
    ),
    "missing import": ({"grammar": "%import os.path\nstart: path"}, "import"),
    "gbnf without root": ({"grammar": 'a ::= "b"'}, "no rule named root"),
    "library's own format": ({"grammar": '{"grammars": [{"json_schema": {}}]}'}, "1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_constraints_are_refused_with_a_reason(name, compiler):
    fields, message = REFUSED[name]
    start = time.monotonic()
    with pytest.raises(GrammarError, match=message):
        compiler.compile(StructuredOutputs(**fields))
    assert time.monotonic() - start < SECONDS
    assert allowed(compiler.compile(StructuredOutputs(regex="warm up")).new_state(), compiler)


# Whether these compile in time depends on the machine; what counts is that they are bounded.
HEAVY = {
    "exponential regex": {"regex": "(a|a)*(a|b)*a(a|b){20}"},
    "many wildcards": {"regex": "(.*)(.*)(.*)(.*)x{1,500}"},
    "classes repeated": {"regex": r"(\w{1,1000}){1,100}"},
    "multiplied repetition": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "long literal": {"regex": "a" * 60_000},
    "64 levels": {"json": deep(62)},
    "30000 values": {"json": {"enum": [f"value {i}" for i in range(30_000)]}},
    "10000 choices": {"choice": [f"choice number {i}" for i in range(10_000)]},
    "long array": {"json": {"type": "array", "minItems": 10**5, "maxItems": 10**6}},
    "long string": {"json": {"type": "string", "minLength": 50_000, "maxLength": 10**5}},
    "recursive schema": {"json": {"type": "array", "items": {"$ref": "#"}}},
    "12000 references": {"json": chain(12_000)},
    "10000 terminals": {
        "grammar": "start: A0\n"
        + "\n".join(f'A{i}: A{i + 1} "x"' for i in range(10_000))
        + '\nA10000: "y"'
    },
    "5000 properties": {"json": {"properties": {f"p{i}": {} for i in range(5000)}}},
    "large multiple": {"json": {"type": "integer", "multipleOf": 1_000_003}},
    "ambiguous": {"grammar": 'start: e\ne: e e | e e e | "a"'},
    "one character at a time": {"grammar": "start: /[a-z ]/+"},
    "exponential pattern": {"json": {"type": "string", "pattern": "^(a|b)*a(a|b){30}$"}},
}


@pytest.mark.parametrize("name", HEAVY)
def test_heavy_constraints_cost_a_bounded_time(name, compiler):
    start = time.monotonic()
    draw = random.Random(0)
    mask = np.zeros(compiler.mask_words, np.int32)
    slowest = 0.0
    try:
        state = compiler.compile(StructuredOutputs(**HEAVY[name])).new_state()
        for _ in range(50):
            tokens = [token for token in allowed(state, compiler) if token != 1]
            if not tokens:
                break
            before = time.thread_time()
            state.accept(draw.choice(tokens))
            state.fill_mask(mask)
            slowest = max(slowest, time.thread_time() - before)
    except GrammarError as error:
        assert str(error)
    assert time.monotonic() - start < SECONDS
    assert slowest < 2.0


def test_a_compilation_that_takes_too_long_is_stopped(byte_level):
    limits = GrammarLimits(compile_seconds=0.05)
    compiler = GrammarCompiler(byte_level, byte_level.vocab_size, [1], limits=limits)
    slow = StructuredOutputs(**HEAVY["5000 properties"])
    with pytest.raises(GrammarError, match=r"more than 0\.05 s"):
        compiler.compile(slow)
    start = time.monotonic()
    with pytest.raises(GrammarError, match=r"more than 0\.05 s"):
        compiler.compile(slow)
    assert time.monotonic() - start < 1.0
    compiler.close()


@pytest.fixture
def table(byte_level) -> TokenTable:
    size = byte_level.vocab_size
    return TokenTable(tuple(map(byte_level.token_to_bytes, range(size))), (0, 1, 2), (1,))


def test_a_crash_of_the_compiling_process_is_an_error_of_that_constraint(table):
    checker = GrammarChecker(table, GrammarLimits())
    good = grammar_text(StructuredOutputs(regex="a"))
    checker.check(good)
    worker = checker._worker
    # A stopped process is at work for as long as it takes.
    worker.send_signal(signal.SIGSTOP)
    threading.Timer(0.3, worker.kill).start()
    with pytest.raises(GrammarError, match="SIGKILL"):
        checker.check(grammar_text(StructuredOutputs(regex="b")))
    checker.check(good)
    # One that dies between two checks is nobody's error.
    checker._worker.kill()
    checker._worker.wait()
    checker.check(good)
    last = checker._worker
    checker.close()
    assert last.returncode is not None


def test_running_out_of_memory_is_an_error_of_that_constraint(table):
    checker = GrammarChecker(table, GrammarLimits(memory_bytes=2**25))
    with pytest.raises(GrammarError, match="SIGABRT"):
        checker.check(grammar_text(StructuredOutputs(**REFUSED["doubling"][0])))
    checker.check(grammar_text(StructuredOutputs(regex="a")))
    checker.close()


def test_a_slow_token_is_refused_when_compiling(table):
    checker = GrammarChecker(table, GrammarLimits(step_seconds=0.0))
    with pytest.raises(GrammarError, match="one token takes"):
        checker.check(grammar_text(StructuredOutputs(regex="[a-z]{3}")))
    checker.close()


def test_the_table_survives_the_way_to_the_other_process(table):
    assert TokenTable.unpack(table.pack()) == table
    empty = TokenTable((), (), ())
    assert TokenTable.unpack(empty.pack()) == empty


# Needs a new state of its automaton for every other text, 2 ** 9 in all.
EXPONENTIAL = "(a|b)*a(a|b){8}"


def one_byte_tokens(byte_level, text: bytes) -> list[int]:
    ids = {byte_level.token_to_bytes(token): token for token in range(byte_level.vocab_size)}
    return [ids[bytes([byte])] for byte in text]


def test_a_state_that_fails_leaves_the_others_alone(byte_level):
    limits = GrammarLimits(lexer_states=120)
    compiler = GrammarCompiler(byte_level, byte_level.vocab_size, [1], limits=limits)
    spec = StructuredOutputs(regex=EXPONENTIAL)
    grammar = compiler.compile(spec)
    bystander, victim = grammar.new_state(), grammar.new_state()
    a, b = one_byte_tokens(byte_level, b"ab")
    draw = random.Random(0)
    out = np.full((2, compiler.mask_words), -1, np.int32)
    errors: dict[int, GrammarError] = {}
    for _ in range(2000):
        errors = compiler.fill_masks([bystander, victim], [0, 1], out)
        if errors:
            break
        try:
            victim.accept(draw.choice((a, b)))
        except GrammarError as error:
            errors = {1: error}
            break
    assert list(errors) == [1]
    with pytest.raises(GrammarError):
        victim.accept(a)
    with pytest.raises(GrammarError):
        victim.fill_mask(out[1])
    assert not out[1].any()
    assert not victim.can_end
    assert not victim.is_terminated
    with pytest.raises(GrammarError):
        victim.copy().accept(a)
    assert list(compiler.fill_masks([bystander, victim], [0, 1], out)) == [1]
    # The automaton that both shared is full; the other state and new ones get another.
    text = b"babbbbbbbb"
    for state in (bystander, grammar.new_state(), compiler.compile(spec).new_state()):
        for token in one_byte_tokens(byte_level, text):
            assert token in allowed(state, compiler)
            assert state.accept(token)
        assert state.can_end
    compiler.close()


def test_grammars_are_compiled_anew_after_a_while(byte_level, monkeypatch):
    monkeypatch.setattr(structured_grammar, "_TOKENS_BEFORE_RENEWAL", 5)
    compiler = GrammarCompiler(byte_level, byte_level.vocab_size, [1])
    spec = StructuredOutputs(regex="a{20}")
    grammar = compiler.compile(spec)
    state = grammar.new_state()
    (a,) = one_byte_tokens(byte_level, b"a")
    for count in range(20):
        assert (compiler.compile(spec) is grammar) == (count <= 5)
        assert state.accept(a)
    assert state.can_end
    compiler.close()


def test_a_state_whose_automaton_broke_goes_on_with_its_own(byte_level, compiler):
    spec = StructuredOutputs(json={"type": "array", "items": {"enum": [1, 2]}})
    grammar = compiler.compile(spec)
    state = grammar.new_state()
    text = one_byte_tokens(byte_level, b"[1,2")
    assert all(map(state.accept, text[:3]))
    state._matcher.consume_tokens([text[0]])
    assert state._matcher.is_error()
    assert text[3] in allowed(state, compiler)
    assert state.accept(text[3])
    assert not state.is_terminated


def test_one_thread_per_state_gives_the_masks_of_one_thread(byte_level):
    compiler = GrammarCompiler(byte_level, byte_level.vocab_size, [1], mask_threads=4)
    spec = StructuredOutputs(json={"type": "object"}, disable_any_whitespace=True)
    grammar = compiler.compile(spec)
    text = json.dumps({"the": [1, 2.5, {"x": None}], "b": "fox"}, separators=(",", ":")).encode()
    tokens = one_byte_tokens(byte_level, text)
    alone = grammar.new_state()
    expected = []
    for token in tokens:
        expected.append(allowed(alone, compiler))
        alone.accept(token)
    failures: list[int] = []

    def follow() -> None:
        state = grammar.new_state()
        for i, token in enumerate(tokens):
            if allowed(state, compiler) != expected[i] or not state.accept(token):
                failures.append(i)

    threads = [threading.Thread(target=follow) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    compile_matcher(library_tokenizer(compiler._table), grammar._text, GrammarLimits())
    compiler.close()
