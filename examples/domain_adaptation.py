"""Adapt a converted, calibrated model to a new domain by its position parameters alone; all other weights stay.

python examples/domain_adaptation.py MODEL OUT --train domain.txt --held-out other.txt
"""

import argparse
import math

from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from hf_drope import DroPETrainer
from hf_drope.text import PackedText
from hf_drope.training import freeze_all_but_position, position_parameters

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", metavar="MODEL", help="a converted checkpoint folder with a position bias")
parser.add_argument("out", metavar="OUT", help="the folder for the adapted model")
parser.add_argument("--train", metavar="FILE", nargs="+", required=True, help=".txt or .jsonl of the new domain")
parser.add_argument("--held-out", metavar="FILE", nargs="+", required=True, help="other text of the same domain")
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--length", type=int, default=512, help="tokens a sequence")
parser.add_argument("--learning-rate", type=float, default=1e-3)
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForCausalLM.from_pretrained(options.model, dtype="float32")
freeze_all_but_position(model)
chosen = sum(parameter.numel() for _, parameter in position_parameters(model))
print(f"training {chosen} of {model.num_parameters()} parameters")

trainer = DroPETrainer(
    model=model,
    args=TrainingArguments(
        output_dir=f"{options.out}/training",
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        logging_steps=max(1, options.steps // 20),
        save_strategy="no",
        report_to=[],
    ),
    train_dataset=PackedText(options.train, tokenizer, options.length),
    eval_dataset=PackedText(options.held_out, tokenizer, options.length),
    position_learning_rate=options.learning_rate,
)
before = math.exp(trainer.evaluate()["eval_loss"])
trainer.train()
after = math.exp(trainer.evaluate()["eval_loss"])
print(f"held-out perplexity: {before:.3f} before, {after:.3f} after")
model.save_pretrained(options.out)
tokenizer.save_pretrained(options.out)
