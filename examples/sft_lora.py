"""Supervised fine-tuning with TRL: LoRA on a converted and calibrated model, merged at the end.

pip install "hf-drope[train]"
python examples/sft_lora.py MODEL OUT pairs.jsonl

A line of pairs.jsonl: {"prompt": "The capital of France is", "completion": " Paris."}
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from hf_drope import lora_config
from hf_drope.training import PositionGroupsMixin

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", metavar="MODEL", help="a converted checkpoint folder")
parser.add_argument("out", metavar="OUT", help="a folder for checkpoints and the merged model")
parser.add_argument("data", metavar="FILE", help=".jsonl with prompt and completion")
parser.add_argument("--steps", type=int, default=100, help="default: 100")
parser.add_argument("--batch-size", type=int, default=4, help="pairs a step (default: 4)")
parser.add_argument("--length", type=int, default=512, help="tokens at which a pair is cut")
parser.add_argument("--packing", action="store_true", help="several pairs in a row, without padding")
parser.add_argument("--rank", type=int, default=16, help="of the adapters (default: 16)")
parser.add_argument("--learning-rate", type=float, default=2e-4, help="default: 2e-4")
options = parser.parse_args()
if not Path(options.data).is_file():
    parser.error(f"there is no file {options.data}")
if not hasattr(AutoConfig.from_pretrained(options.model), "drope_parameters"):
    parser.error(f"{options.model} is not converted; hf-drope convert {options.model} DST")


class DroPESFTTrainer(PositionGroupsMixin, SFTTrainer):
    """TRL's trainer with a learning rate of their own for the position parameters."""


tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForCausalLM.from_pretrained(options.model, dtype="float32")
trainer = DroPESFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir=f"{options.out}/training",
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        logging_steps=max(1, options.steps // 20),
        max_length=options.length,
        # Documents of a packed row see only themselves, with sdpa and eager too; the strategy "wrapped" would mix them.
        packing=options.packing,
        bf16=torch.cuda.is_available(),
        report_to=[],
    ),
    train_dataset=Dataset.from_json(options.data),
    processing_class=tokenizer,
    peft_config=lora_config(model, options.rank),
)
trainer.train()
merged = trainer.model.merge_and_unload()
merged.save_pretrained(f"{options.out}/merged")
tokenizer.save_pretrained(f"{options.out}/merged")
print(f"merged model in {options.out}/merged")
