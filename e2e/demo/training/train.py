"""Trains the demo's adapters with PEFT on the dequantised GGUF base, on CPU, from a seed.

    python train.py tickets|pirate|stranger --base SmolLM2-135M-Instruct.Q4_1.gguf --out ../adapters

Writes `<out>/<name>/adapter_config.json` and `adapter_model.safetensors`, whose metadata declares the digest of the base.
"""

import argparse
import hashlib
import json
import math
import pathlib
import random
import tempfile
import time

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import pirate_data
import tickets_data

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
SEED = 20260101
TOKENS_MAX = 96

RECIPES = {
    "tickets": dict(rank=8, alpha=16, modules=["q_proj", "v_proj"], epochs=3, rate=2e-3, data=tickets_data),
    "pirate": dict(rank=16, alpha=32, modules=["q_proj", "v_proj", "o_proj"], epochs=4, rate=1e-3, data=pirate_data),
}


def digest(folder, names):
    """SHA-256 of what `sha256sum` prints for the sorted file names inside the folder."""
    lines = "".join(f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in sorted(names))
    return "sha256:" + hashlib.sha256(lines.encode()).hexdigest()


def write_adapter(model, folder, base_name, base_digest):
    """PEFT's own layout: its config, its key names; bf16 weights; the declared base in the metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.peft_config["default"]
    config.base_model_name_or_path = base_name
    config.inference_mode = True
    config.save_pretrained(folder)
    # PEFT keeps modules as a set: sorted, so that the same training gives the same digest.
    file = folder / "adapter_config.json"
    fields = json.loads(file.read_text())
    fields["target_modules"] = sorted(fields["target_modules"])
    file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    weights = {key: value.to(torch.bfloat16).contiguous() for key, value in get_peft_model_state_dict(model).items()}
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt", "lorafleet.base_digest": base_digest})
    print(f"{folder.name}: {digest(folder, ['adapter_config.json', 'adapter_model.safetensors'])} for base {base_digest}")


def tokenise(tokenizer, question, answer):
    """Ids of the chat, and labels that cover the answer and its end token only."""
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answer_ids = tokenizer(answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    ids = (prompt_ids + answer_ids)[:TOKENS_MAX]
    return ids, ([-100] * len(prompt_ids) + answer_ids)[:TOKENS_MAX]


def collate(rows, pad):
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows])
    return ids, labels, mask


def batches(rows, size, rng):
    """Rows of like length side by side, so that little is padded; the batches in random order."""
    rows = sorted(rows, key=lambda row: (len(row[0]), rng.random()))
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    rng.shuffle(groups)
    return groups


def answer_loss(model, ids, labels, mask):
    """Cross-entropy over the answer's tokens; the vocabulary projection is done for those rows alone."""
    hidden = model.base_model.model.model(input_ids=ids, attention_mask=mask).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    wanted = targets != -100
    logits = model.base_model.model.lm_head(hidden[wanted])
    return torch.nn.functional.cross_entropy(logits.float(), targets[wanted])


def train(name, base, out, batch_size=8):
    recipe = RECIPES[name]
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    tokenizer = AutoTokenizer.from_pretrained(base.parent, gguf_file=base.name)
    # The frozen base in bf16 for speed; PEFT keeps the adapter's own weights in fp32 while they are trained.
    model = AutoModelForCausalLM.from_pretrained(base.parent, gguf_file=base.name, dtype=torch.bfloat16)
    config = LoraConfig(r=recipe["rank"], lora_alpha=recipe["alpha"], target_modules=recipe["modules"], task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    model.print_trainable_parameters()
    rows = [tokenise(tokenizer, *pair) for pair in recipe["data"].examples(SEED)]
    steps = recipe["epochs"] * math.ceil(len(rows) / batch_size)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe["rate"], weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 10, 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    print(f"{len(rows)} examples, {steps} steps, {max(len(ids) for ids, _ in rows)} tokens at most", flush=True)
    model.train()
    step, started = 0, time.time()
    for epoch in range(recipe["epochs"]):
        for group in batches(rows, batch_size, rng):
            loss = answer_loss(model, *collate(group, tokenizer.pad_token_id))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                print(f"epoch {epoch} step {step}/{steps} loss {loss.item():.3f} {(time.time() - started) / step:.2f} s/step", flush=True)
    write_adapter(model.eval(), out / name, HUB_NAME, digest(base.parent, [base.name]))


def stranger(out):
    """An adapter that is sound in itself but belongs to another base: a Llama of hidden size 64."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    base = LlamaForCausalLM(config)
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        base.save_pretrained(folder)
        base_digest = digest(folder, ["config.json", "model.safetensors"])
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.02)
    write_adapter(model, out / "stranger", "example/tiny-llama-64", base_digest)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=[*RECIPES, "stranger"])
    parser.add_argument("--base", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent.parent / "adapters")
    parser.add_argument("--threads", type=int, default=1, help="more are faster on an idle machine only")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.name == "stranger":
        return stranger(arguments.out)
    if arguments.base is None:
        parser.error("--base is needed for this adapter")
    return train(arguments.name, arguments.base, arguments.out)


if __name__ == "__main__":
    main()
