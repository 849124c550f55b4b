# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a model of transformers with the `DPOTrainer` of the TRL that `make bench` installs.

A process of its own: tests/unit/test_dpo_model.py compares with another release of TRL.
"""

import argparse
import json
import sys
from pathlib import Path

PEERS = Path(sys.prefix, "peers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of weights")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--pairs", required=True, help="JSONL with prompt, chosen, rejected")
    parser.add_argument("--output", required=True, help="folder for weights and log.json")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="pairs of a step")
    parser.add_argument("--loss", required=True, help="as TRL names it")
    at = parser.parse_args()
    sys.path.insert(0, str(PEERS))
    import datasets
    import torch
    import transformers
    import trl

    class InOrder(trl.DPOTrainer):
        def _get_train_sampler(self, *_args: object) -> torch.utils.data.Sampler:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    parts = {"output_dir": at.output, "max_steps": at.steps}
    parts |= {"per_device_train_batch_size": at.batch // 2, "gradient_accumulation_steps": 2}
    parts |= {"learning_rate": 1e-3, "adam_beta1": 0.9, "adam_beta2": 0.98, "adam_epsilon": 1e-6}
    parts |= {"weight_decay": 0.0, "max_grad_norm": 1.0, "lr_scheduler_type": "constant"}
    parts |= {"loss_type": at.loss, "beta": 0.3, "max_length": None}
    parts |= {"gradient_checkpointing": False, "bf16": False, "use_cpu": True, "report_to": "none"}
    parts |= {"save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
    config = trl.DPOConfig(**parts)
    trainer = InOrder(
        model=transformers.AutoModelForCausalLM.from_pretrained(at.model, dtype=torch.float32),
        args=config,
        train_dataset=datasets.Dataset.from_list(
            [json.loads(line) for line in Path(at.pairs).read_text().splitlines()]
        ),
        processing_class=transformers.AutoTokenizer.from_pretrained(at.tokenizer),
    )
    trainer.train()
    trainer.save_model(at.output)
    steps = [line for line in trainer.state.log_history if "loss" in line]
    Path(at.output, "log.json").write_text(json.dumps({"trl": trl.__version__, "steps": steps}))


if __name__ == "__main__":
    main()
