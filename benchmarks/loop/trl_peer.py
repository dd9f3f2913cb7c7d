"""TRL's GRPOTrainer on the same task. Run by the Python of an environment that has TRL.

python trl_peer.py MODEL_DIRECTORY SETTINGS_JSON OUTPUT_JSON
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import reward
import torch
import trl
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepTimes(TrainerCallback):
    def __init__(self):
        self.seconds = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.perf_counter() - self.start)


def rewards(completions, letter, **kwargs):
    pairs = zip(completions, letter, strict=True)
    return [reward.share(completion[0]["content"], wanted) for completion, wanted in pairs]


def main(model: str, settings: dict, output: Path) -> None:
    torch.set_num_threads(settings["threads"])
    size, groups = settings["group_size"], settings["groups_per_step"]
    rows = [
        {
            "prompt": [{"role": "user", "content": reward.prompt(2 * i)}],
            "letter": reward.letter(2 * i),
        }
        for i in range(groups * settings["steps"])
    ]
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=settings["bf16"],
            max_steps=settings["steps"],
            per_device_train_batch_size=settings["micro_batch"],
            gradient_accumulation_steps=size * groups // settings["micro_batch"],
            num_generations=size,
            max_completion_length=settings["max_tokens"],
            temperature=1.0,
            learning_rate=1e-5,
            beta=0.0,
            logging_steps=1000,
            save_strategy="no",
            report_to=[],
            gradient_checkpointing=False,
            shuffle_dataset=False,
            model_init_kwargs={"dtype": settings["dtype"]},
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=rewards,
            args=config,
            train_dataset=Dataset.from_list(rows),
            callbacks=[times],
        )
        trainer.train()
    found = {"seconds": times.seconds, "version": trl.__version__}
    output.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
