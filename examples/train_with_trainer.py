"""Convert a checkpoint folder and recalibrate it with Transformers' Trainer.

python examples/train_with_trainer.py SRC OUT book.txt
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from hf_drope import DroPECallback, DroPESchedule, DroPETrainer, convert_checkpoint, plan_conversion
from hf_drope.schedule import learning_rate_warmup_steps
from hf_drope.text import PackedText

source, out, *texts = sys.argv[1:]
steps = 200

converted = convert_checkpoint(plan_conversion(source, "drope", overrides={"rope_scale": 1.0}), f"{out}/converted")
tokenizer = AutoTokenizer.from_pretrained(converted)
model = AutoModelForCausalLM.from_pretrained(converted, dtype="float32")

trainer = DroPETrainer(
    model=model,
    args=TrainingArguments(
        output_dir=f"{out}/training",
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=3e-4,
        lr_scheduler_type="cosine",
        warmup_steps=learning_rate_warmup_steps(steps),
        logging_steps=10,
        save_steps=50,
        report_to=[],
    ),
    train_dataset=PackedText(texts, tokenizer, sequence_length=512),
    callbacks=[DroPECallback(DroPESchedule(warmup=0.3, transition=0.3))],
    position_learning_rate=1e-2,
)
trainer.train()
model.save_pretrained(f"{out}/recalibrated")
tokenizer.save_pretrained(f"{out}/recalibrated")
