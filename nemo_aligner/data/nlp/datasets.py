# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The datasets, at NeMo-Aligner's module path. They read the files of `data_files.py`; the first
two read files of tokens too.
"""

from nemo_aligner.core.retired import retired_names
from nemo_aligner.data.nlp.labelled_responses import KTOModelDataset
from nemo_aligner.data.nlp.labelled_texts import DEFAULT_MASK_VALUE, RegressionRewardModelDataset
from nemo_aligner.data.nlp.preference_pairs import (
    DPOModelDataset,
    LabelledPairDataset,
    RewardModelDataset,
)
from nemo_aligner.data.nlp.prompts import RLHFDataset
from nemo_aligner.data.nlp.records import Records
from nemo_aligner.data.nlp.sft_chat import SFTChatDataset
from nemo_aligner.data.nlp.sft_examples import SFTDataset
from nemo_aligner.data.nlp.steerlm2 import SteerLM2Dataset
from nemo_aligner.data.nlp.topk_logits import KnowledgeDistillationDataset

__all__ = [
    "DEFAULT_MASK_VALUE",
    "DPOModelDataset",
    "KnowledgeDistillationDataset",
    "KTOModelDataset",
    "LabelledPairDataset",
    "RLHFDataset",
    "Records",
    "RegressionRewardModelDataset",
    "RewardModelDataset",
    "SFTChatDataset",
    "SFTDataset",
    "SteerLM2Dataset",
]

__getattr__ = retired_names(__name__)
