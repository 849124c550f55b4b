# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which devices, ranks, sizes and architectures cannot work together: `ConfigError`."""

import math
import os
from collections.abc import Mapping
from typing import Any

from nemo_aligner.config.values import Values, require_multiple, require_one_of
from nemo_aligner.core.errors import ConfigError

Devices = int | str | list[int]  # `trainer.devices`

PRECISIONS = {  # `trainer.precision` -> the dtype of weights and of what is computed with them
    **dict.fromkeys(("32", "32-true", "fp32"), "float32"),
    **dict.fromkeys(("bf16", "bf16-true", "bf16-mixed"), "bfloat16"),
}

ACCELERATORS = ("auto", "cpu", "gpu", "cuda")

# Sizes may come from a checkpoint, where the user never saw them.
EP_REMEDY = (
    "a checkpoint's own value counts unless it is overridden: model.expert_model_parallel_size=1"
)
RECOMPUTE = "model.activations_checkpoint_"
UNEVEN = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")


def data_parallel_size(world_size: int, tp: int, pp: int, cp: int = 1) -> int:
    """DP = ranks / (TP x PP x CP); `ConfigError` if the sizes do not divide the ranks."""
    product = tp * pp * cp
    if world_size % product:
        raise ConfigError(
            f"tensor_model_parallel_size={tp} x pipeline_model_parallel_size={pp} x "
            f"context_parallel_size={cp} = {product} does not divide the {world_size} "
            f"rank{'s' if world_size > 1 else ''} of this job (trainer.devices x num_nodes)."
        )
    return world_size // product


def pad_vocab_size(vocab_size: int, multiple: int, tensor_model_parallel_size: int) -> int:
    """Rows of the embedding table: the next size that `multiple` and the TP ranks divide. NeMo
    pads to `multiple` x TP, so that its table, and the initial weights, always depend on TP.
    """
    multiple = math.lcm(multiple, tensor_model_parallel_size)
    return math.ceil(vocab_size / multiple) * multiple


def count_vocab_rows(cfg: Mapping[str, Any], vocab_size: int) -> int:
    """Rows of the embedding table by `cfg`, a complete `model` section: `override_vocab_size`
    (`ConfigError`: below `vocab_size`) rounded up for the TP ranks, else `vocab_size` padded.
    """
    tp, rows = cfg["tensor_model_parallel_size"], cfg["override_vocab_size"]
    if not rows:
        return pad_vocab_size(vocab_size, cfg["make_vocab_size_divisible_by"], tp)
    if rows < vocab_size:
        raise ConfigError(
            f"model.override_vocab_size={rows}, the rows of the embedding table, is less than the "
            f"{vocab_size} ids of the tokenizer ({cfg['tokenizer']['type']}); use the model's own."
        )
    return pad_vocab_size(int(rows), 1, tp)


def count_ranks(
    devices: Devices,
    num_nodes: int,
    visible_devices: int = 0,
    env: Mapping[str, str] | None = None,
) -> int:
    """World size of the job: what the launcher says (torchrun and Lightning's children set RANK
    and WORLD_SIZE), else those of `count_devices` x `num_nodes`.
    """
    env = os.environ if env is None else env
    if "RANK" in env and "WORLD_SIZE" in env:
        return int(env["WORLD_SIZE"])
    return count_devices(devices, visible_devices) * num_nodes


def count_devices(devices: Devices, visible_devices: int = 0) -> int:
    """Processes per node that `trainer.devices` asks for: an int, a list of device indices, or a
    string of one of these; "auto" and -1 mean the `visible_devices` of this machine, at least 1.
    """
    text = str(devices).strip()
    if text in ("auto", "-1"):
        return max(visible_devices, 1)
    if isinstance(devices, (list, tuple)):
        return len(devices)
    if "," in text:
        return len([part for part in text.strip("[]").split(",") if part.strip()])
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"trainer.devices={devices!r} must be a positive number, a list of numbers or 'auto'."
        )
    return int(text)


def cuda_devices() -> int:
    import torch  # here: importing PyTorch takes a second

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def default_precision(accelerator: str = "auto") -> str | int:
    """What `trainer.precision=null` means: bf16 on GPUs, and 32 on CPUs, where bf16 is slow."""
    return "bf16" if accelerator != "cpu" and cuda_devices() else 32


def dtype_name(precision: str | int) -> str:
    """The value of `PRECISIONS`; of another precision `ConfigError`."""
    name = str(precision).lower()
    require_one_of("trainer.precision", name, PRECISIONS)
    return PRECISIONS[name]


def check_accelerator(accelerator: str, devices: Devices, visible_devices: int) -> None:
    require_one_of("trainer.accelerator", accelerator, ACCELERATORS)
    if accelerator in ("gpu", "cuda") and visible_devices == 0:
        raise ConfigError(
            f"trainer.accelerator={accelerator}, but PyTorch sees no CUDA device on this machine "
            "(see nvidia-smi); use trainer.accelerator=auto or cpu, or a CUDA build of torch."
        )
    if accelerator != "cpu" and 0 < visible_devices < count_devices(devices, visible_devices):
        raise ConfigError(
            f"trainer.devices={devices}, but the number of GPUs here is {visible_devices}; "
            f"set trainer.devices={visible_devices}."
        )


def parallel_factor(
    values: Values, ranks: int, complete: bool, is_unsplit: bool = False
) -> dict[str, int]:
    """`{"data parallel size": DP}`; empty while a checkpoint, not `is_unsplit`, may decide."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    tp, pp, cp = (values.get(f"model.{name}") for name in names)
    dp = data_parallel_size(ranks, tp or 1, pp or 1, cp or 1)
    if not (complete or is_unsplit) and not (tp and pp):
        return {}
    experts = values.get("model.num_moe_experts")
    expert_parallel = values.get("model.expert_model_parallel_size", 1)
    size = {"model.expert_model_parallel_size": expert_parallel}
    if expert_parallel > 1 and complete and not experts:  # else the checkpoint may have experts
        raise ConfigError(
            f"model.expert_model_parallel_size={expert_parallel} spreads experts over ranks, but "
            f"this model has none; set it to 1 ({EP_REMEDY})."
        )
    if experts:
        require_multiple("model.num_moe_experts", experts, size)
    check_expert_ranks(expert_parallel, dp, cp or 1)
    return {"data parallel size": dp}


def check_expert_ranks(expert_parallel: int, dp: int, cp: int) -> None:
    """Raise `ConfigError` unless `expert_parallel` divides the ranks of DP x CP."""
    if dp * cp % expert_parallel:
        raise ConfigError(
            f"model.expert_model_parallel_size={expert_parallel} does not divide the {dp * cp} "
            f"data-parallel x context-parallel ranks ({dp} x {cp}); lower it ({EP_REMEDY})."
        )


def virtual_pipeline_group(values: Values) -> dict[str, int]:
    """The factor of a batch with virtual stages: micro-batches are a multiple of the stages."""
    pp, vpp = (
        values.get(f"model.{name}pipeline_model_parallel_size", 1) for name in ("", "virtual_")
    )
    return {"model.pipeline_model_parallel_size (with virtual stages)": pp} if vpp > 1 else {}


def check_architecture(values: Mapping, fixed: bool = False) -> None:
    """Refuse sizes of a section `model` that cannot work; `fixed`: a checkpoint's own."""
    v = Values({"model": values})

    def require(name: str, *parts: str) -> None:
        value = v.whole(f"model.{name}", 1)
        factors = {f"model.{part}": v.whole(f"model.{part}", 1) or 1 for part in parts}
        remedy = f"the checkpoint fixes model.{name}, so set {' x '.join(factors)} to a divisor of"
        if value:
            fixes = f"{remedy} {value}" if fixed else None
            require_multiple(f"model.{name}", value, factors, fixes)

    layers = v.whole("model.num_layers", 1)
    pp, vpp = (
        v.whole(f"model.{name}pipeline_model_parallel_size", 1) or 1 for name in ("", "virtual_")
    )
    if not v.has("model.kv_channels"):
        v.multiple("model.hidden_size", "model.num_attention_heads", times={})
    v.multiple("model.num_attention_heads", "model.num_query_groups", times={})
    for name in ("num_attention_heads", "num_query_groups"):
        require(name, "tensor_model_parallel_size")
    if layers and is_uneven(v):
        check_pipeline_stages(values)
    else:
        virtual = ["virtual_pipeline_model_parallel_size"] if vpp > 1 else []
        require("num_layers", "pipeline_model_parallel_size", *virtual)
    _check_experts(v, fixed)
    if pp == 1:
        v.refuse(
            """model.virtual_pipeline_model_parallel_size>1 | needs
            model.pipeline_model_parallel_size of 2 or more; set it to null"""
        )
    if layers:
        stage = (min(uneven_stages(v)) if is_uneven(v) else layers // pp) // vpp
        again = v.whole(RECOMPUTE + "num_layers", 1) or 0
        if v.get(RECOMPUTE + "granularity") == "full" and again > stage:
            raise ConfigError(
                f"{RECOMPUTE}num_layers={again} is more than the {stage} layers of a stage."
            )


def is_uneven(v: Values) -> bool:
    pp = v.whole("model.pipeline_model_parallel_size", 1) or 1
    return pp > 1 and any(v.get(f"model.{key}") is not None for key in UNEVEN)


def check_pipeline_stages(values: Mapping) -> None:
    v = Values({"model": values})
    if not is_uneven(v):
        return
    vpp = v.whole("model.virtual_pipeline_model_parallel_size", 1) or 1
    for stage, layers in enumerate(uneven_stages(v)):
        if layers % vpp:
            raise ConfigError(
                f"pipeline stage {stage} has {layers} layers, which "
                f"model.virtual_pipeline_model_parallel_size={vpp} does not divide; change "
                f"{' or '.join(f'model.{key}' for key in UNEVEN)}."
            )


def uneven_stages(v: Values) -> list[int]:
    """Layers of each pipeline stage where some are given; `ConfigError` if it cannot be."""
    layers, pp = v.size("model.num_layers"), v.size("model.pipeline_model_parallel_size")
    first, last = (v.whole(f"model.{key}", 1) for key in UNEVEN)
    given = {f"model.{key}": n for key, n in zip(UNEVEN, (first, last), strict=True) if n}
    left, stages = layers - sum(given.values()), pp - len(given)
    if left < stages or (stages == 0 and left) or (stages and left % stages):
        raise ConfigError(
            f"{' and '.join(f'{key}={n}' for key, n in given.items())} leave {left} of "
            f"model.num_layers={layers} for the other {stages} of "
            f"model.pipeline_model_parallel_size={pp} stages, which cannot share them evenly; "
            "change them, or set them to null."
        )
    middle = [left // stages] * stages if stages else []
    return [*([first] if first else []), *middle, *([last] if last else [])]


def _check_experts(v: Values, fixed: bool) -> None:
    experts, _ = (v.whole(f"model.{key}", 1) for key in ("num_moe_experts", "moe_router_topk"))
    v.at_most("model.moe_router_topk", "model.num_moe_experts")
    if experts or fixed:  # the configuration of a dense checkpoint may well hold such keys
        return
    for key in (f"model.{name}" for name in v.get("model") if name.startswith("moe_")):
        if v.get(key):
            without = "is of a mixture of experts, but model.num_moe_experts is not set"
            raise v.error(key, f"{without}; set it, or {key} to null.")


def check_recomputation(v: Values, complete: bool) -> None:
    """Check `model.activations_checkpoint_*`; `complete` as in `rules.check_values`. What has no
    effect is accepted, as in NeMo-Aligner; `inert_keys.py` has a warning.
    """
    if complete:
        v.refuse(f"""
            {RECOMPUTE}granularity=full & {RECOMPUTE}method=null | needs {RECOMPUTE}method, not
                set; give uniform or block
            {RECOMPUTE}granularity=full & {RECOMPUTE}num_layers=null | needs {RECOMPUTE}num_layers,
                not set; give a number of layers
        """)
    v.refuse(
        f"""{RECOMPUTE}num_layers!=null & {RECOMPUTE}granularity=selective | is only for
        granularity=full; selective recomputes the attention of every layer"""
    )
