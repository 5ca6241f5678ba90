"""Record what transformers says with SmolLM2-135M-Instruct: greedy texts and tokenizer output.

Needs torch and transformers (an environment of its own, not the project's), and the folder
``smollm2-f32`` that ``export_smollm2.py`` writes. Recorded with torch 2.13.0, transformers 5.24.0:

    python tests/golden/record_smollm2.py OUT_DIR/smollm2-f32 [greedy] [tokenizer]

``data/smollm2_greedy.json``: for each prompt its text, token ids, the greedy continuation of at
most 48 tokens (float32, eager attention, one request at a time; it ends with EOS where the model
says so), and per step ``gaps``, the distance between the best two logits. An engine that differs
at a step whose gap is near 0 has met a tie, not an error.

``data/smollm2_tokenizer.json``: strings with their ids (``ids`` with special tokens added,
``ids_plain`` without), the text that comes back, and conversations rendered by the chat template.
"""

# ruff: noqa: E501, RUF001
import argparse
import json
import random
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

DATA = Path(__file__).parent / "data"
NEW_TOKENS = 48

STORY = (
    "The lighthouse at Cape Merrow had not been lit for eleven years when Ada Finch bought it. "
    "She paid in three instalments, the last of them in fish. The keeper's logbooks came with the "
    "house: forty-two volumes bound in green cloth, each with the year stamped on its back, and "
    "each smelling of paraffin. Ada read them in order, one every evening, beside a stove that "
    "drew badly when the wind stood in the east. In 1911 the keeper counted nine ships, two of "
    "them foreign, and complained about the price of wicks. In 1912 he counted thirteen. In 1913 "
    "he stopped counting ships and began to count birds instead: terns, gannets, a single lost "
    "pelican that stayed for a week and ate out of his hand. By 1914 the entries had grown short. "
    "'Fog', he wrote, and on the next day, 'Fog again', and for the whole of March nothing else. "
)
QUESTION = "\n\nWhat did the keeper of the lighthouse count in 1912, and what in 1913?"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# A name, and either a conversation (rendered by the chat template) or a plain text to go on with.
PROMPTS: list[tuple[str, list[dict[str, str]] | str]] = [
    ("chat_france", user("What is the capital of France?")),
    ("chat_photosynthesis", user("Explain photosynthesis to a ten-year-old in three sentences.")),
    (
        "chat_system_and_turns",
        [
            {"role": "system", "content": "You answer briefly and politely."},
            {"role": "user", "content": "Name a fruit that is yellow."},
            {"role": "assistant", "content": "A banana."},
            {"role": "user", "content": "And one that is red?"},
        ],
    ),
    ("chat_code", user("Write a Python function that reverses a string.")),
    ("chat_poem", user("Write a short poem about the sea 🌊 and a cat 🐈‍⬛.")),
    ("code_fibonacci", 'def fibonacci(n: int) -> int:\n    """Return the n-th number."""\n    '),
    ("code_sql", "SELECT name, COUNT(*)\nFROM orders\nWHERE"),
    ("german", "Die Donau ist einer der längsten Flüsse Europas und fließt durch"),
    ("french", "Il était une fois, dans un petit village près de la forêt,"),
    ("spanish", "¿Cuál es la diferencia entre el sol y la luna?"),
    ("chinese", "北京是中国的首都，"),
    ("arabic", "القاهرة هي عاصمة"),
    ("japanese", "日本で一番高い山は"),
    ("emoji", "My week in emoji: Monday 😴, Tuesday ☕☕, Wednesday 🐪, Thursday"),
    ("numbers", "1, 1, 2, 3, 5, 8, 13, 21,"),
    ("arithmetic", "12 + 30 = 42\n7 + 5 = 12\n100 - 1 ="),
    ("completion", "The quick brown fox jumps over the lazy dog. The dog"),
    ("one_word", "Once"),
    ("long_story", STORY * 3 + "In 1915 the keeper"),
    ("chat_long", user(STORY * 2 + QUESTION)),
]

CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": user("What is the capital of France?"), "add_generation_prompt": True},
    {"messages": user("What is the capital of France?"), "add_generation_prompt": False},
    {
        "messages": [
            {"role": "system", "content": "You are a pirate."},
            {"role": "user", "content": "Hi 👋"},
            {"role": "assistant", "content": "Ahoy!"},
            {"role": "user", "content": "Où est le trésor ?\n"},
        ],
        "add_generation_prompt": True,
    },
    {
        "messages": [
            {"role": "user", "content": "  two spaces, a tab\tand <|im_end|> in the text  "},
            {"role": "assistant", "content": ""},
        ],
        "add_generation_prompt": True,
    },
    {"messages": [{"role": "system", "content": "Only a system message"}]},
    {
        "messages": [
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "3"},
            {"role": "assistant", "content": "{{ not a template }} {% raw %}"},
        ]
    },
]


def strings() -> list[str]:
    """200 strings: chosen awkward ones, then random mixtures of their pieces and of code points."""
    chosen = [
        "", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n ", "\u00a0", "\u3000", "\u200b",
        "a", " a", "a ", "  a", "a  b", "a   3", "3   a", "x  42  y", "Hello, world!",
        "hello world", "HELLO World", "don't", "I'll we've you're he'd she's I'm can't", "'s 's'S",
        "0", "7", "42", "1234567890", "3.14159", "1,000,000.00", "1e-05", "0xDEADBEEF", "v1.2.3",
        "１２３", "٣٤٥", "१२३", "²³¹", "Ⅻ", "½ cup", "2nd 3rd", "A1b2C3", "1 2  3   4",
        "naïve café", "na\u0069\u0308ve cafe\u0301", "e\u0301\u0323\u0300", "Å Å Å", "ﬁ ligature",
        "ß ẞ ſ", "İstanbul ıI", "Ǆ ǅ ǆ", "Z̷̪̊a̸̛̩l̴̰̏g̵̱̅ö", "𝕳𝖊𝖑𝖑𝖔", "🅰️🆎", "👍", "👍🏽", "\U0001f469\u200d\U0001f680 \U0001f468\u200d\U0001f469\u200d\U0001f467", "👨‍👩‍👧‍👦",
        "🇫🇷🇩🇪", "❤️ ❤", "🏴󠁧󠁢󠁳󠁣󠁴󠁿", "🤷🏿‍♀️ ok", "Größe: 5 µm", "Straße", "Ελληνικά", "Привет, мир!",
        "שלום עולם", "السلام عليكم", "नमस्ते दुनिया", "สวัสดีชาวโลก", "こんにちは世界", "カタカナ",
        "你好，世界！", "안녕하세요", "\uac00\u1100\u1161", "ქართული", "አማርኛ", "தமிழ்", "\u202eabc\u202c",
        "\ufeffBOM", "\u0000", "\x01\x02\x7f", "\u0085\u2028\u2029", "\U0010ffff", "\ufffd",
        "def f(x):\n    return x ** 2\n", "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}",
        "if x:\n        pass\n\n\n    else", "<html><body class=\"x\">&nbsp;</body></html>",
        '{"key": [1, 2.5, null, true], "s": "\\u00e9\\n"}', "SELECT * FROM t WHERE a <> 'b';",
        "https://example.org/path?q=1&r=%20#frag", "user.name+tag@example.co.uk", "C:\\dir\\file",
        "/usr/local/bin/python3", "snake_case camelCase PascalCase kebab-case SCREAMING_CASE",
        "-----", "=====", "....", "…", "!!!???", "——", "“quoted” ‘text’", "\"'`", "((([[[{{{}}}]]])))",
        "$100 €200 £300 ¥400", "x² + y² = z²", "∫₀^∞ e^{-x²} dx = √π/2", "\\frac{a}{b}", "a/b|c&d~e^f",
        "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start|>user\nHi<|im_end|>\n",
        "text<|endoftext|>text", " <|im_end|> ", "<|im_end|", "<|IM_END|>", "<repo_name>x<file_sep>",
        "<jupyter_code>print(1)<jupyter_output>1", "<|im_start|><|im_start|>", "< |im_end| >",
        "a" * 100, " " * 40, "\n" * 20, "ab" * 50, "🙂" * 10, "supercalifragilisticexpialidocious",
        "Donaudampfschifffahrtsgesellschaftskapitän", "trailing space ", "trailing newline\n",
        "  leading", "\tindent\n\t\tmore\n", "line1\nline2\r\nline3\rline4", "a\u00a0b\u2009c",
        "mixed日本語and英語text", "emoji😀in😀words", "ünïcödé", "I ❤ NY 🗽!", "100% sure #1 @home",
    ]  # fmt: skip
    rng = random.Random(20240611)
    while len(chosen) < 170:
        mixture = "".join(rng.choice(chosen[:140]) for _ in range(rng.randint(2, 4)))
        if mixture not in chosen:
            chosen.append(mixture)
    ranges = [(0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x5FF), (0x900, 0xDFF),
              (0x2000, 0x2BFF), (0x3040, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1FAFF)]  # fmt: skip
    while len(chosen) < 200:
        low, high = rng.choice(ranges)
        text = "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(3, 16)))
        chosen.append(text + rng.choice(["", " ", "\n", " 7", "  8"]))
    if len(set(chosen)) != 200:
        raise ValueError("strings repeat")
    return chosen


@torch.no_grad()
def record_greedy(folder: Path) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    records = []
    for name, prompt in PROMPTS:
        text = (
            prompt
            if isinstance(prompt, str)
            else tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        )
        ids = tokenizer(text, return_tensors="pt")
        out = model.generate(
            **ids,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = out.sequences[0, ids.input_ids.shape[1] :].tolist()
        gaps = []
        for token, logits in zip(tokens, out.logits, strict=True):
            best = torch.topk(logits[0], 2)
            if int(best.indices[0]) != token:
                raise SystemExit(f"{name}: generate did not take the best token")
            gaps.append(float(best.values[0] - best.values[1]))
        record = {
            "name": name,
            "messages": None if isinstance(prompt, str) else prompt,
            "prompt": text,
            "prompt_token_ids": ids.input_ids[0].tolist(),
            "output_token_ids": tokens,
            "output_text": tokenizer.decode(tokens, skip_special_tokens=True),
            "finish_reason": "stop" if tokens[-1] == model.config.eos_token_id else "length",
            "gaps": [round(gap, 6) for gap in gaps],
        }
        records.append(record)
        print(name, len(record["prompt_token_ids"]), min(gaps), repr(record["output_text"][:80]))
    return {
        "model": "SmolLM2-135M-Instruct, Q4_1 weights dequantised to float32",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "max_tokens": NEW_TOKENS,
        "eos_token_id": model.config.eos_token_id,
        "prompts": records,
    }


def record_tokenizer(folder: Path) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for text in strings():
        ids = tokenizer(text).input_ids
        texts.append(
            {
                "text": text,
                "ids": ids,
                "ids_plain": tokenizer(text, add_special_tokens=False).input_ids,
                "decoded": tokenizer.decode(ids),
                "decoded_skip_special": tokenizer.decode(ids, skip_special_tokens=True),
            }
        )
    chats = []
    for conversation in CONVERSATIONS:
        messages = conversation["messages"]
        prompt = conversation.get("add_generation_prompt", False)
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt
        )
        encoded = tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=prompt, return_dict=True
        )
        chats.append(
            {
                "messages": messages,
                "add_generation_prompt": prompt,
                "rendered": rendered,
                "ids": encoded["input_ids"],
            }
        )
    return {
        "versions": {
            "tokenizers": tokenizers.__version__,
            "transformers": transformers.__version__,
        },
        "texts": texts,
        "chats": chats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the smollm2-f32 folder")
    parser.add_argument("what", nargs="*", help="greedy, tokenizer; default both")
    args = parser.parse_args()
    DATA.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    for name, recorder in (("tokenizer", record_tokenizer), ("greedy", record_greedy)):
        if not args.what or name in args.what:
            text = json.dumps(recorder(args.folder), ensure_ascii=True, indent=1)
            (DATA / f"smollm2_{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
