"""Tool and reasoning parsers: what they find, whatever way the text is cut."""

import json
import time

import pytest

from serving.tools.parsers import (
    ArrayParser,
    HermesParser,
    LlamaJsonParser,
    MistralParser,
    NamedToolParser,
    detect_parser,
)
from serving.tools.pieces import Content, PlainText, Reasoning, ToolArguments, ToolStart
from serving.tools.reasoning import ThinkParser

ARGUMENTS = '{"city": "Par\\"is}", "deep": [{"a": 1}, "]"]}'
CALL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'


def joined(pieces):
    content, reasoning, calls = "", "", []
    for piece in pieces:
        match piece:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case ToolStart(index, name):
                assert index == len(calls)
                calls.append([name, ""])
            case ToolArguments(index, text):
                calls[index][1] += text
    return content, reasoning, [tuple(call) for call in calls]


def parse(make, text, size=None):
    parser = make()
    pieces = []
    for start in range(0, len(text), size or len(text) or 1):
        pieces += parser.feed(text[start : start + (size or len(text))])
    return joined([*pieces, *parser.finish()])


TOOLS = frozenset({"get_weather", "get_time"})
CASES = {
    "hermes, one": (
        HermesParser,
        f"<tool_call>\n{CALL}\n</tool_call>",
        ("", [("get_weather", ARGUMENTS)]),
    ),
    "hermes, text and two": (
        HermesParser,
        f'Let me look. <tool_call>{CALL}</tool_call>\n<tool_call>{{"name":"get_time"}}</tool_call>',
        ("Let me look.", [("get_weather", ARGUMENTS), ("get_time", "{}")]),
    ),
    "hermes, arguments first": (
        HermesParser,
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        ("", [("f", '{"a": 1}')]),
    ),
    "hermes, arguments as a string": (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        ("", [("f", '{"a": 1}')]),
    ),
    "hermes, cut": (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": {"a": [1',
        ("", [("f", '{"a": [1')]),
    ),
    "hermes, cut in the name": (
        HermesParser,
        '<tool_call>{"name": "f',
        ('<tool_call>{"name": "f', []),
    ),
    "hermes, no JSON": (
        HermesParser,
        "<tool_call>oh</tool_call>",
        ("<tool_call>oh</tool_call>", []),
    ),
    "hermes, half a tag": (HermesParser, "a < b <tool", ("a < b <tool", [])),
    "hermes, plain": (HermesParser, "  Hello \n", ("  Hello \n", [])),
    "llama, one": (
        lambda: LlamaJsonParser(TOOLS),
        '{"name": "get_weather", "parameters": {"city": "Rome"}}',
        ("", [("get_weather", '{"city": "Rome"}')]),
    ),
    "llama, tag and two": (
        lambda: LlamaJsonParser(TOOLS),
        '<|python_tag|>{"name": "get_time", "parameters": {}}; {"name": "get_time", "parameters": '
        "{}}",
        ("", [("get_time", "{}"), ("get_time", "{}")]),
    ),
    "llama, text": (lambda: LlamaJsonParser(TOOLS), " It is sunny {", (" It is sunny {", [])),
    "llama, other JSON": (
        lambda: LlamaJsonParser(TOOLS),
        '{"name": "Bob", "age": 5} and more',
        ('{"name": "Bob", "age": 5} and more', []),
    ),
    "llama, JSON without a name": (
        lambda: LlamaJsonParser(TOOLS),
        '{"age": 5} and more',
        ('{"age": 5} and more', []),
    ),
    "mistral, array": (
        MistralParser,
        f"[TOOL_CALLS][{CALL}, {CALL}]",
        ("", [("get_weather", ARGUMENTS), ("get_weather", ARGUMENTS)]),
    ),
    "mistral, names": (
        MistralParser,
        'So: [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": {}}',
        ("So: ", [("f", '{"a": 1}'), ("g", '{"b": {}}')]),
    ),
    "mistral, plain": (MistralParser, "[TOOL", ("[TOOL", [])),
    "array": (
        ArrayParser,
        f'[{CALL}, {{"name": "get_time", "parameters": {{}}}}]',
        ("", [("get_weather", ARGUMENTS), ("get_time", "{}")]),
    ),
    "named": (lambda: NamedToolParser("f"), ARGUMENTS, ("", [("f", ARGUMENTS)])),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [None, 1, 2, 3, 7])
def test_calls_are_found_however_the_text_is_cut(name, size):
    make, text, (content, calls) = CASES[name]
    assert parse(make, text, size) == (content, "", calls)


@pytest.mark.parametrize("name", CASES)
def test_any_cut_of_the_output_gives_the_same_streamed_and_whole(name):
    make, text, _ = CASES[name]
    for end in range(len(text)):
        assert parse(make, text[:end], 1) == parse(make, text[:end])


def test_arguments_are_streamed_and_not_held():
    parser = HermesParser()
    parser.feed('<tool_call>{"name": "f", "arguments": {"city": "Par')
    assert joined([ToolStart(0, "f"), *parser.feed("is")]) == ("", "", [("f", "is")])


@pytest.mark.parametrize("size", [None, 1, 3])
@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nhm\n</think>\n\nYes.", False, ("Yes.", "hm\n", [])),
        ("hm</think>Yes.", True, ("Yes.", "hm", [])),
        ("<think>hm</think>Yes.", True, ("Yes.", "hm", [])),
        ("Yes. <think>", False, ("Yes. <think>", "", [])),
        ("<think>endless", False, ("", "endless", [])),
        ("<thi", False, ("<thi", "", [])),
        (
            f"<think>a</think><tool_call>{CALL}</tool_call>",
            False,
            ("", "a", [("get_weather", ARGUMENTS)]),
        ),
    ],
)
def test_reasoning_is_split_off(text, inside, expected, size):
    assert parse(lambda: ThinkParser(HermesParser(), inside), text, size) == expected


def test_reasoning_over_plain_text():
    assert parse(lambda: ThinkParser(PlainText(), False), "<think>a</think>b", 1) == ("b", "a", [])


def test_time_is_linear_in_the_text():
    def seconds(length):
        text = '<tool_call>{"name": "f", "arguments": {"a": "' + "\\\\<tool_call>{[" * length
        began = time.perf_counter()
        parse(HermesParser, text, 64)
        return time.perf_counter() - began

    seconds(100)
    short = min(seconds(2_000) for _ in range(3))
    long = min(seconds(8_000) for _ in range(3))
    assert long < 12 * short


def test_the_parser_is_told_from_the_template():
    assert detect_parser("{% if tools %}<tool_call>") == "hermes"
    assert detect_parser("[TOOL_CALLS]") == "mistral"
    assert detect_parser("{{ messages }}") is None
    assert detect_parser(None) is None


def test_raw_arguments_stay_valid_json():
    _, _, calls = parse(HermesParser, f"<tool_call>{CALL}</tool_call>", 1)
    assert json.loads(calls[0][1])["city"] == 'Par"is}'
