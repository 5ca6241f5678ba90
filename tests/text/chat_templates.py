"""Templates written for the tests in the manner of well-known models, and conversations."""

CHATML = """\
{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}
{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}
{% else %}
{% set loop_messages = messages %}{% set system_message = false %}
{% endif %}
{%- for message in loop_messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
{%- if loop.index0 == 0 and system_message != false -%}
{%- set content = '<<SYS>>\\n' ~ system_message ~ '\\n<</SYS>>\\n\\n' ~ message['content'] -%}
{%- else -%}
{%- set content = message['content'] -%}
{%- endif -%}
{%- if message['role'] == 'user' -%}
{{ bos_token ~ '[INST] ' ~ content.strip() ~ ' [/INST]' }}
{%- elif message['role'] == 'assistant' -%}
{{ ' ' ~ content.strip() ~ ' ' ~ eos_token }}
{%- endif -%}
{%- endfor -%}"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%B %Y") %}{% endif %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{% endif %}
{{- "Today: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}" }}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- set calls = message.tool_calls is defined and message.tool_calls %}
    {%- if not (message.role == "tool" or calls) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("roles must alternate, found " + message["role"]) }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call ids must be strings of length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + "}[/TOOL_RESULTS]" }}
    {%- else %}
        {{- raise_exception("unknown role " ~ message.role) }}
    {%- endif %}
{%- endfor %}"""

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') }}
            {{- '\\n</think>\\n\\n' }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' }}
        {%- endif %}
        {{- content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {%- set given = tool_call.arguments %}
            {{- given if given is string else given|tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

PARTS = """\
{{ bos_token }}
{%- macro text_of(content) -%}
    {%- if content is string -%}{{ content }}
    {%- else -%}
        {%- for part in content -%}
            {%- if part['type'] == 'text' -%}{{ part['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
    {%- if message['role'] == 'developer' %}{% continue %}{% endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    <turn {{ loop.index }} of {{ loop.length }}>{{ role | upper }}
{{ text_of(message['content']) }}</turn>
{% endfor -%}
{%- for document in documents or [] %}
[{{ loop.index0 }}] {{ document.title | title }}: {{ document.text }}
{% endfor -%}
{%- if add_generation_prompt -%}<turn>MODEL
{% endif -%}"""

GENERATION = """\
{%- for message in messages %}
<{{ message.role }}>
{% if message.role == 'assistant' %}
{%- generation -%}
  {%- set inner = 'a' %}
  {{ message.content }}{{ eos_token }}
{%- endgeneration -%}
{% else %}{{ message.content }}{% endif %}
{% endfor %}
[{{ inner }}]"""

ODDITIES = """\
{#- What prints how -#}
{{ true }} {{ none }} {{ 1.5 }} {{ 1e5 }} {{ 10 // 3 }} {{ 7 % 3 }} {{ 2 ** 5 }} {{ 'a' * 3 }}
{{ messages | map(attribute='role') | join(', ') }} {{ messages[0] }} {{ nothing }}
{{ ['b', 'a'] | sort }} {{ {'z': 1, 'a': [none, true]} }} {{ messages | length }} {{ (1, 2) }}
{{ {'z': 'é<>&"', 'a': 1} | tojson }} {{ [1, {'b': 2}] | tojson(indent=2) }}
{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}
{{ 'é' | tojson(ensure_ascii=true) }}
{{ messages[-1].content.split(' ')[0] }} {{ messages[-1].content | replace('a', 'b') | trim }}
{{ messages[0].get('name', 'nobody') }} {{ 'role' in messages[0] }} {{ messages[0].keys() | list }}
{% for key, value in messages[0].items() %}{{ key }}={{ value }};{% endfor %}
{{ '<b>' }} {{ 'x' if false }} {{ bos_token is defined }} {{ loop is defined }}
{{ messages[0].tool_calls is defined }} {% set total = namespace(n=0) %}
{% for m in messages %}{% set total.n = total.n + m.content|length %}{% endfor %}{{ total.n }}
{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ loop.index }}
{{ ',' if not loop.last }}{% endfor %}
{{ 'Mixed Case'.lower().title() }} {{ 'abc'[::-1] }} {{ '%s-%d' | format('x', 3) }}
{{ 'a,b' .split(',') | last }}
"""

TEMPLATES = {
    "chatml": CHATML,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "qwen": QWEN,
    "parts": PARTS,
    "generation": GENERATION,
    "oddities": ODDITIES,
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'The weather in a "place" — <now>',
            "parameters": {
                "type": "object",
                "properties": {
                    "items": {"type": "array", "items": {"type": "string"}},
                    "place": {"type": "string", "enum": ["Zürich", "東京"]},
                    "days": {"type": "integer", "minimum": -1, "default": 1.5},
                },
                "required": ["place"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {}}},
]

CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {
        "name": "weather",
        "arguments": {"place": "東京", "days": 2, "deep": {"a": [None]}},
    },
}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


CONVERSATIONS = {
    "one": [user("What is the capital of France?")],
    "system": [{"role": "system", "content": "  Be brief. "}, user("Hi a b"), assistant("Hello")],
    "turns": [user("a"), assistant(" b \n"), user("c\n\n"), assistant("d"), user("  e  ")],
    "unicode": [
        user("naïve 日本 👩‍👩‍👧 e\u0301 {{ 7*7 }} {% raw %} <|im_end|>"),
        assistant("\\n ok"),
    ],
    "empty": [user(""), assistant("")],
    "tools": [
        user("weather?"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": '{"t": 21}', "name": "weather", "tool_call_id": "abcdefghi"},
        {"role": "tool", "content": "again", "tool_call_id": "abcdefghi"},
        assistant("21 degrees"),
        user("thanks"),
    ],
    "reasoning": [
        user("think"),
        {"role": "assistant", "content": "done", "reasoning": "first\n"},
        user("more"),
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nwell", "thinking": None},
    ],
    "wrong order": [assistant("I begin"), user("no"), user("twice")],
    "odd role": [{"role": "developer", "content": "x"}, user("y")],
}
