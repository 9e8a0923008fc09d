"""Writes peft_defaults.json: every field that PEFT writes into a plain adapter's configuration, with its default value."""

import json
import pathlib
import tempfile

import peft

config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
with tempfile.TemporaryDirectory() as folder:
    config.save_pretrained(folder)
    written = json.loads((pathlib.Path(folder) / "adapter_config.json").read_text())
written["target_modules"].sort()  # It is a set.
target = pathlib.Path(__file__).with_suffix(".json")
target.write_text(json.dumps({"peft": peft.__version__, "config": written}, indent=1, sort_keys=True) + "\n")
