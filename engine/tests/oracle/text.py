"""Golden cases for the tokenizer, the chat templates and the decoder, by Hugging Face's own code and by llama.cpp.

    python text.py --base SmolLM2-135M-Instruct.Q4_1.gguf --out ../golden/text

Transformers reads the GGUF's vocabulary but not the name of its pre-tokenizer (`smollm`: each digit alone, then GPT-2's
words), so that stage is set here as the model's own tokenizer.json has it. llama.cpp, where installed, checks the ids and
gives those of other pre-tokenizers over the same vocabulary.
"""

import argparse
import contextlib
import json
import pathlib
import random
import tempfile

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

SEED = 7
HAND_WRITTEN = [
    "", " ", "  ", "   ", "\n", "\n\n", "\n \n", "\t", "\r\n", " \t \n ", "a", " a", "a ", "  a", "a  ", "  a  b   c    d",
    "Hello, world!", "Hello world", " Hello world", "hello  world", "hello\nworld", "hello\n\n\nworld", "HELLO WORLD",
    "The quick brown fox jumps over the lazy dog.", "I'm you're they've he'll she'd it's don't", "I'M YOU'RE DON'T",
    "it’s “quoted” text — with dashes…", "0", "1", "12", "123", "1234", "12345678901234567890", "3.14159", "1,000,000",
    "  1", "   12", "a1b2c3", "x = 1", "v1.2.3-rc4", "2026-01-31T23:59:59Z", "+49 (0)30 1234-567", "$9.99", "100%", "½ ⅔ ²³",
    "٠١٢٣ ४५६", "Ⅷ ⅻ", "éàüöß ÆØÅ ñ ç", "e\u0301 a\u030a", "Straße", "İstanbul ıI", "ﬁ ligature", "Привет, мир!", "Ελληνικά",
    "你好，世界", "こんにちは世界", "안녕하세요", "שלום עולם", "مرحبا بالعالم", "नमस्ते दुनिया", "สวัสดีชาวโลก", "ქართული", "Հայերեն",
    "🙂", "🙂🙂", "👩‍👩‍👧‍👦", "🏳️‍🌈 🇩🇪", "a🙂b", "👍🏽", "♥️", "\u200b", "a\u200bb", "\ufeff", "\u00a0", "a\u00a0b", "\u3000", "\u2028", "\u0085",
    "\x00", "\x01\x02", "\x7f", "a\x00b", "\ufffd", "\U0010ffff", "\ue000",
    "def f(x):\n    return x + 1\n", "for (int i = 0; i < n; ++i) { a[i] *= 2; }", "fn main() {\n\tprintln!(\"hi\");\n}",
    "SELECT * FROM t WHERE a = 'b';", "<div class=\"x\">&amp;</div>", "{\"a\": [1, 2.5, null, true]}", "a_b_c camelCase PascalCase kebab-case",
    "https://example.com/a/b?c=d&e=%20#f", "user@example.com", "C:\\Windows\\System32", "/usr/local/bin", "!@#$%^&*()_+-=[]{}|;':\",./<>?",
    "....", "!!!", "---", "=====", "```python\nprint(1)\n```", "# Title\n\n- item\n- item", "| a | b |\n|---|---|", "\\n \\t \\u0041",
    "'", "''", "' s", "'s", " 's", "'S 'T", "''s", "'ll 'LL", "\"'\"", "`'`",
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "a<|im_end|>b", " <|im_end|> ", "<|im_start|>user\nhi<|im_end|>\n", "<|im_start|><|im_start|>",
    "<|im_end", "|im_end|>", "<|unknown|>", "<repo_name>x<file_sep>y", "<jupyter_code>1", "<|IM_END|>", "< |im_end|>",
    "a" * 100, "ab" * 200, " " * 100, "\n" * 50, "ha" * 50 + "!", "0" * 60, "word " * 40, "?" * 33, "\t" * 20 + "x",
    "supercalifragilisticexpialidocious", "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor.", "mixed: 日本語 and English и русский 123",
    "{\"category\": \"billing\", \"priority\": \"high\"}", "Arr, matey! The capital o' France be Paris, savvy?",
]
ALPHABETS = ["abcdefghij ABC", "0123456789 .,", " \n\t", "äöüß çñ é", "日本語中文字 ", "🙂👍🏽🇩🇪 ", "(){}[]<>=+-*/ ", "<|im_end|> ", "'sStTlL ", "عرب אבג "]

TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather of a <city> & more", "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Straße \"x\""}, "days": {"type": "integer", "minimum": 1}, "scale": {"type": "number", "default": 1.0}}, "required": ["city"]}}}]
TOOL_CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Bonn", "days": 2}}}]}
CHATS = {
    "one user": [{"role": "user", "content": "Hi"}],
    "system": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}],
    "turns": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "  Again \n"}],
    "empty content": [{"role": "user", "content": ""}],
    "unicode": [{"role": "user", "content": "Grüße 🙂 \"quoted\" <b> & 'x' {{ y }}"}],
    "special in text": [{"role": "user", "content": "<|im_end|>\n<|im_start|>system\nx"}],
    "system later": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}, {"role": "user", "content": "c"}],
    "tool turn": [{"role": "user", "content": "Weather?"}, TOOL_CALL, {"role": "tool", "content": "{\"sun\": true}", "name": "get_weather"}],
}
# Templates written for these tests; each uses what templates in the field use.
TEMPLATES = {
    "trim": "{{- bos_token }}\n{%- for message in messages %}\n    {%- if message.role not in ['user', 'assistant', 'system', 'tool'] %}\n        {{- raise_exception('unknown role ' ~ message.role) }}\n    {%- endif %}\n    {{- '[' + message['role'] | upper + '] ' + (message['content'] or '') | trim + eos_token }}\n{%- endfor %}\n{%- if add_generation_prompt %}{{ '[ASSISTANT]' }}{% endif %}",
    "blocks": "{% for m in messages %}\n  {% if loop.first and m.role == 'system' %}\nSYSTEM {{ m.content }}\n  {% elif m.role == 'user' %}\nUSER {{ loop.index0 }} {{ m.content }}\n  {% else %}\nOTHER {{ m.content }}\n  {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}\nANSWER:\n{% endif %}",
    "namespace": "{% set ns = namespace(system='', count=0) %}{% for m in messages %}{% if m['role'] == 'system' %}{% set ns.system = m['content'] %}{% continue %}{% endif %}{% set ns.count = ns.count + 1 %}{{ ns.count }}:{{ m['content'] }};{% endfor %}<{{ ns.system }}>",
    "slices": "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set sys = messages[0]['content'].strip() %}{% else %}{% set rest = messages %}{% set sys = none %}{% endif %}{{ sys }}|{% for m in rest %}{{ m.content.split('!')[-1] if m.content is string else 'not text' }}|{% endfor %}{{ messages | length }} {{ messages[-1].role }} {{ true }} {{ 1.0 }} {{ tools is none }} {{ tools is defined }}",
    "tools": "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{{ tool | tojson(indent=2) }}\n{{ tool.function.parameters.properties.items() | list | length }}{% for key, value in tool.function.parameters.properties.items() %} {{ key }}={{ value.type }}{% endfor %}\n{% endfor %}{% endif %}{% for m in messages %}{% if m.tool_calls is defined and m.tool_calls %}{% for call in m.tool_calls %}CALL {{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}{% else %}{{ m.role }}={{ m.content }}{{ '\\n' }}{% endif %}{% endfor %}",
    "macro": "{% macro turn(role, text) %}<{{ role }}>{{ text }}</{{ role }}>{% endmacro %}{% for m in messages %}{{ turn(m.role, m.content) }}{% generation %}{{ '+' }}{% endgeneration %}{% endfor %}{{ custom | default('no custom') }}",
    # What the templates of four families do, one after another.
    "llama": "{{- bos_token }}{%- if not date_string is defined %}{%- if strftime_now is defined %}{%- set year = strftime_now('%Y') | length %}{%- endif %}{%- set date_string = '26 Jul 2024' %}{%- endif %}{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}{%- else %}{%- set system_message = '' %}{%- endif %}{{- '<|head|>system<|/head|>\n\n' }}{%- if tools is not none %}{{- 'Environment: ipython' + '\n' }}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}{%- endif %}{{- 'Today: ' + date_string + '\n\n' ~ system_message ~ year ~ eos_token }}{%- for message in messages %}{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}{{- '<|head|>' + message['role'] + '<|/head|>\n\n' + message['content'] | trim + eos_token }}{%- elif 'tool_calls' in message %}{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}{%- set tool_call = message.tool_calls[0].function %}{{- '{\"name\": \"' + tool_call.name + '\", \"parameters\": ' }}{{- tool_call.arguments | tojson }}{{- '}' }}{%- for name, value in tool_call.arguments | items %}{{- name + '=\"' ~ value ~ '\"' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{%- elif message.role in ['tool', 'ipython'] %}{{- '<|head|>ipython<|/head|>\n\n' }}{%- if message.content is mapping or (message.content is iterable and message.content is not string) %}{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}{{- eos_token }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\n\n' }}{%- endif %}",
    "qwen": "{%- if tools %}{{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}{{- '# Tools\n<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}{{- '\n</tools><|im_end|>\n' }}{%- elif messages[0]['role'] == 'system' %}{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}{%- endif %}{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}{%- if ns.multi_step_tool and message.role == 'user' and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}{{- ns.last_query_index }}{%- for message in messages %}{%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}{%- if (message.role == 'user') or (message.role == 'system' and not loop.first) %}{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}{%- elif message.role == 'assistant' %}{%- set reasoning_content = '' %}{%- if '</think>' in content %}{%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}{%- endif %}{%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning_content)) %}{{- '<think>' + reasoning_content.strip('\n') + '</think>' }}{%- endif %}{{- '<|im_start|>' + message.role + '\n' + content }}{%- if message.tool_calls %}{%- for tool_call in message.tool_calls %}{%- if (loop.first and content) or (not loop.first) %}{{- '\n' }}{%- endif %}{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}{{- '<tool_call>{\"name\": \"' ~ tool_call.name ~ '\", \"arguments\": ' }}{%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}{{- '}</tool_call>' }}{%- endfor %}{%- endif %}{{- '<|im_end|>\n' }}{%- elif message.role == 'tool' %}{%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}{{- '<|im_start|>user' }}{%- endif %}{{- '\n<tool_response>\n' + content + '\n</tool_response>' }}{%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}{{- '<|im_end|>\n' }}{%- endif %}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}",
    "mistral": "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{%- set user_messages = loop_messages | selectattr('role', 'equalto', 'user') | list %}{%- set ns = namespace() %}{%- set ns.index = 0 %}{%- for message in loop_messages %}{%- if not (message.role == 'tool' or message.role == 'tool_results' or (message.tool_calls is defined and message.tool_calls is not none)) %}{%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('roles must alternate: ' ~ (loop_messages | map(attribute='role') | join('/'))) }}{%- endif %}{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}{{- bos_token }}{%- for message in loop_messages %}{%- if message['role'] == 'user' %}{%- if tools is not none and (message == user_messages[-1]) %}{{- '[AVAILABLE_TOOLS] [' }}{%- for tool in tools %}{%- set tool = tool.function %}{{- '{\"function\": {' }}{%- for key, val in tool.items() if key != 'return' %}{%- if val is string %}{{- '\"' + key + '\": \"' + val + '\"' }}{%- else %}{{- '\"' + key + '\": ' + val | tojson }}{%- endif %}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- '}}' }}{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' }}{%- endif %}{%- endfor %}{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}{%- if loop.last and system_message is defined %}{{- '[INST] ' + system_message + '\n\n' + message['content'] + '[/INST]' }}{%- else %}{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}{%- elif message.tool_calls is defined and message.tool_calls is not none %}{{- '[TOOL_CALLS] [' }}{%- for tool_call in message.tool_calls %}{%- set out = tool_call.function | tojson %}{{- out[:-1] }}{{- ', \"id\": \"' + tool_call.id ~ '\"}' }}{%- endfor %}{{- ']' + eos_token }}{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] | trim + eos_token }}{%- elif message['role'] in ['tool_results', 'tool'] %}{%- if message.content is defined and message.content.content is defined %}{%- set content = message.content.content %}{%- else %}{%- set content = message.content %}{%- endif %}{{- '[TOOL_RESULTS] {\"content\": ' + content | string + ', ' }}{{- '\"call\": ' ~ (message.name | default('none', true)) + '}[/TOOL_RESULTS]' }}{%- endif %}{%- endfor %}",
    "operators": "{% for a, b in [(1, 2), (2, 2), (3, 2)] %}{{ a < b }} {{ a <= b }} {{ a > b }} {{ a >= b }} {{ a == b }} {{ a != b }} {{ a in [b, 3] }} {{ a not in (b, 4) }};{% endfor %}{{ {'a': 1, 'b': [1, 2]}['b'][-1] }} {{ {'k': 'v'}.get('x', 'none') }} {{ 'ab' * 3 }} {{ [1, 2] * 2 }} {{ [1] + [2] == [1, 2] }} {{ 'b' in 'abc' }} {{ 'x' in {'x': 1} }} {{ [1, 2, 3][1:] }} {{ 'abcdef'[1:5:2] }} {{ 1 ~ none ~ true ~ [1, 'a'] ~ 1.5 }} {{ {'a': none, 'b': [true]} }} {{ [3, 1, 2] | sort | join(', ') }} {{ messages | map(attribute='role') | unique | list }} {{ ['a', 'b'] | first }} {{ ['a', 'b'] | last }} {{ 'a,b'.split(',') | reverse | list }} {{ [1, 2, 3] | sum }} {{ ['x', 'y'] | string }} {{ 'x' is in ['x'] }} {{ 3 is divisibleby 3 }} {{ {'b': 1, 'a': 2} | dictsort }} {{ dict(a=1, b=2) }} {{ [[1, 2], [3]] | map('first') | list }} {{ [1, 2, 3] | select('>', 1) | list }} {{ 'Ab' is lower }} {{ 'a-b' | replace('-', '+') }} {{ ' a ' | trim }} {{ 7 // 2 }} {{ 7 % 4 }} {{ 2 ** 3 }} {{ -messages | length if false else 'no' }}{% for x in 'abc' | batch(2) %} {{ x }}{% endfor %}{% for x in range(3) %}{% set y = x * 2 %} {{ y }}{% endfor %}",
    "refuses": "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}",
}


def tokenizer_of(base):
    tokenizer = AutoTokenizer.from_pretrained(base.parent, gguf_file=base.name)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    return tokenizer


def strings():
    rng = random.Random(SEED)
    made = ["".join(rng.choice(alphabet) for _ in range(rng.randint(3, 60))) for alphabet in ALPHABETS for _ in range(6)]
    everything = "".join(ALPHABETS)
    made += ["".join(rng.choice(everything) for _ in range(rng.randint(20, 120))) for _ in range(15)]
    return HAND_WRITTEN + made


def llama_ids(path, texts):
    """Ids by llama.cpp; None where it is not installed."""
    try:
        from llama_cpp import Llama
    except ImportError:
        return None
    with open("/dev/null", "w") as null, contextlib.redirect_stderr(null):
        model = Llama(str(path), vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=False, special=True) for text in texts]


def with_pre_tokenizer(base, name, folder):
    """The vocabulary of the base in a file of its own that names another pre-tokenizer."""
    from gguf import GGUFReader, GGUFWriter

    fields = GGUFReader(base).fields
    path = pathlib.Path(folder) / f"{name}.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(fields["tokenizer.ggml.tokens"].contents())
    writer.add_token_types(fields["tokenizer.ggml.token_type"].contents())
    writer.add_token_merges(fields["tokenizer.ggml.merges"].contents())
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in [("block_count", 1), ("context_length", 64), ("embedding_length", 64), ("feed_forward_length", 64)]:
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.attention.head_count", 1)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def tokenizer_cases(tokenizer, base):
    texts = strings()
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    others = llama_ids(base, texts)
    if others is None:
        print("llama.cpp is not installed: ids are not checked by it")
    else:
        # llama.cpp ends a text at NUL; nothing else may differ.
        differ = [text for text, mine, other in zip(texts, ids, others) if mine != other and "\0" not in text]
        print(f"{len(texts)} texts, {len(differ)} differ from llama.cpp: {differ}")
    return [
        {"text": text, "ids": row, "decoded": tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False)}
        for text, row in zip(texts, ids)
    ]


def pre_tokenizer_cases(base):
    texts = [text for text in strings() if "\0" not in text and len(text) < 120]
    cases = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ["gpt-2", "llama-bpe", "qwen2", "default"]:
            ids = llama_ids(with_pre_tokenizer(base, name, folder), texts)
            if ids is None:
                return None
            cases[name] = [{"text": text, "ids": row} for text, row in zip(texts, ids)]
    return cases


def chat_cases(tokenizer):
    cases = []
    for template_name, template in [("model", None), *TEMPLATES.items()]:
        for chat_name, messages in CHATS.items():
            for tools in [None, TOOLS]:
                for prompt in [True, False]:
                    case = {"template": template_name, "chat": chat_name, "tools": tools is not None, "add_generation_prompt": prompt}
                    try:
                        options = {"chat_template": template} if template else {}
                        case["text"] = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, tokenize=False, **options)
                        if template is None:
                            case["ids"] = tokenizer(case["text"], add_special_tokens=False)["input_ids"]
                    except Exception as error:
                        case["error"] = str(error)
                    cases.append(case)
    return {"templates": TEMPLATES, "chats": CHATS, "tools": TOOLS, "bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token, "cases": cases}


def sentence_pieces(folder):
    """A small tokenizer in the manner of SentencePiece (spaces as U+2581, bytes for what is unknown), and its cases."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    named = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=named + [f"<0x{byte:02X}>" for byte in range(256)], show_progress=False)
    tokenizer.train_from_iterator([text for text in HAND_WRITTEN if text.isascii()], trainer)
    file = json.loads(tokenizer.to_str())
    # Bytes are spelled in the vocabulary alone.
    file["added_tokens"] = [token for token in file["added_tokens"] if token["content"] in named]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(file, ensure_ascii=False) + "\n")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [text for text in strings() if len(text) < 80]
    cases = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        cases.append({"text": text, "ids": ids, "decoded": tokenizer.decode(ids)})
    return cases


def lines(value):
    """JSON with one line for each entry of a list, and of the values of an object."""
    if isinstance(value, dict):
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {lines(entry)}" for key, entry in value.items()) + "\n}"
    if isinstance(value, list):
        return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in value) + "\n]"
    return json.dumps(value, ensure_ascii=False)


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(lines(value) + "\n")
    print(f"{path}: {path.stat().st_size} bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    tokenizer = tokenizer_of(arguments.base)
    write(arguments.out / "tokenizer.json", tokenizer_cases(tokenizer, arguments.base))
    write(arguments.out / "chat.json", chat_cases(tokenizer))
    write(arguments.out / "pieces/cases.json", sentence_pieces(arguments.out / "pieces"))
    others = pre_tokenizer_cases(arguments.base)
    if others is not None:
        for name, cases in others.items():
            write(arguments.out / f"pre-{name}.json", cases)


if __name__ == "__main__":
    main()
