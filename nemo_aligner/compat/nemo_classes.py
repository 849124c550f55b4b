# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What stands in for classes of NeMo's collection `nlp` that this package has no equivalent of."""

from datetime import timedelta
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import DictConfig

from nemo_aligner.data.nlp.nemo_chat import VALUE_TO_TEXT, ChatTokens, Source, Turn, chat_text
from nemo_aligner.launch.processes import resolve_and_create_trainer
from nemo_aligner.parallel.device import get_backend


class NLPDDPStrategy(DDPStrategy):
    """Lightning's strategy, which starts and joins the processes of the job. Megatron reduces the
    gradients; arguments of NeMo's strategy have no use.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(process_group_backend=get_backend(), timeout=timedelta(minutes=30))


class MegatronTrainerBuilder:
    """Builds the trainer of a job; of the whole `cfg`, `trainer` has Lightning's keys only."""

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg

    def create_trainer(self, callbacks: list[Any] | None = None) -> Trainer:
        """The trainer; see `resolve_and_create_trainer`."""
        trainer = resolve_and_create_trainer(self.cfg)
        trainer.callbacks.extend(callbacks or [])
        return trainer


def get_prompt_template_example(special_tokens: Any) -> str:
    """The text of a conversation of two turns in NeMo's chat format, with names in braces where
    texts stand; NeMo-Aligner's SFT script stores it as the prompt template.

    Args:
        special_tokens: `model.data.chat_prompt_tokens`.
    """
    turns = []
    for number in (1, 2):
        turns.append(Turn("User", f"{{turn {number} user message}}"))
        label = f"{{turn {number} assistant label}}"
        turns.append(Turn("Assistant", f"{{turn {number} assistant message}}", label))
    source = Source("{system message}", tuple(turns), kind=VALUE_TO_TEXT)
    return chat_text(source, ChatTokens.of(special_tokens))
