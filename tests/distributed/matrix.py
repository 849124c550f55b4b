# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The matrix: every role gives the numbers of one rank at every split. This module holds the
cases as data, and what a rank computes of each; test_matrix.py judges them.

A *case* is (split, architecture, role). One launch serves all cases of as many ranks: the groups
of one split are destroyed and those of the next are created. One rank computes every case first
and leaves the results in files; rank 0 of a split compares with them and reports the deviations.

`deviation(a, b)` is max |a - b| / max |b|, for each tensor separately; for gradients and weights
over the whole (gathered) tensor. Two quantities have no scale of their own. The gradient of a
bias is a sum of terms that may cancel (those of a reward model's last biases do, in every pair):
gradients of the weight and the bias of a module count as one tensor. And a weight may stay zero
but for rounding: max |b| counts at least as `FLOOR` of the largest in its model. In bf16 that
share is a tenth, because biases start at zero and stay small, and of the metrics only loss and
gradient norm are compared: clip fractions are discontinuous.

Samples are dealt to data-parallel ranks in turn, so that a micro-batch of two holds other samples
than on one rank. Slots that must not count hold NaN in the splits and 0 on one rank. One rank
computes all padding (`as_padded`), the splits compute as jobs do.
"""

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.parallel_state import destroy_model_parallel
from omegaconf import OmegaConf

from nemo_aligner.data.nlp.steerlm import LOG_Q
from nemo_aligner.generation import GenerationParams
from nemo_aligner.launch.model_loading import load_from_nemo
from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel, GPTSteerLMModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_critic import MegatronGPTCriticModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_dpo_model import (
    MegatronGPTDPOModel,
    MegatronGPTKTOModel,
    MegatronGPTSPINModel,
)
from nemo_aligner.models.nlp.gpt.megatron_gpt_knowledge_distillation import (
    GPTKnowledgeDistillationModel,
)
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_policy import (
    MegatronGPTActorModel,
    MegatronGPTReinforceActorModel,
    MegatronGPTRSModel,
)
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import (
    MegatronGPTRegressionRewardModel,
    MegatronGPTRewardModel,
)
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.vocab_parallel import logprobs_and_entropy
from nemo_aligner.training.megatron_steps import forward_collect
from nemo_aligner.training.optim import optimizer_step
from tests.distributed.launcher import progress
from tests.padded_runs import as_padded
from tests.scripted_environment import ScriptedEnvironment
from tests.tiny_models import PPO, tiny_config

SAMPLES, WIDTH, ATTRIBUTES, STEPS = 8, 13, 2, 2
STEP_SIZE = 2  # micro-batch of the updates, and of a batch in which no slot counts
EVERYTHING = os.environ.get("MATRIX") == "all"
FLOOR = {32: 1e-3, "bf16": 0.1}
LENGTHS = torch.tensor([13, 5, 9, 7, 12, 4, 10, 6])
EMPTY_SAMPLE = 3  # its mask has no counting slot


@dataclass(frozen=True)
class Split:
    """A way to share the work.

    Attributes:
        ranks: of the job.
        model: keys of the model configuration.
        architectures: that run at it.
        thorough: with all roles, and those of `FEW_ROLES` with all architectures and, one
            architecture each, all loss reductions and sizes of micro-batches; otherwise
            `FEW_ROLES` with `FEW_VARIANTS`.

    The other roles meet the architectures in turn, one at each split. With MATRIX=all in the
    environment: all with all.
    """

    ranks: int
    model: dict = field(default_factory=dict)
    architectures: tuple[str, ...] = ("gpt2", "llama", "lora")
    thorough: bool = False

    @property
    def precision(self):
        return self.model.get("precision", 32)

    def cases(self) -> list[tuple[str, str]]:
        """(architecture, role) that run at it."""
        roles = ROLES if self.thorough or EVERYTHING else FEW_ROLES
        with_all = ROLES if EVERYTHING else FEW_ROLES if self.thorough else ()
        found = []
        for role in roles:
            able = self._able(role)
            if able and role not in with_all:
                able = [self._in_turn(role)]
            found += [(architecture, role) for architecture in able]
        return found

    def has_all_variants(self, architecture: str, role: str) -> bool:
        in_turn = self.thorough and role in FEW_ROLES and architecture == self._in_turn(role)
        return in_turn or EVERYTHING

    def _able(self, role: str) -> list[str]:
        return [a for a in self.architectures if role in ROLES_OF_ARCHITECTURES.get(a, ROLES)]

    def _in_turn(self, role: str) -> str:
        able = self._able(role)
        if len(able) == 1:
            return able[0]
        return able[(list(SPLITS.values()).index(self) + list(ROLES).index(role)) % len(able)]


def _sizes(tp=1, pp=1, vpp=None, cp=1, sp=False, **more) -> dict:
    sizes = {"tensor_model": tp, "pipeline_model": pp, "virtual_pipeline_model": vpp}
    sizes |= {"context": cp}
    sizes = {f"{name}_parallel_size": size for name, size in sizes.items()}
    return dict(sizes, sequence_parallel=sp, **more)


ALL = ("gpt2", "llama", "moe", "lora")
ADAMW = {"name": "adamw"}
SELECTIVE = {"activations_checkpoint_granularity": "selective"}
FULL = {"activations_checkpoint_granularity": "full", "activations_checkpoint_method": "uniform"}
FULL["activations_checkpoint_num_layers"] = 1
# Unless a name says adamw, the optimizer is the distributed one.
SPLITS = {
    "one rank": Split(1, _sizes(), ALL),
    "one rank adamw": Split(1, _sizes(optim=ADAMW), ALL),
    # With experts Megatron Core wants sequence parallelism beside it.
    "TP2": Split(2, _sizes(tp=2)),
    "TP2+SP": Split(2, _sizes(tp=2, sp=True), ALL, thorough=True),
    "PP2": Split(2, _sizes(pp=2), ALL),
    "PP2+VPP2": Split(2, _sizes(pp=2, vpp=2), thorough=True),
    "CP2": Split(2, _sizes(cp=2), ALL, thorough=True),
    "DP2": Split(2, _sizes(), ALL, thorough=True),
    "DP2 adamw": Split(2, _sizes(optim=ADAMW), ALL),
    "EP2": Split(2, _sizes(expert_model_parallel_size=2), ("moe",), thorough=True),
    "EP2 adamw": Split(2, _sizes(expert_model_parallel_size=2, optim=ADAMW), ("moe",)),
    "DP2 overlap": Split(2, _sizes(optim={"overlap_grad_sync": True, "bucket_cap_mb": 0.05})),
    "DP2 adamw overlap": Split(
        2, _sizes(optim={**ADAMW, "overlap_grad_sync": True, "bucket_cap_mb": 0.05})
    ),
    "TP2+SP selective recompute": Split(2, _sizes(tp=2, sp=True, **SELECTIVE)),
    "TP2 full recompute": Split(2, _sizes(tp=2, **FULL)),
    "PP2+VPP2 full recompute": Split(2, _sizes(pp=2, vpp=2, **FULL)),
    "TP2xPP2": Split(4, _sizes(tp=2, pp=2)),
    "TP2+SPxPP2+VPP2": Split(4, _sizes(tp=2, sp=True, pp=2, vpp=2)),
    "TP2xDP2": Split(4, _sizes(tp=2)),
    "PP2+VPP2xDP2 overlap": Split(
        4, _sizes(pp=2, vpp=2, optim={"overlap_grad_sync": True, "bucket_cap_mb": 0.05})
    ),
    "DP4": Split(4, _sizes()),
    "TP2+SPxCP2": Split(4, _sizes(tp=2, sp=True, cp=2)),
    "PP2+VPP2xCP2": Split(4, _sizes(pp=2, vpp=2, cp=2)),
    "CP2xDP2": Split(4, _sizes(cp=2)),
    "CP4": Split(4, _sizes(cp=4)),
    "TP2+SPxEP2": Split(4, _sizes(tp=2, sp=True, expert_model_parallel_size=2), ("moe",)),
    "PP2xEP2": Split(4, _sizes(pp=2, expert_model_parallel_size=2), ("moe",)),
    "TP2+SP bf16": Split(2, _sizes(tp=2, sp=True, precision="bf16")),
    "PP2+VPP2 bf16": Split(2, _sizes(pp=2, vpp=2, precision="bf16")),
    "DP2 bf16": Split(2, _sizes(precision="bf16"), architectures=("llama",)),
    "DP2 adamw bf16": Split(2, _sizes(precision="bf16", optim=ADAMW)),
}
# The architecture "lora" is "llama" with frozen weights and adapters that are not 0 at the start.
TUNING = {"target_modules": ["all"], "adapter_dim": 3, "alpha": 1.5, "variant": "canonical"}
TUNING |= {"row_init_method": "normal", "layer_selection": [2, 3, 4]}
LORA = {"peft_scheme": "lora", "lora_tuning": TUNING}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
REDUCTIONS = ("token", "sequence", "microbatch")


@dataclass(frozen=True)
class Role:
    """A model class, the file that it starts from (`lm` holds no head), and whether its loss has a
    reduction.
    """

    model_class: type
    base: str
    reductions: tuple[str, ...] = REDUCTIONS


ROLES = {
    "actor": Role(MegatronGPTActorModel, "lm"),
    "critic": Role(MegatronGPTCriticModel, "rm"),
    "critic of a language model": Role(MegatronGPTCriticModel, "lm"),
    "reward model": Role(MegatronGPTRewardModel, "rm", ("pairs",)),
    "regression": Role(MegatronGPTRegressionRewardModel, "lm", ("labels",)),
    "sft": Role(GPTSFTModel, "lm"),
    "rs": Role(MegatronGPTRSModel, "lm"),
    "reinforce": Role(MegatronGPTReinforceActorModel, "lm"),
    "dpo": Role(MegatronGPTDPOModel, "lm", ("pairs",)),
    "rpo": Role(MegatronGPTDPOModel, "lm", ("pairs",)),  # `rpo_fwd_kl`, of sums of log-probs
    "distillation": Role(GPTKnowledgeDistillationModel, "lm"),
    "kto": Role(MegatronGPTKTOModel, "lm", ("pairs",)),
    "spin": Role(MegatronGPTSPINModel, "lm", ("pairs",)),
    "steerlm2": Role(GPTSteerLMModel, "lm", ("prompts",)),
}
# In place of a micro-batch size: `dynamic_micro_batch_tokens`. One rank makes three micro-batches
# of the samples; of two data-parallel ranks one makes two, the other one.
DYNAMIC, DYNAMIC_TOKENS = "dynamic", 30
TOP_K = 4  # logits of a teacher
# (loss reduction, micro-batch size)
SIZES = {"token": (1, 2, 4, DYNAMIC), "sequence": (1, 4, DYNAMIC), "microbatch": (1, 2)}
VARIANTS = tuple((reduction, size) for reduction, sizes in SIZES.items() for size in sizes)
# Where not all roles run.
_NEW_HEADS = ("critic of a language model", "regression")
ROLES_OF_ARCHITECTURES = {
    "moe": tuple(
        role for role in ROLES if ROLES[role].base == "lm" and role not in ("rpo", *_NEW_HEADS)
    ),
    "lora": tuple(role for role in ROLES if role not in ("reward model", *_NEW_HEADS)),
}
# Losses of the architectures, where a role has several.
DPO_LOSSES = {"gpt2": {"preference_loss": "rpo_bwd_kl"}, "lora": {"preference_loss": "ipo"}}
DPO_LOSSES |= {"moe": {"preference_loss": "rpo_sq"}}
DPO_LOSSES |= {"llama": {"preference_loss": "dpo", "label_smoothing": 0.1}}
# Of the actor. The golden numbers have the clipped loss of one range at several splits.
POLICY_LOSSES = {"gpt2": {"policy_loss": "cispo"}, "lora": {"policy_loss": "gmpo"}}
POLICY_LOSSES |= {"llama": {"ratio_eps_high": 0.3}, "moe": {"policy_loss": "gspo"}}
RPO = {"preference_loss": "rpo_fwd_kl", "label_smoothing": 0.0}
RPO["preference_average_log_probs"] = False
KD_LOSSES = {
    "gpt2": {"kd_loss": "fwd_kl", "outside_top_k": "renormalize"},
    "lora": {"kd_loss": "fwd_kl", "outside_top_k": "bucket"},
    "llama": {"kd_loss": "jsd", "outside_top_k": "bucket"},
    "moe": {"kd_loss": "bwd_kl", "outside_top_k": "bucket"},
}
FEW_ROLES = ("actor", "critic", "reward model", "dpo")
FEW_VARIANTS = (("token", 1), ("token", DYNAMIC), ("sequence", 1), ("microbatch", 2))
GENERATION = {
    "greedy": GenerationParams(
        max_length=14, use_greedy=True, repetition_penalty=1.3, return_logprobs=True
    ),
    "sampled": GenerationParams(
        max_length=14,
        temperature=1.4,
        top_k=100,
        top_p=0.95,
        end_strings=(*"aeiourstln", "the film"),
        return_logprobs=True,
    ),
}
# Adam divides a gradient by its own size. Where the exact one is zero (the bias of the keys), its
# rounding error would become a step of the size of the learning rate: an eps well above the
# rounding errors keeps that out of the weights.
ADAM_EPS = 1e-3


# --- data


def global_batch(role: str, masked_value: float, empty: bool = False) -> dict:
    """The global batch of a role; slots that do not count hold `masked_value`; no slot counts if
    `empty`.
    """
    generator = torch.Generator().manual_seed(3)
    column = torch.arange(WIDTH)
    responses = (column >= 2) & (column < LENGTHS[:, None])
    responses[EMPTY_SAMPLE] = False
    if empty:
        responses[:] = False

    def tokens():
        return torch.randint(0, 290, (SAMPLES, WIDTH), generator=generator)

    def numbers(mean=0.0, mask=responses):
        values = mean + 0.3 * torch.randn(SAMPLES, WIDTH - 1, generator=generator)
        return torch.where(mask[:, 1:], values, masked_value)

    def references(masks: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"ref_policy_log_probs_{n}": numbers(-5.5, mask) for n, mask in masks.items()}

    first, second = tokens(), tokens()
    counts = responses.any(1)
    swapped = LENGTHS.flip(0)
    others = (column >= 2) & (column < swapped[:, None]) & counts[:, None]
    loss_mask = {"loss_mask": responses.float()}
    mask = {"mask": responses[:, 1:].float()}
    is_end = torch.ones(SAMPLES, dtype=torch.bool)
    is_end[5] = False
    if role == "actor":
        ended = responses & is_end[:, None]
        names = {"advantages": 0.0, "prev_logprobs": -5.5, "old_kl_coefs": 0.3}
        drawn = {name: numbers(mean, ended) for name, mean in names.items()}
        return {"response_tokens": first, "is_end": is_end, **mask, **drawn}
    if role == "reinforce":
        rewards = torch.randn(SAMPLES, generator=generator)
        rewards[EMPTY_SAMPLE] = rewards[5] = masked_value
        drawn = {"rewards_with_kl": rewards, "baseline": torch.randn(SAMPLES, generator=generator)}
        return {"response_tokens": first, "is_end": is_end, **mask, **drawn}
    if role.startswith("critic"):
        return {"tokens": first, "returns": numbers(), "prev_values": numbers(), **mask}
    pairs = {"chosen": first, "rejected": second}
    pairs |= {"chosen_length": LENGTHS, "rejected_length": swapped, **loss_mask}
    if role == "reward model":
        return pairs
    if role in ("dpo", "rpo"):
        pairs |= {"chosen_mask": responses.float(), "rejected_mask": others.float()}
        rewards = {"chosen_reward": torch.arange(SAMPLES) / SAMPLES}
        rewards["rejected_reward"] = torch.zeros(SAMPLES)
        return pairs | rewards | references({"chosen": responses, "rejected": others})
    if role == "spin":
        pairs = global_batch("dpo", masked_value, empty)
        sides = {"chosen": "actual", "rejected": "generated"}
        places = [(side, n) for side in sides for n in pairs if side in n and "reward" not in n]
        renamed = {name.replace(side, sides[side]): pairs[name] for side, name in places}
        return {**renamed, **loss_mask, "is_end": is_end}
    if role == "distillation":
        order = torch.rand(SAMPLES, WIDTH, 290, generator=generator).argsort(-1)
        logits = -torch.rand(SAMPLES, WIDTH, TOP_K, generator=generator).cumsum(-1)
        log_sum_exp = logits.exp().sum(-1).add(0.5).log()
        return {
            "tokens": first,
            "labels": second,
            **loss_mask,
            "topk_token_ids": order[..., :TOP_K],  # in all slices of the vocabulary
            "topk_logits": torch.where(responses[..., None], logits, masked_value),
            "log_sum_exp_logits": torch.where(responses, log_sum_exp, masked_value),
        }
    if role == "kto":
        of_kl = (column >= 1) & (column < swapped[:, None])
        masks = {"samples": responses, "kl_samples": of_kl & counts[:, None]}
        return {
            "samples": first,
            "kl_samples": second,
            "sample_length": LENGTHS,
            "kl_sample_length": swapped,
            **loss_mask,
            "sample_mask": responses.float(),
            "kl_sample_mask": of_kl.float(),
            "preference": (torch.arange(SAMPLES) % 3 > 0).float(),
            **references(masks),
        }
    if role == "regression":
        labels = torch.randn(SAMPLES, ATTRIBUTES, generator=generator)
        labels[0, 1] = -100.0  # no label
        labels[~counts] = masked_value
        return {"inputs": first, "lengths": LENGTHS, "labels": labels, **loss_mask}
    if role == "steerlm2":
        # Two responses to a prompt, of other lengths; one is missing, and so are all of a prompt.
        others[1] = False
        masks = torch.stack([responses, others], 1)
        log_q = -5.5 * masks.sum(-1) + torch.randn(SAMPLES, 2, generator=generator)
        targets = torch.rand(SAMPLES, 2, generator=generator)
        targets = targets / (targets * masks.any(-1)).sum(1, keepdim=True)
        return {
            "tokens": torch.stack([first, second], 1),
            "labels": torch.stack([first.roll(-1, 1), second.roll(-1, 1)], 1),
            "loss_mask": masks.float(),
            LOG_Q: torch.where(masks.any(-1), log_q, masked_value),
            "ws": torch.where(masks.any(-1), targets, masked_value),
        }
    if role == "sft":
        return {"tokens": first, "labels": first.roll(-1, 1), **loss_mask}
    return {"response_tokens": first, **mask}


def my_samples(size: int | None = None) -> slice:
    """The samples of this data-parallel rank, dealt in turn."""
    rank = parallel_state.get_data_parallel_rank
    ranks = parallel_state.get_data_parallel_world_size
    return slice(rank(), size, ranks())


def all_samples(mine) -> list:
    """The samples of all data-parallel ranks, in the order of one rank."""
    shares = [None] * parallel_state.get_data_parallel_world_size()
    dist.all_gather_object(shares, list(mine), group=parallel_state.get_data_parallel_group())
    return [shares[i % len(shares)][i // len(shares)] for i in range(sum(map(len, shares)))]


# --- full tensors


def gathered(model, local=lambda parameter: parameter) -> dict[str, torch.Tensor] | None:
    """`local(parameter)` of all parameters as whole tensors, by their names in a checkpoint; None
    but on rank 0.

    Raises:
        AssertionError: a part that several ranks hold is not the same on all of them.
    """
    pieces = []
    for part in nested_values(model.sharded_weights({})):
        if not isinstance(getattr(part, "data", None), torch.Tensor) or not isinstance(
            part.data, torch.nn.Parameter
        ):
            continue
        data = local(part.data).detach().cpu()
        if isinstance(part, ShardedTensorFactory):
            built = nested_values(dataclasses.replace(part, data=data).build())
        else:
            built = [dataclasses.replace(part, data=data, dtype=data.dtype)]
        for tensor in built:
            assert isinstance(tensor, ShardedTensor)
            piece = tensor.key, tensor.global_shape, tensor.global_slice(), tensor.data.clone()
            pieces.append(piece)
    everything = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(pieces, everything)
    if everything is None:
        return None
    whole = {}
    for key, shape, where, data in (piece for rank in everything for piece in rank):
        full = whole.setdefault(key, torch.full(shape, torch.nan))
        if not full[where].isnan().any():
            apart = deviation(data.float(), full[where], 1e-6)
            assert apart < 1e-6, f"replicas of {key} differ by {apart:.1e}"
        full[where] = data.float()
    assert not any(full.isnan().any() for full in whole.values())
    return whole


def gather_gradient_shards(model) -> None:
    """The distributed optimizer leaves each rank its own part of the sum; make every rank's buffer
    whole.
    """
    for chunk in model.model:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            size, rank = buffer.data_parallel_group.size(), buffer.data_parallel_group.rank()
            for bucket in buffer.buckets:
                shard = bucket.grad_data.view(size, -1)[rank].clone()
                group = buffer.data_parallel_group
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)


def deviation(a: torch.Tensor, b: torch.Tensor, floor: float = 0.0) -> float:
    """max |a - b| / max |b|, the latter at least `floor`; infinite for other shapes or NaN."""
    if a.shape != b.shape or a.isnan().any() or b.isnan().any():
        return float("inf")
    scale = max(float(b.abs().max()), floor)
    return float((a - b).abs().max()) / scale if scale else float(a.abs().max())


# --- what a rank computes


def model_config(tokenizer_dir, architecture: str, **overrides):
    sampled = PPO | {"forward_micro_batch_size": 3}
    warm = sampled | {"sampling_params": PPO["sampling_params"] | {"temperature": 1.3}}
    cfg = tiny_config(
        tokenizer_dir,
        architecture if architecture == "gpt2" else "llama",
        num_layers=4,
        init_method_std=0.2,
        forward_micro_batch_size=3,
        loss_clip_val=0.2,
        ppo=warm | POLICY_LOSSES[architecture],
        rs=sampled,
        reinforce=warm,
        # Differences of sums lose digits: 2.0e-5 after an update of DPO or SPIN.
        dpo={
            "preference_average_log_probs": True,
            "sft_average_log_probs": False,
            "sft_loss_weight": 0.1,
            **DPO_LOSSES[architecture],
        },
        knowledge_distillation={
            **KD_LOSSES[architecture],
            "logits_scale": 0.8,
            "sft_loss_weight": 0.2,
            "on_policy": {"length_params": {"max_length": 14}},
        },
        spin={
            **{key: PPO[key] for key in ("offload_adam_states", "length_params")},
            "sampling_params": PPO["sampling_params"],
            "preference_average_log_probs": True,
            "log_prob_forward_micro_batch_size": 3,
        },
        kto={
            "preference_average_log_probs": architecture != "llama",
            "sft_average_log_probs": False,
            "sft_loss_weight": 0.1,
            "desirable_loss_weight": 1.3,
        },
        steerlm2={"micro_batch_size": 1, "forward_micro_batch_size": 3},
    )
    experts = EXPERTS if architecture == "moe" else {}
    cfg = OmegaConf.merge(cfg, {"optim": {"eps": ADAM_EPS}}, experts, overrides)
    if cfg.precision == "bf16":
        # Rounding moves a ratio from one side of a clip to the other, and with it a whole token
        # into the gradient: here nothing is clipped.
        cfg.ppo.ratio_eps = 100.0
    return cfg


def write_models(tokenizer_dir, folder: Path) -> None:
    """The weights that all start from; one process calls it."""
    for architecture in ("gpt2", "llama", "moe"):
        MegatronGPTModel(model_config(tokenizer_dir, architecture, seed=3)).save_to(
            f"{folder}/{architecture}-lm.nemo"
        )
    for architecture in ("gpt2", "llama"):
        cfg = model_config(tokenizer_dir, architecture, seed=4)
        MegatronGPTRewardModel(cfg).save_to(f"{folder}/{architecture}-rm.nemo")


def build(tokenizer_dir, folder, architecture: str, role: str, overrides: dict):
    """(model, optimizer, scheduler) of a role at the split of this process's groups."""
    heads = {"num_attributes": ATTRIBUTES if role == "regression" else 1}
    own = {"output_sequence": role.startswith("critic"), "regression": heads, **overrides}
    cfg = model_config(tokenizer_dir, architecture, dpo=RPO if role == "rpo" else {}, **own)
    weights = "llama" if architecture == "lora" else architecture
    path = Path(folder) / f"{weights}-{ROLES[role].base}.nemo"
    model = load_from_nemo(ROLES[role].model_class, cfg, None, restore_path=path)
    if architecture == "lora":
        model.init_peft(LORA)
    if role == "critic":
        model.set_reward_model()
    return model, *model.setup_megatron_optimization(10)


def loss_and_gradient(
    model, batch: dict, reduction: str, micro_batch_size: int | str
) -> dict[str, float]:
    """Loss and metrics of a global batch; its gradient is left in the buffers."""
    model.loss_reduction = reduction
    dynamic = micro_batch_size == DYNAMIC
    model.cfg.micro_batch_size = 1 if dynamic else micro_batch_size
    model.cfg.steerlm2.micro_batch_size = model.cfg.micro_batch_size
    model.micro_batch_tokens = DYNAMIC_TOKENS if dynamic else None
    model.prepare_for_training_step()
    mine = {key: value[my_samples()] for key, value in batch.items()}
    loss, metrics = model.get_loss_and_metrics(mine)
    metrics = model.summarize_metrics(metrics) if hasattr(model, "summarize_metrics") else metrics
    return {"loss": loss, **metrics}


def updates(training, batch: dict, steps: int, reduction: str, micro_batch_size: int = 1) -> dict:
    """Losses, metrics and gradient norms of updates; on rank 0 also the first gradient and the
    last weights, whole.
    """
    model, *optimization = training
    numbers, gradients = [], []
    for _ in range(steps):
        metrics = loss_and_gradient(model, batch, reduction, micro_batch_size)
        gradients.append(gradient(model))
        numbers.append(metrics | {"gradient norm": optimizer_step(*optimization, 0.5)})
    weights = gathered(model)
    progress(f"{steps} updates")
    if weights is None:
        return {"numbers": numbers}
    return {"numbers": numbers, "gradient": gradients[0], "weights": weights}


def gradient(model) -> dict[str, torch.Tensor] | None:
    gather_gradient_shards(model)
    return gathered(model, lambda parameter: parameter.main_grad)


def inferred(model, role: str) -> dict[str, torch.Tensor]:
    """What a role infers of the samples: log-probs, entropy, rewards, values; of all ranks."""
    tokens, lengths = global_batch(role, 0.0), LENGTHS[my_samples()]
    names = "response_tokens", "tokens", "inputs", "chosen", "samples", "actual"
    tokens = next(tokens[name] for name in names if name in tokens)[my_samples()]
    model.set_eval()
    outputs = {}
    if role in ("dpo", "rpo", "kto", "spin"):
        model.set_reference_policy()
        outputs |= reference_logprobs(model, role)
        model.set_eval()
    if role in ("actor", "rs", "reinforce"):
        outputs["logprobs"] = model.get_inference_log_probs(tokens, response_lengths=lengths)
    if role == "actor" and model.use_peft:
        outputs["reference logprobs"] = model.get_init_policy_logprobs(tokens, lengths)
    if role == "actor":
        outputs["entropy"] = forward_collect(
            model.model,
            {"tokens": tokens},
            micro_batch_size=3,
            output_fn=lambda logits, batch: logprobs_and_entropy(
                logits, batch["tokens"], inference_only=True, **model._distribution()
            )[1],
            lengths=lengths,
            by_position=True,
        )
    if role == "critic":
        outputs["rewards"], outputs["values"] = model.infer_rm_critic((tokens, lengths))
    elif role.startswith("critic"):
        outputs["values"] = model.infer((tokens, lengths))
    elif role in ("reward model", "regression"):
        outputs["rewards"] = model.infer((tokens, lengths))
    model.set_train()
    return of_all_samples(outputs)


def of_all_samples(outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.stack(all_samples(value.cpu())) for name, value in outputs.items()}


def reference_logprobs(model, role: str) -> dict[str, torch.Tensor]:
    """Those of both halves of this rank's samples."""
    batch = {key: value[my_samples()] for key, value in global_batch(role, 0.0).items()}
    halves = model.get_ref_policy_logprobs(batch).chunk(2)
    return {f"reference logprobs {n}": half for n, half in enumerate(halves)}


def ragged_prompts(rows: int = 10) -> tuple[torch.Tensor, ...]:
    """Tokens, lengths and seeds."""
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(0, 290, (rows, 7), generator=generator)
    return prompts, torch.randint(1, 8, (rows,), generator=generator), torch.arange(rows) + 50


def generated(
    model, role: str = "actor", kinds: Iterable[str] = (*GENERATION, "turns"), rows: int = 10
) -> dict[str, list]:
    """Token ids, whether the response ended, and the sampler's log-probs (of an actor), for so
    many ragged prompts; "turns": of conversations with an environment.
    """
    mine = [x[my_samples()] for x in ragged_prompts(rows)]
    if role == "distillation":  # what it learns from with a served teacher
        return {"student": all_samples(samples_of(model.respond(*mine)))}
    results = {}
    for name in kinds:
        params = GENERATION.get(name, GENERATION["sampled"])
        environment = ScriptedEnvironment() if name == "turns" else None
        own = {"environment": environment, "records": 3 * mine[2]}
        output = model.generator.generate(*mine, params, **own)
        results[name] = all_samples(samples_of(output))
        if environment is not None:  # a rank may have only conversations of one turn
            assert any(all_samples(output.observed.any(1).tolist()))
    return results


def samples_of(output) -> list[tuple]:
    """What was generated, a tuple per sample."""
    samples = []
    for i, length in enumerate(output.response_lengths.tolist()):
        logprobs = () if output.logprobs is None else (output.logprobs[i, : length - 1].cpu(),)
        tokens = output.response_tokens[i, :length].tolist()
        samples.append((tokens, bool(output.is_end[i]), *logprobs))
    return samples


def variants(architecture: str, role: str, split: Split) -> list[tuple[str, int | str]]:
    """(reduction, micro-batch size) that fit the split."""
    dp = parallel_state.get_data_parallel_world_size()
    group = split.model.get("pipeline_model_parallel_size", 1)
    group = group if split.model.get("virtual_pipeline_model_parallel_size") else 1
    own = ROLES[role].reductions
    chosen = VARIANTS if split.has_all_variants(architecture, role) else FEW_VARIANTS
    named = dict.fromkeys((r if r in own else own[0], m) for r, m in chosen)
    return [(r, m) for r, m in named if m == DYNAMIC or SAMPLES // dp % (m * group) == 0]


def compute(
    tokenizer_dir, folder, architecture: str, role: str, split: Split, masked_value: float
):
    """All numbers of a case, `{quantity: value}`; whole tensors on rank 0 only.

    A quantity is a dict of tensors (gradients, weights), a dict of numbers (loss and metrics), a
    tensor, or generated samples.
    """
    model, optimizer, scheduler = build(tokenizer_dir, folder, architecture, role, split.model)
    numbers = inferred(model, role)
    model.micro_batch_tokens = DYNAMIC_TOKENS
    numbers |= {f"{name}, dynamic": value for name, value in inferred(model, role).items()}
    model.micro_batch_tokens = None
    if role in ("actor", "distillation"):
        found = generated(model, role)
        numbers |= {f"generated {name}": samples for name, samples in found.items()}
    for reduction, size in variants(architecture, role, split):
        name = f"{reduction} {size}"
        numbers[f"loss {name}"] = loss_and_gradient(
            model, global_batch(role, masked_value), reduction, size
        )
        numbers[f"gradient {name}"] = gradient(model)
        progress(f"{architecture} {role}, {name}")
    reductions = ROLES[role].reductions
    if not split.has_all_variants(architecture, role):
        reductions = reductions[:1]
    for reduction in reductions:
        batch = global_batch(role, masked_value, empty=True)
        numbers[f"empty {reduction}"] = {
            "loss": loss_and_gradient(model, batch, reduction, STEP_SIZE)["loss"]
        }
        empty = gradient(model)
        if empty is not None:
            largest = max(float(g.abs().max()) for g in empty.values())
            numbers[f"empty {reduction}"]["gradient"] = largest
    for step in range(STEPS):
        progress(f"{architecture} {role}, step {step}")
        metrics = loss_and_gradient(
            model, global_batch(role, masked_value), ROLES[role].reductions[0], STEP_SIZE
        )
        metrics["gradient norm"] = optimizer_step(optimizer, scheduler, 0.5)
        numbers[f"step {step + 1}"] = metrics
        numbers[f"weights {step + 1}"] = gathered(model)
    return numbers


def stages_start_different(tokenizer_dir) -> bool:
    """Pipeline stages of a fresh model hold other weights; all ranks of a job of two call it."""
    model = MegatronGPTModel(model_config(tokenizer_dir, "llama", pipeline_model_parallel_size=2))
    weight = model.unwrapped()[0].decoder.layers[0].mlp.linear_fc1.weight.detach().contiguous()
    weights = [torch.empty_like(weight) for _ in range(2)]
    dist.all_gather(weights, weight)
    destroy_model_parallel()
    return not torch.equal(*weights)


# --- comparison


def by_module(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of each module, flat, one after the other."""
    names = sorted(tensors)
    modules = dict.fromkeys(name.rpartition(".")[0] for name in names)
    parts = {m: [n for n in names if n.rpartition(".")[0] == m] for m in modules}
    return {m: torch.cat([tensors[n].flatten() for n in own]) for m, own in parts.items()}


def apart(mine, expected, is_gradient: bool = False, precision=32) -> float:
    """How far one quantity is from the expected one (see the module docstring)."""
    if isinstance(expected, torch.Tensor):
        return deviation(mine.float(), expected.float())
    if isinstance(expected, list):  # generated: the same tokens, and log-probs that agree
        if [sample[:2] for sample in mine] != [sample[:2] for sample in expected]:
            return float("inf")
        pairs = [pair for ours, other in zip(mine, expected) for pair in zip(ours[2:], other[2:])]
        return max((deviation(*pair) for pair in pairs), default=0.0)
    if mine.keys() != expected.keys():
        return float("inf")
    if all(isinstance(value, torch.Tensor) for value in expected.values()):
        if is_gradient:
            mine, expected = by_module(mine), by_module(expected)
        floor = FLOOR[precision] * max(float(value.abs().max()) for value in expected.values())
        return max(deviation(mine[key], expected[key], floor) for key in expected)
    # Metrics: means of quantities of the order of 1.
    named = "loss", "gradient norm", "gradient"
    keys = [key for key in expected if precision == 32 or key in named]
    return max(abs(mine[key] - expected[key]) / max(abs(expected[key]), 0.1) for key in keys)


def assert_same(found: dict, expected: dict, what: str = "", bound: float = 1e-5) -> None:
    """The quantities of one case, among them what `updates` gives."""
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        pairs = [(found[name], wanted)]
        if name == "numbers":
            pairs = zip(found[name], wanted, strict=True)
        worst = max(apart(*pair, is_gradient=name == "gradient") for pair in pairs)
        assert worst < bound, f"{what} {name}: {worst:.1e}"


def expected_file(folder, architecture: str, role: str, precision) -> Path:
    return Path(folder) / f"expected-{architecture}-{role.replace(' ', '-')}-{precision}.pt"


def write_expected(tokenizer_dir, folder, wanted: Iterable[tuple]) -> None:
    """What one rank computes, of every (architecture, role, precision) that is not in `folder`
    yet; one process calls it.
    """
    for architecture, role, precision in wanted:
        file = expected_file(folder, architecture, role, precision)
        if file.exists():
            continue
        split = Split(1, _sizes(precision=precision), (architecture,), thorough=True)
        with as_padded():
            numbers = compute(tokenizer_dir, folder, architecture, role, split, 0.0)
        torch.save(numbers, file)


def run_splits(tokenizer_dir, folder, names: list[str]) -> dict[tuple, dict[str, float]]:
    """Body of a rank: the deviations of all cases of the named splits, `{(split, architecture,
    role): {quantity: x}}`; nothing but on rank 0."""
    report = {}
    for name in names:
        split = SPLITS[name]
        for architecture, role in split.cases():
            numbers = compute(
                tokenizer_dir, folder, architecture, role, split, masked_value=float("nan")
            )
            progress(f"{name}: {architecture} {role}")
            if dist.get_rank() == 0:
                expected = torch.load(expected_file(folder, architecture, role, split.precision))
                report[name, architecture, role] = {
                    key: apart(
                        numbers[key], expected[key], key.startswith("gradient"), split.precision
                    )
                    for key in numbers
                }
        destroy_model_parallel()
    return report
