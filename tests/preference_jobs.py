# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Small jobs of DPO, KTO and SPIN, four samples to an update, and what they are compared with: a
model of transformers in a loop with PyTorch's optimizer.
"""

import json
from types import SimpleNamespace

import torch
import transformers
from omegaconf import OmegaConf

from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.data.nlp.builders import build_dataloader
from nemo_aligner.launch.script_steps import FakeCheckpointCallback
from tests import hugging_face
from tests.tiny_models import tiny_config

BATCH = 4
RESPONSES = ["was a joy", " is dull, and far too long", " bad", "ly made, but well played; warm"]
CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write(path, records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def job_of(kind, **settings):
    """The section `model`, with `settings` in its section `kind`."""
    cfg = tiny_config("unused")
    model = {"micro_batch_size": 2, "global_batch_size": BATCH, "precision": 32, "seed": 1}
    optim = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.0, "betas": cfg.optim.betas}
    optim |= {"eps": 1e-6, "sched": {"name": "constant"}}
    return OmegaConf.create({**model, "optim": optim, kind: settings, "data": {"num_workers": 0}})


class Log(list):
    """Metrics of the updates; `samples`: of the rollouts."""

    def __init__(self):
        self.samples = []

    def log_metrics(self, metrics, step=None):
        own = {k[6:]: value for k, value in metrics.items() if k.startswith("train/")}
        self.extend([own] if own else [])

    def log_samples(self, name, rows, step=None):
        assert name == "train_samples"
        self.samples += [{"step": step, **row} for row in rows]

    def log_hyperparams(self, *_):
        pass

    def finalize(self):
        pass


def trainer_of(trainer_cls, model, data, steps, saving=None, collate_fn=None, **settings):
    """A trainer over `data`, in their order unless `collate_fn` is given, and its log."""
    order = {"use_random_sampler": False} if collate_fn is None else {"collate_fn": collate_fn}
    cfg = OmegaConf.create({"model": model.cfg})
    loader = build_dataloader(cfg, data, 0, mbs=2, gbs=BATCH, **order)
    optimizer, scheduler = model.setup_megatron_optimization(max_steps=steps)
    log, timer = Log(), SimpleNamespace(start_time=lambda: None, is_finished=lambda: False)
    saving = saving(model, optimizer, scheduler) if saving else FakeCheckpointCallback()
    cfg = {"val_check_interval": -1, "save_interval": -1, "gradient_clip_val": 1.0, **settings}
    loops = (optimizer, scheduler, loader, None, None)
    return trainer_cls(OmegaConf.create(cfg), model, *loops, log, saving, timer), log


# --- the loop that they are compared with


def random_llama():
    settings = {**hugging_face.ODD, "vocab_size": 300, "pad_token_id": None}
    return hugging_face.randomized(hugging_face.causal_lm("Llama", **settings))


def adamw(hf):
    """The optimizer of `job_of`."""
    own = {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.0}
    return torch.optim.AdamW(hf.parameters(), lr=1e-3, **own)


def update(hf, optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(hf.parameters(), 1.0)
    optimizer.step()


def padded(rows, labels):
    """Tokens and labels as tensors of one width; where -100 stands nothing counts."""
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return tokens, torch.tensor([row + [-100] * (width - len(row)) for row in labels])


def exported(trainer, folder, name):
    """The weights of the trained model, as transformers reads its export."""
    parts = (trainer.model, trainer.optimizer, trainer.scheduler)
    callback = CheckpointCallback(folder, *parts, name=name, save_hf=True)
    callback.custom_save({"step": trainer.step}, is_train_end=True)
    written = transformers.AutoModelForCausalLM.from_pretrained(callback.root / f"{name}-hf")
    return dict(written.named_parameters())


def assert_same_weights(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, atol=1e-4, rtol=0, msg=name)
