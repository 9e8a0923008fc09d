"""Writes peft_doubles.json: what PEFT makes of tensors that are stored as F64, on the case plain-r8-qv, as bits in hexadecimal.

usage: peft_doubles.py FOLDER_OF_THE_CASES > peft_doubles.json     needs peft, transformers, torch
"""
import json
import pathlib
import shutil
import struct
import sys
import tempfile
import warnings

import numpy
import peft
import safetensors.numpy
import torch
from transformers import AutoModelForCausalLM

warnings.simplefilter("ignore")
cases = pathlib.Path(sys.argv[1])
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
# Ties, neighbours of ties, the ends of single precision and beyond, subnormal ones, and what becomes zero.
DOUBLES = [
    0.1, 1 / 3, -2 / 3, 1 + 2**-24, 1 + 2**-24 + 2**-50, 1 + 3 * 2**-24, -1 - 2**-24, 16777217.0, 3.4028234663852886e38,
    3.4028235677973365e38, 3.4028235677973366e38, -3.5e38, 1e300, 1.1754943508222875e-38, 1.17549429e-38, 1.4e-45,
    7.006492321624085e-46, 7.006492321624086e-46, -1e-46, 5e-324, -0.0, 0.0,
]

values = safetensors.numpy.load_file(cases / "plain-r8-qv" / "adapter_model.safetensors")
tensors = {name: tensor.astype(numpy.float64) for name, tensor in values.items()}
tensors[NAME].reshape(-1)[: len(DOUBLES)] = DOUBLES
with tempfile.TemporaryDirectory() as folder:
    shutil.copy(cases / "plain-r8-qv" / "adapter_config.json", folder)
    safetensors.numpy.save_file(tensors, pathlib.Path(folder) / "adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(cases / "base", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, folder)
loaded = dict(model.named_parameters())[NAME.replace(".weight", ".default.weight")]
assert loaded.dtype == torch.float32, loaded.dtype
singles = loaded.detach().reshape(-1)[: len(DOUBLES)].numpy()
rows = [
    {"double": struct.pack(">d", double).hex(), "single": struct.pack(">f", single).hex()}
    for double, single in zip(DOUBLES, singles)
]
print("[\n" + ",\n".join(" " + json.dumps(row) for row in rows) + "\n]")
