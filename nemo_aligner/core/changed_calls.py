# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls of NeMo-Aligner that need another form here: `module:name` and what to write.

A test compares all others with its signatures; the page docs/migration.md lists these.
"""

_INTERFACE = "nemo_aligner.models.alignable_interface"
_CLIENTS = "nemo_aligner.models.nlp.gpt.reward_critic_clients"
_DATASETS = "nemo_aligner.data.nlp.datasets"
_ENCODE = "`dataset.encode(text)` returns the token ids alone, not with their number"

CHANGED_CALLS: dict[str, str] = {
    f"{_DATASETS}:DPOModelDataset.__init__": (
        "there is no argument `pad_chosen_rejected_to_max`; items are padded to `seq_length`"
    ),
    f"{_DATASETS}:DPOModelDataset.convert": (
        "conversations get the form that `model.data.chat` or `model.data.chat_template` asks for"
    ),
    f"{_DATASETS}:DPOModelDataset.encode": _ENCODE,
    f"{_DATASETS}:KTOModelDataset.encode": _ENCODE,
    f"{_DATASETS}:RLHFDataset.encode": _ENCODE,
    f"{_DATASETS}:RewardModelDataset.encode": _ENCODE,
    f"{_INTERFACE}:AlignableGenerativeInterface.get_init_policy_logprobs": (
        "it belongs to `PolicyWithReference`, the interface of a policy for PPO"
    ),
    f"{_CLIENTS}:RemoteGPTRMCriticClient.train": (
        "the argument is called `rollout_batch`; by position nothing changes"
    ),
    f"{_CLIENTS}:SaveFuture.__init__": "`RemoteGPTRMCriticClient.save` makes it; do not build one",
}
