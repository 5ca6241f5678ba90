"""Chat templates: the text of transformers, plain data only, and never without end."""

import time

import pytest
from transformers import PreTrainedTokenizerFast

from jaxllm.text.chat_messages import MAX_DEPTH, MAX_MESSAGES
from jaxllm.text.chat_template import encode_chat, reads_parts, render_chat
from jaxllm.text.errors import ChatMessageError, ChatTemplateError, TextError
from jaxllm.text.tokenizer import Tokenizer
from tests.text.chat_templates import (
    CALL,
    CHATML,
    CONVERSATIONS,
    LLAMA2,
    PARTS,
    QWEN,
    TEMPLATES,
    TOOLS,
    assistant,
    user,
)
from tests.text.small_tokenizers import byte_level_backend

ENDS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def peer():
    return PreTrainedTokenizerFast(tokenizer_object=byte_level_backend(), **ENDS)


def both(peer, template, messages, **options):
    """Our text and theirs; an exception in the place of a text that cannot be made."""
    theirs: str | type
    try:
        theirs = peer.apply_chat_template(
            messages, chat_template=template, tokenize=False, **options
        )
    except Exception:
        theirs = TextError
    ours: str | type
    try:
        ours = render_chat(template, messages, content_format="openai", **ENDS, **options)
    except TextError:
        ours = TextError
    return ours, theirs


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_text_is_that_of_transformers(peer, template, conversation):
    messages = CONVERSATIONS[conversation]
    for tools in (None, TOOLS):
        for prompt in (True, False):
            ours, theirs = both(
                peer, TEMPLATES[template], messages, tools=tools, add_generation_prompt=prompt
            )
            assert ours == theirs


def test_most_pairs_of_the_comparison_render(peer):
    made = [
        both(peer, template, messages, add_generation_prompt=True)[1]
        for template in TEMPLATES.values()
        for messages in CONVERSATIONS.values()
    ]
    assert sum(isinstance(text, str) for text in made) > 0.7 * len(made)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("ending", ["The answer is", "trailing  ", "\n lead", " ", "x"])
def test_continuing_the_last_message_is_that_of_transformers(peer, template, ending):
    messages = [user("q"), assistant(ending)]
    ours, theirs = both(
        peer,
        TEMPLATES[template],
        messages,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    if template == "oddities":
        # Text of the message in several forms: transformers cuts at the last trace of its mark.
        assert isinstance(ours, str) == isinstance(theirs, str)
    else:
        assert ours == theirs


def test_continuing_text_parts(peer):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two, "}]
    messages = [user("q"), {"role": "assistant", "content": parts}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    ours, theirs = both(peer, PARTS, messages, **options)
    assert ours == theirs
    assert render_chat(CHATML, messages, **options, **ENDS).endswith("one\ntwo, ")
    assert parts[1]["text"] == "two, "


def test_variables_documents_and_parts(peer):
    documents = [{"title": "a title", "text": "Some text"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": " one "}]}]
    ours, theirs = both(peer, PARTS, parts, documents=documents, add_generation_prompt=True)
    assert ours == theirs
    wanted = peer.apply_chat_template(
        [user("q")],
        chat_template=QWEN,
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    assert render_chat(QWEN, [user("q")], extra={"enable_thinking": False}, **ENDS) == wanted


def test_templates_that_read_parts_are_told_from_those_that_do_not():
    assert reads_parts(PARTS)
    assert not reads_parts(CHATML)
    assert not reads_parts("{{ messages }}")
    assert not reads_parts("{{ messages | tojson }}")
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]
    assert "a\nb<|im_end|>" in render_chat(CHATML, parts, **ENDS)
    assert "ab</turn>" in render_chat(PARTS, parts, **ENDS)
    assert "a\nb</turn>" in render_chat(PARTS, parts, content_format="string", **ENDS)


def test_arguments_of_tool_calls_may_be_json_text():
    as_text = {**CALL, "function": {"name": "weather", "arguments": '{"place": "東京"}'}}
    as_dict = {**CALL, "function": {"name": "weather", "arguments": {"place": "東京"}}}
    one, two = (
        render_chat(QWEN, [user("q"), {"role": "assistant", "tool_calls": [call]}], **ENDS)
        for call in (as_text, as_dict)
    )
    assert one == two
    assert '"place": "東京"' in one


def test_bos_is_not_added_twice(byte_level):
    backend = byte_level_backend()
    peer = PreTrainedTokenizerFast(tokenizer_object=backend, add_bos_token=True, **ENDS)
    tokenizer = Tokenizer(
        peer.backend_tokenizer, name="t", bos_token_id=0, eos_token_id=1, chat_template=LLAMA2
    )
    assert tokenizer.encode("x")[0] == 0
    ids = encode_chat(tokenizer, [user("x")])
    assert ids.count(0) == 1
    assert ids == peer.apply_chat_template(
        [user("x")], chat_template=LLAMA2, add_generation_prompt=True, return_dict=False
    )
    assert encode_chat(tokenizer, [user("x")], chat_template=CHATML).count(0) == 0


def test_a_missing_template_is_a_clear_error(byte_level):
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        encode_chat(byte_level, [user("x")])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only one turn') }}", "refuses the conversation: only one turn"),
        ("{% for %}", "at line 1"),
        ("ok\n\n{{ messages[9].content }}", "at line 3"),
        ("{% include '/etc/passwd' %}", "non-existing template"),
        ("{{ messages.append(1) }}", "may not change its input"),
        ("{{ messages[0].update({'a': 1}) }}", "may not change its input"),
        ("{{ messages[0].content.nothing() }}", "no method named nothing"),
        ("{{ messages | tojson(indent=1000000) }}", "at most 16"),
        ("{{ strftime_now('%Y' * 100000) }}", "at most 128"),
        ("{{ x }}" * 300_000, "characters"),
    ],
)
def test_a_failing_template_says_why(template, message):
    with pytest.raises(ChatTemplateError, match=message):
        render_chat(template, [user("x")])


ENDLESS = [
    "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(1) }}",
    "{% set n = namespace(x='aa') %}{% for i in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{{ 'a' * 1000000000 }}",
    "{{ 'a' | indent(1000000000) }}",
    "{{ '%-999999999s' | format('a') }}",
    "{% set n = namespace(x='a') %}{% for i in range(64) %}"
    "{% set n.x = n.x.replace('a', 'aa') %}{% endfor %}",
    "{% for i in range(999) %}{% set x = messages | tojson %}{% endfor %}",
    "{{ range(1000000000) | list }}",
    "{{ " + "(" * 5000 + ")" * 5000 + " }}",
]


@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_without_end_is_stopped(template):
    start = time.perf_counter()
    with pytest.raises(ChatTemplateError):
        render_chat(template, [user("x" * 1000)])
    assert time.perf_counter() - start < 5


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ messages[0].__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['sys'].modules }}",
    "{{ messages | attr('__class__') | attr('__mro__') }}",
    "{{ messages['__class__'] }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ lipsum.__globals__.os }}",
    "{{ messages.append.__self__ }}",
    "{{ messages[0].items.__func__.__globals__ }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_reaches_no_python_internals(template):
    try:
        text = render_chat(template, [user("x")])
    except ChatTemplateError:
        return
    assert text.strip() in ("", "None")


def test_a_long_honest_conversation_has_enough_fuel():
    turns = [user("word " * 250) if i % 2 == 0 else assistant("reply " * 200) for i in range(400)]
    text = render_chat(QWEN, turns, tools=TOOLS, **ENDS)
    assert len(text) > 400_000


BAD_MESSAGES = {
    "not a list": ("hi", "must be a list, not str"),
    "none": ([], "has 0 messages"),
    "too many": ([user("x")] * (MAX_MESSAGES + 1), f"1 to {MAX_MESSAGES}"),
    "not a dict": (["hi"], r"messages\[0\] must be a dict, not str"),
    "no role": ([{"content": "x"}], r"messages\[0\].role is None"),
    "role": ([user("x"), {"role": 3, "content": "x"}], r"messages\[1\].role is 3"),
    "content": ([user(5)], r"content is int"),
    "image": (
        [user([{"type": "image_url", "image_url": {"url": "http://x"}}])],
        r"content\[0\].type 'image_url' is not supported; only 'text' is",
    ),
    "part": ([user([5])], r"content\[0\] must be a dict or a string"),
    "part text": ([user([{"type": "text"}])], r"content\[0\].text must be a string"),
    "object": ([{**user("x"), "extra": object()}], r"messages\[0\].extra is object"),
    "bytes": ([{**user("x"), "extra": [b"x"]}], r"extra\[0\] is bytes"),
    "key": ([{**user("x"), "extra": {1: 2}}], "the key 1; keys must be strings"),
    "number": ([{**user("x"), "extra": 2**200}], "beyond 127 bits"),
    "calls": ([{"role": "assistant", "tool_calls": "x"}], "tool_calls must be a list"),
    "call": ([{"role": "assistant", "tool_calls": ["x"]}], r"tool_calls\[0\] must be a dict"),
    "arguments": (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        "arguments is not a JSON object",
    ),
    "arguments kind": (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}],
        "JSON list, not an object",
    ),
}


@pytest.mark.parametrize("case", BAD_MESSAGES)
def test_bad_messages_are_refused_by_field(case):
    messages, message = BAD_MESSAGES[case]
    with pytest.raises(ChatMessageError, match=message):
        render_chat(CHATML, messages)


def _nested(levels: int) -> list:
    deep: list = []
    for _ in range(levels):
        deep = [deep]
    return deep


def _call(arguments: object) -> dict:
    function = {"name": "f", "arguments": arguments}
    return assistant("x") | {"tool_calls": [{"type": "function", "function": function}]}


@pytest.mark.parametrize("template", [CHATML, QWEN], ids=["chatml", "qwen"])
@pytest.mark.parametrize(
    ("message", "options"),
    [
        (user("x") | {"extra": _nested(10_000)}, {}),
        (_call({"a": _nested(10_000)}), {}),
        (_call('{"a": ' + "[" * 10_000 + "]" * 10_000 + "}"), {}),
        (user("x"), {"tools": [{"type": "function", "function": {"a": _nested(10_000)}}]}),
        (user("x"), {"documents": [{"text": _nested(10_000)}]}),
        (user("x"), {"extra": {"mine": _nested(10_000)}}),
    ],
    ids=["message", "arguments", "JSON arguments", "tools", "documents", "variables"],
)
def test_ten_thousand_levels_are_refused_with_the_limit(template, message, options):
    with pytest.raises(ChatMessageError, match=f"nested more than {MAX_DEPTH} levels deep"):
        render_chat(template, [user("hello"), message], **options)


def test_nesting_and_size_are_limited():
    deep: object = "x"
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    with pytest.raises(ChatMessageError, match=f"more than {MAX_DEPTH} levels"):
        render_chat(CHATML, [{**user("x"), "extra": deep}])
    with pytest.raises(ChatMessageError, match="characters"):
        render_chat(CHATML, [user("x" * 1_100_000)] * 16)
    cycle: list = []
    cycle.append(cycle)
    with pytest.raises(ChatMessageError, match="levels"):
        render_chat(CHATML, [user("x")], extra={"cycle": cycle})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"continue_final_message": True}, "exclude each other"),
        ({"extra": {"messages": []}}, "'messages' cannot be replaced"),
        ({"extra": {"bos_token": "x"}}, "'bos_token' cannot be replaced"),
        ({"extra": {"raise_exception": 1}}, "'raise_exception' cannot"),
        ({"tools": {"name": "f"}}, "tools must be a list"),
        ({"tools": ["f"]}, r"tools\[0\] must be a dict"),
        ({"documents": "x"}, "documents must be a list"),
        ({"content_format": "xml"}, "'xml'; auto, string and openai"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ChatMessageError, match=message):
        render_chat(CHATML, [user("x")], **options)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (CHATML, [{"role": "assistant", "tool_calls": []}], "no content"),
        (PARTS, [{"role": "assistant", "content": []}], "no text"),
        ("{{ 'fixed' }}", [user("x")], "does not read"),
        ("{{ 'content' }}", [user("x")], "does not show the last message"),
    ],
)
def test_what_cannot_be_continued_is_refused(template, messages, message):
    with pytest.raises(TextError, match=message):
        render_chat(template, messages, add_generation_prompt=False, continue_final_message=True)


def test_the_callers_messages_are_not_changed():
    messages = [user("q"), {"role": "assistant", "content": "a", "reasoning": "r"}]
    before = [dict(message) for message in messages]
    render_chat(QWEN, messages, add_generation_prompt=False, continue_final_message=True, **ENDS)
    assert messages == before
