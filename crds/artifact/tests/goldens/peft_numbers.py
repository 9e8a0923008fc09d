"""Writes peft_numbers.json: what PEFT itself makes of odd numbers in a configuration, on the case plain-r8-qv.

usage: peft_numbers.py FOLDER_OF_THE_CASES > peft_numbers.json     needs peft, transformers, torch
"""
import json
import pathlib
import shutil
import sys
import tempfile
import warnings

import numpy
import peft
import torch
from transformers import AutoModelForCausalLM

warnings.simplefilter("ignore")
# As text: Python's reader takes more than JSON has.
CHANGES = [
    '"lora_alpha": 1', '"lora_alpha": 0.5', '"lora_alpha": -16', '"lora_alpha": 0', '"lora_alpha": -0.0',
    '"lora_alpha": 1e-44', '"lora_alpha": 1e-46', '"lora_alpha": 1e-400', '"lora_alpha": 2.7e39',
    '"lora_alpha": 2.8e39', '"lora_alpha": -2.8e39', '"lora_alpha": 1e300', '"lora_alpha": 1e400',
    '"lora_alpha": NaN', '"lora_alpha": Infinity', '"lora_alpha": 1' + "0" * 309, '"lora_alpha": "16"',
    '"lora_alpha": [16]', '"lora_alpha": null', '"lora_alpha": 9e38, "use_rslora": true',
    '"lora_alpha": 1e39, "use_rslora": true', '"alpha_pattern": {"q_proj": 1e300}',
    '"alpha_pattern": {"k_proj": 1e300}', '"alpha_pattern": {"q_proj": 0}',
    '"alpha_pattern": {"q_proj": 0, "v_proj": 1e-50}', '"alpha_pattern": {"q_proj": null}',
    '"alpha_pattern": {"q_proj": "2"}', '"r": 0', '"r": -8', '"r": 8.0', '"r": "8"', '"r": true', '"r": 1e3',
    '"rank_pattern": {"q_proj": 0}', '"rank_pattern": {"q_proj": 8.0}', '"rank_pattern": {"q_proj": null}',
    '"lora_dropout": 0.5', '"lora_dropout": 1', '"lora_dropout": 1.5', '"lora_dropout": -1', '"lora_dropout": "0.1"',
    '"lora_dropout": [0.1]', '"qalora_group_size": 3', '"init_lora_weights": "gaussian"',
    '"init_lora_weights": "Gaussian"', '"init_lora_weights": "eva"', '"init_lora_weights": "orthogonal"',
    '"init_lora_weights": "mica"', '"init_lora_weights": "unheard-of"',
]


def run(cases, change, prompt):
    folder = pathlib.Path(tempfile.mkdtemp())
    shutil.copy(cases / "plain-r8-qv/adapter_model.safetensors", folder)
    config = json.loads((cases / "plain-r8-qv/adapter_config.json").read_text())
    changed = config | json.loads("{" + change + "}")
    (folder / "adapter_config.json").write_text(json.dumps(changed))
    model = AutoModelForCausalLM.from_pretrained(cases / "base", dtype=torch.float32).eval()
    with torch.no_grad():
        base = model(prompt).logits
        try:
            tuned = peft.PeftModel.from_pretrained(model, folder).eval()
        except Exception as error:
            return dict(change=change, error=type(error).__name__)
        answer = tuned(prompt).logits
    scales = {}
    for name, module in tuned.base_model.model.named_modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            # Tensors of single precision are multiplied by a scale of single precision.
            with numpy.errstate(over="ignore"):
                scales[name] = str(numpy.float32(module.scaling["default"]))
    return dict(change=change, scales=scales, differs=bool((answer != base).any()))


cases = pathlib.Path(sys.argv[1])
prompt = torch.tensor([[1, 20, 40, 60]])
json.dump([run(cases, change, prompt) for change in CHANGES], sys.stdout, indent=1)
print()
