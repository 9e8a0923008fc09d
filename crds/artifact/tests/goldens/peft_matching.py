"""Writes peft_matching.json: which modules PEFT itself targets, with rank and scale, for many configurations.

usage: peft_matching.py FOLDER_OF_THE_BASE > peft_matching.json     needs peft, transformers, torch
"""
import json
import sys
import warnings

import peft
import torch
from transformers import AutoModelForCausalLM

warnings.simplefilter("ignore")
CONFIGS = [
    dict(target_modules=["q_proj", "v_proj"]),
    dict(target_modules=["self_attn.q_proj"]),
    dict(target_modules=["model.layers.1.self_attn.q_proj", "v_proj"], layers_to_transform=[0]),
    dict(target_modules=["q_proj", "lm_head"]),
    dict(target_modules=["q_proj", "lm_head"], layers_to_transform=1),
    dict(target_modules=["q_proj"], layers_to_transform=[1], layers_pattern="layers"),
    dict(target_modules=["q_proj"], layers_to_transform=[0, 1], layers_pattern=["h", "layers"]),
    dict(target_modules=["q_proj"], layers_to_transform=[]),
    dict(target_modules="all-linear"),
    dict(target_modules="ALL-LINEAR"),
    dict(target_modules="all-linear", exclude_modules=["o_proj"]),
    dict(target_modules=["q_proj", "k_proj", "v_proj"], exclude_modules=["model.layers.0.self_attn.k_proj"]),
    dict(target_modules=["q_proj", "k_proj", "v_proj"], exclude_modules=r".*\.1\.self_attn\.(q|k)_proj"),
    dict(target_modules=r".*\.(q|v)_proj"),
    dict(target_modules=r"model\.layers\.\d+\.mlp\.(?:gate|up)_proj"),
    dict(target_modules=r".*(?<!\.0)\.self_attn\.q_proj"),
    dict(target_modules=r"(?!.*mlp).*_proj|lm_head"),
    dict(target_modules=r".*\.0\..*_proj|.*down_proj"),
    dict(target_modules=r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp)\.(?:(?:q_proj|up_proj|down_proj)))"),
    dict(target_modules=["q_proj", "down_proj"], rank_pattern={"q_proj": 3, "model.layers.1.self_attn.q_proj": 5}),
    dict(target_modules=["q_proj", "down_proj"], rank_pattern={"model.layers.1.self_attn.q_proj": 5, "q_proj": 3}),
    dict(target_modules=["q_proj", "down_proj"], rank_pattern={r"layers\.\d+\.mlp": 3, "mlp.down_proj": 7}),
    dict(target_modules=["q_proj", "down_proj"], rank_pattern={"proj": 3, ".*proj": 6}),
    dict(target_modules=["q_proj", "k_proj"], rank_pattern={"q_proj|k_proj": 4}, alpha_pattern={"[qk]_proj": 5}),
    dict(target_modules=["q_proj", "k_proj"], rank_pattern={"^q_proj": 4, "^model.layers.0.*": 2}),
    dict(target_modules=["q_proj", "k_proj"], alpha_pattern={"layers.1.self.attn.q_proj": 2, "attn.q_proj": 3}),
    dict(target_modules=["q_proj", "k_proj"], rank_pattern={r"layers\.1\.self_attn\.q_proj": 2, r"self\.attn\.k_proj": 3}),
    dict(target_modules=["q_proj", "k_proj"], rank_pattern={"self.attn.q_proj": 2, ".k_proj": 3, "_proj": 9}),
    dict(target_modules=["o_proj"], alpha_pattern={"o_proj": 1.5}, rank_pattern={"0.self_attn.o_proj": 16}, use_rslora=True),
    dict(target_modules=["up_proj"], rank_pattern={".*\\.1\\..*": 9}, alpha_pattern={"(?i:UP_PROJ)": 30}),
    # What other languages of regular expressions read otherwise than Python does.
    dict(target_modules=["q_proj", "v_proj"], alpha_pattern={"[q&&v]_proj": 4}, rank_pattern={"[[vk]_proj": 3}),
    dict(target_modules=["k_proj", "v_proj"], alpha_pattern={"[k~~x]_proj": 4, "[]v]_proj": 5}, rank_pattern={"[^]x&&k]_proj": 3}),
    dict(target_modules=["k_proj", "v_proj"], alpha_pattern={r"[a-l-]_proj": 4, r"[\x76]_pro\152": 5}),
    dict(target_modules=["k_proj", "v_proj"], alpha_pattern={r"(.*)attn\.v_proj|": 4, r"\1?.*\.k_proj": 5}),
    dict(target_modules=["q_proj", "v_proj"], alpha_pattern={r"(?#what)q_proj": 4, "(?x: v _ proj # v\n)": 5}),
    dict(target_modules=["q_proj", "v_proj"], alpha_pattern={r"layers\.{,1}0.*": 4, r"layers\.{1,}.*v_{1}proj": 5, r"q_proj{}": 6}),
    dict(target_modules=["q_proj", "v_proj"], alpha_pattern={r"(?P<a>[01])\.self_attn\.q_proj": 4, r"(l)?.*(?(3)v|q)_proj": 5}),
    dict(target_modules=["q_proj", "v_proj"], alpha_pattern={r"a)|(model.*q_proj": 4}),
    dict(target_modules=r"(?ai).*\.Q_proj\Z"),
    dict(target_modules=r"(?xs) .* \. [vq] _proj  # the comment ( [ has no meaning"),
    dict(target_modules=r".*(?>q|v)_pro\u006a|.*(?<=down)_proj"),
    dict(target_modules=r".*[\w.]+\.(?P<k>k)_(?:proj)++|(?i:.*O_PROJ)"),
    # Classes of many letters, many times.
    dict(target_modules=["q_proj", "down_proj"], rank_pattern={r"\w{2,4}_proj": 3, r"\S{1,60}\.[^\W\d]_\w{4}": 5}),
    dict(target_modules=["q_proj", "up_proj"], alpha_pattern={r"[\w.]{1,64}\.\d{1,3}\.[\D]{1,64}up_\w{1,64}": 4, r"\D{1,40}": 7}),
    dict(target_modules=["q_proj", "model.layers.0.self_attn.v_proj"], layers_to_transform=[1], layers_pattern=["model|layers", "layers"]),
    dict(target_modules=["q_proj"], layers_to_transform=[1], layers_pattern=["[[l]ayers"]),
    dict(target_modules=["q_proj"], init_lora_weights="gaussian", bias="all", fan_in_fan_out=True),
]


def run(config):
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM", **config))
    found = {}
    for name, module in tuned.base_model.model.named_modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            found[name] = [module.r["default"], module.scaling["default"]]
    # As text: the order of its keys counts.
    return dict(config=json.dumps(config), modules=found)


json.dump([run(config) for config in CONFIGS], sys.stdout, indent=1)
print()
