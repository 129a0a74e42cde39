"""Convert a checkpoint folder, calibrate it on the text and train it with Transformers' Trainer to predict as its source.

python examples/train_with_trainer.py SRC OUT book.txt --steps 100
"""

import argparse

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from hf_drope import (
    Distillation,
    DroPECallback,
    DroPESchedule,
    DroPETrainer,
    calibrate_checkpoint,
    convert_checkpoint,
    plan_conversion,
)
from hf_drope.record import METRICS_FILE, ConvergenceRecord, draw_record
from hf_drope.schedule import learning_rate_warmup_steps
from hf_drope.text import PackedText
from hf_drope.training import train_attention_and_position

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("source", metavar="SRC", help="a local checkpoint folder")
parser.add_argument("out", metavar="OUT", help="a new folder")
parser.add_argument("texts", metavar="FILE", nargs="+", help=".txt or .jsonl")
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--length", type=int, help="tokens a sequence (default: 512, at most the context)")
parser.add_argument("--tokens", type=int, default=16384, help="tokens for the calibration")
parser.add_argument("--distill", type=float, default=0.5, help="weight of the source's predictions in the loss")
options = parser.parse_args()

converted = convert_checkpoint(plan_conversion(options.source, "disentangled"), f"{options.out}/converted")
options.length = options.length or min(512, AutoConfig.from_pretrained(options.source).max_position_embeddings)
length = min(options.length, options.tokens)
report = calibrate_checkpoint(converted, options.source, options.texts, tokens=options.tokens, length=length)
print(report.describe())

tokenizer = AutoTokenizer.from_pretrained(converted)
model = AutoModelForCausalLM.from_pretrained(converted, dtype="float32")
train_attention_and_position(model)
teacher = AutoModelForCausalLM.from_pretrained(options.source, dtype="auto")

trainer = DroPETrainer(
    model=model,
    args=TrainingArguments(
        output_dir=f"{options.out}/training",
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=1e-4,
        lr_scheduler_type="cosine",
        warmup_steps=learning_rate_warmup_steps(options.steps),
        logging_steps=max(1, options.steps // 50),
        save_steps=max(1, options.steps // 2),
        report_to=[],
    ),
    train_dataset=PackedText(options.texts, tokenizer, options.length),
    # A calibrated model has nothing to fade; without calibration, DroPESchedule() and rope_scale=1 in the plan.
    callbacks=[
        DroPECallback(DroPESchedule(warmup=0, transition=0, temperature_curve="constant")),
        ConvergenceRecord(options.batch_size * options.length),
    ],
    distill=Distillation(teacher, weight=options.distill) if options.distill else None,
)
trainer.train()
model.save_pretrained(f"{options.out}/recalibrated")
tokenizer.save_pretrained(f"{options.out}/recalibrated")
picture = draw_record(f"{options.out}/training/{METRICS_FILE}", f"{options.out}/convergence.png")
print("convergence:", picture or f"{options.out}/training/{METRICS_FILE} (no picture without matplotlib)")
