"""Prints the greedy answers of the base and of each adapter to the held-out prompts.

    python chat.py --base SmolLM2-135M-Instruct.Q4_1.gguf
"""

import argparse
import json
import pathlib

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = pathlib.Path(__file__).parent
TOKENS_MAX = 48


@torch.inference_mode()
def answer(model, tokenizer, question):
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**inputs, max_new_tokens=TOKENS_MAX, do_sample=False)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=pathlib.Path, required=True)
    base = parser.parse_args().base
    tokenizer = AutoTokenizer.from_pretrained(base.parent, gguf_file=base.name)
    model = AutoModelForCausalLM.from_pretrained(base.parent, gguf_file=base.name, dtype=torch.float32).eval()
    prompts = json.loads((HERE / "held_out.json").read_text())
    for question in prompts["tickets"] + prompts["pirate"]:
        print(f"base     {question!r}\n         {answer(model, tokenizer, question)!r}", flush=True)
    for name, questions in prompts.items():
        adapted = PeftModel.from_pretrained(model, HERE.parent / "adapters" / name).eval()
        for question in questions:
            print(f"{name:8} {question!r}\n         {answer(adapted, tokenizer, question)!r}", flush=True)
        model = adapted.unload()


if __name__ == "__main__":
    main()
