"""What is right: greedy continuations by transformers (the GGUF dequantised to fp32) and PEFT on top.

    python truth.py --base SmolLM2-135M-Instruct.Q4_1.gguf --adapters ../../../../e2e/demo/adapters --out ../golden/truth

For the base and each adapter NAME writes `NAME.json` (per prompt the prompt's ids, 64 greedy tokens that run on past end
tokens, the log-probability of each, and the gap in log-probability to the second best) and `NAME.top64.bin`: for every
fourth answer token of each prompt in turn, the 64 best ids (u16) and then their log-probabilities (f32), little-endian.
`NAME-long` likewise has 16 tokens behind prompts of 129, 1000 and 2000.
"""

import argparse
import json
import pathlib
import struct

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from text import tokenizer_of

TOKENS, LONG_TOKENS = 64, 16
TOP = 64
TOP_EVERY = 4
ADAPTERS = ["tickets", "pirate"]
PROMPTS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "How do I bake a potato?"}],
    [{"role": "user", "content": "Tell me about dogs."}],
    [{"role": "user", "content": "Explain in three sentences how a rainbow forms."}],
    [{"role": "user", "content": "Write a Python function that adds two numbers."}],
    [{"role": "user", "content": "Your website took two payments from my card for one order. Please return the money today, this is urgent!"}],
    [{"role": "user", "content": "My shoes were supposed to be here on Monday, but the parcel is still in the depot. Can you check?"}],
    [{"role": "system", "content": "You answer with one word."}, {"role": "user", "content": "Which colour has snow?"}],
    [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello! How can I help you?"}, {"role": "user", "content": "Count from 1 to 30, with commas."}],
    [{"role": "user", "content": "Übersetze ins Englische: „Die Brücke über den Fluß ist 1.250 Meter lang.“ 🙂"}],
]
LONG = " ".join(f"Item {i} costs {i * 7 % 13 + 1} dollars and weighs {i * 5 % 11 + 2} pounds." for i in range(1, 150))
LONG_LENGTHS, LONG_END = [129, 1000, 2000], 40


@torch.inference_mode()
def greedy(model, prompt, count):
    """Greedy tokens, and the log-probabilities of each step over the whole vocabulary."""
    ids, cache, tokens, rows = torch.tensor([prompt]), None, [], []
    while len(tokens) < count:
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        row = torch.log_softmax(out.logits[0, -1].double(), dim=-1)
        tokens.append(int(row.argmax()))
        rows.append(row)
        ids = torch.tensor([[tokens[-1]]])
    return tokens, torch.stack(rows)


def record(model, prompts, name, out, count=TOKENS):
    cases, packed = [], bytearray()
    for prompt in prompts:
        tokens, rows = greedy(model, prompt, count)
        best = rows.topk(TOP, dim=-1)
        gaps = best.values[:, 0] - best.values[:, 1]
        for position in range(0, count, TOP_EVERY):
            packed += struct.pack(f"<{TOP}H", *best.indices[position].tolist())
            packed += best.values[position].numpy().astype("<f4").tobytes()
        case = {"prompt": prompt, "tokens": tokens, "logprobs": [round(value, 6) for value in best.values[:, 0].tolist()]}
        case["gaps"] = [round(value, 6) for value in gaps.tolist()]
        cases.append(case)
        print(f"{name}: smallest gap {min(gaps):.4f}", flush=True)
    body = ",\n".join(json.dumps(case) for case in cases)
    (out / f"{name}.json").write_text(f'{{"tokens": {count}, "top": {TOP}, "top_every": {TOP_EVERY}, "cases": [\n{body}\n]}}\n')
    (out / f"{name}.top64.bin").write_bytes(bytes(packed))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=pathlib.Path, required=True)
    parser.add_argument("--adapters", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_of(arguments.base)
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in PROMPTS]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    chat = [{"role": "user", "content": LONG + "\n\nWhich item costs the most, and which weighs the least?"}]
    ids = tokenizer(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False), add_special_tokens=False)["input_ids"]
    assert len(ids) >= LONG_LENGTHS[-1], len(ids)
    # The same beginning and question; the list between them as long as the length asks for.
    long = [ids[: length - LONG_END] + ids[-LONG_END:] for length in LONG_LENGTHS]
    base = AutoModelForCausalLM.from_pretrained(arguments.base.parent, gguf_file=arguments.base.name, dtype=torch.float32).eval()
    record(base, prompts, "base", arguments.out)
    record(base, long, "base-long", arguments.out, LONG_TOKENS)
    model = None
    for name in ADAPTERS:
        folder = arguments.adapters / name
        if model is None:
            model = PeftModel.from_pretrained(base, folder, adapter_name=name)
        else:
            model.load_adapter(folder, adapter_name=name)
        model.set_adapter(name)
        record(model.eval(), prompts, name, arguments.out)
        record(model, long, f"{name}-long", arguments.out, LONG_TOKENS)


if __name__ == "__main__":
    main()
