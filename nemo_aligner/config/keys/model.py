# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Keys of a model: architecture, split, optimizer, adapters."""

from typing import Any, Literal

from nemo_aligner.config.fields import ABSENT, Section, inert, key, of_checkpoint, section


class Tokenizer(Section):
    """The tokenizer; null as in the checkpoint.

    library: `sentencepiece`, `huggingface`, `megatron`, `tiktoken` (an optional package) or
        `byte-level`
    model, type: SentencePiece: the .model file; Hugging Face: a local folder or a name;
        `megatron`: the type is `GPT2BPETokenizer` or `GPTSentencePieceTokenizer`
    vocab_file, merge_file: GPT-2's two files with `megatron`; the vocabulary with `tiktoken`
    special_tokens, additional_special_tokens: as in NeMo: kinds with their tokens, such as
        `{eos_token: "</s>"}` (several texts for a kind only with Hugging Face); tokens to add
    """

    library: str | None = of_checkpoint("sentencepiece")
    model: Any = of_checkpoint(None)
    type: Any = of_checkpoint(None)
    use_fast: bool | None = of_checkpoint(True)
    sentencepiece_legacy: bool | None = of_checkpoint(False)
    vocab_file: Any = of_checkpoint()
    merge_file: Any = of_checkpoint()
    special_tokens: Any = of_checkpoint(free=True)
    additional_special_tokens: Any = of_checkpoint()
    delimiter: Any = of_checkpoint()
    trust_remote_code: bool | None = of_checkpoint()
    chat_template: Any = of_checkpoint()
    end_token_ids: Any = of_checkpoint(None)


class Architecture(Section):
    """How the network looks; null as in the checkpoint.

    num_layers, hidden_size, num_attention_heads: size of the network
    ffn_hidden_size: width of the feed-forward layer
    num_query_groups: fewer: grouped-query attention
    kv_channels: size of a head
    normalization, layernorm_epsilon: `layernorm`, `rmsnorm`, or `layernorm1p`: `layernorm` with
        `layernorm_zero_centered_gamma`
    layernorm_zero_centered_gamma: the norm's stored weight is its distance from 1
    norm_position: norms stand `before` attention and MLP, `after` them (OLMo 2) or at `both`
        places (Gemma 2, GLM 4)
    layernorm_bias: False: layer norms have no bias (Cohere)
    parallel_attention: attention and MLP read the same norm, side by side (Cohere)
    qk_layernorm: the queries and keys of each head are normalized before the rotation (Qwen 3), by
        a norm of the kind and epsilon above
    qk_layernorm_all_heads: one such norm over the queries of all heads, one over all keys (OLMo 2)
    activation: `gelu`, `geglu`, `gelu_new`, `relu`, `reglu`, `squared-relu`, `silu`, `swiglu`;
        `fast-` names mean the same. `gelu` and `geglu` are the exact function, see the next two
        keys; `gelu_new` and `gelu_pytorch_tanh` are the tanh form of `gelu`
    openai_gelu: `gelu` or `geglu` in the tanh form
    bias_activation_fusion: with `gelu` (which then needs `bias`) or `geglu`: the tanh form as
        well, because Megatron Core's fused kernels compute it, and so did NeMo. On a CPU and on a
        GPU alike; NeMo's own YAML files set True, and so reads a file of NeMo that lacks the key.
        Of other activations it changes nothing
    position_embedding_type, rotary_base, rotary_percentage, rotary_interleaved: or `rope`, `yarn`,
        or `none`
    seq_len_interpolation_factor: positions are divided by it (`rope`)
    scale_positional_embedding, scale_factor: Llama 3.1's scaling of the rotary frequencies, and
        its factor (Llama 3.2: 32). `low_freq_factor`, `high_freq_factor` and `old_context_len`
        have Llama 3's values (1, 4, 8192); others are refused
    rotary_base_local: base of the layers with a window, whose rotation has no scaling (Gemma 3,
        OLMo 3); null: all layers rotate alike
    window_size: `[n, 0]`: a position attends to the n before it and to itself. Hugging Face's
        `sliding_window` counts the position itself, so it is n + 1
    window_attn_skip_freq: which layers have the window: with n, every n-th attends to all
        positions (Gemma 2: 2); or a list with 1 (window) or 0 for each layer
    query_pre_attn_scalar: attention scores are divided by its square root
    attn_logit_softcapping, final_logit_softcapping: attention scores, or logits, x become
        c tanh(x / c) with this c (Gemma 2)
    no_rope_freq: which layers leave out the rotation: every n-th, or a list with 1 (left out) or 0
        for each layer (SmolLM 3)
    yarn_rotary_scaling_factor, yarn_original_max_position_embeddings, yarn_beta_fast,
        yarn_beta_slow, yarn_mscale, yarn_mscale_all_dim, yarn_correction_range_round_to_int: YaRN
        ([2309.00071](https://arxiv.org/abs/2309.00071)) with `position_embedding_type=yarn`;
        Hugging Face's `factor`, `original_max_position_embeddings`, ..., `truncate`
    apply_embedding_scaling: embeddings times the square root of `hidden_size` (Gemma)
    embedding_multiplier, residual_multiplier, logits_scaling: factor of the embeddings; of what
        attention and MLP add; divisor of the logits (Granite)
    qkv_bias: biases of queries, keys and values alone (Qwen)
    bias: biases of the linear layers
    share_embeddings_and_output_weights: a reward model has no output layer: False
    make_vocab_size_divisible_by, override_vocab_size: padding of the vocabulary; the number of
        rows itself
    init_method_std, use_scaled_init_method: initial weights; True: those of layers that add to the
        hidden states are divided by sqrt(2 `num_layers`)
    hidden_dropout, attention_dropout: probabilities. SFT takes 0.0, a reward model the
        checkpoint's; other jobs switch the checkpoint's off, which their log says, unless the key
        is given, for the job and the `.nemo` that it writes: `model.hidden_dropout=0.1` (null: the
        checkpoint's)
    num_moe_experts, moe_router_topk, moe_ffn_hidden_size: mixture of experts in place of
        feed-forward layers: number of experts, experts per token, their width
    moe_layer_freq: which layers have experts: every n-th, from the first on, or a list with 1
        (experts) or 0 (a feed-forward layer of `ffn_hidden_size`) for each layer
    moe_shared_expert_intermediate_size, moe_shared_expert_gate: width of the experts that compute
        every token, all together (Qwen 2 MoE); whether a sigmoid weights their output. They need
        `bias=False`
    moe_router_pre_softmax, moe_router_load_balancing_type: softmax over all experts, so that the
        weights of the chosen ones do not sum to 1; False: over the chosen ones (Mixtral;
        `norm_topk_prob` of Hugging Face). `aux_loss` or `none`
    """

    num_layers: int | None = of_checkpoint(at_least=1)
    hidden_size: int | None = of_checkpoint(at_least=1)
    num_attention_heads: int | None = of_checkpoint(at_least=1)
    ffn_hidden_size: int | None = of_checkpoint("${multiply:4,${.hidden_size}}", at_least=1)
    num_query_groups: int | None = of_checkpoint("${.num_attention_heads}", at_least=1)
    kv_channels: int | None = of_checkpoint(None, at_least=1)
    normalization: str | None = of_checkpoint("layernorm")
    layernorm_epsilon: Any = of_checkpoint(1e-05)
    layernorm_zero_centered_gamma: bool | None = of_checkpoint(False)
    norm_position: Literal["before", "after", "both"] | None = of_checkpoint("before")
    layernorm_bias: bool | None = of_checkpoint(True)
    parallel_attention: bool | None = of_checkpoint(False)
    qk_layernorm: bool | None = of_checkpoint(False)
    qk_layernorm_all_heads: bool | None = of_checkpoint(False)
    activation: str | None = of_checkpoint("gelu")
    openai_gelu: bool | None = of_checkpoint(False)
    bias_activation_fusion: bool | None = of_checkpoint(False)
    position_embedding_type: str | None = of_checkpoint("learned_absolute")
    rotary_base: Any = of_checkpoint(10000)
    rotary_percentage: Any = of_checkpoint(1.0)
    rotary_interleaved: bool | None = of_checkpoint(False)
    seq_len_interpolation_factor: Any = of_checkpoint(None)
    scale_positional_embedding: bool | None = of_checkpoint(False)
    scale_factor: Any = of_checkpoint(8.0)
    window_size: Any = of_checkpoint(None)
    window_attn_skip_freq: Any = of_checkpoint(None)
    rotary_base_local: float | None = of_checkpoint(None, above=0)
    query_pre_attn_scalar: Any = of_checkpoint(None)
    attn_logit_softcapping: float | None = of_checkpoint(None, above=0)
    final_logit_softcapping: float | None = of_checkpoint(None, above=0)
    no_rope_freq: Any = of_checkpoint(None)
    yarn_rotary_scaling_factor: Any = of_checkpoint(None)
    yarn_original_max_position_embeddings: Any = of_checkpoint(None)
    yarn_beta_fast: Any = of_checkpoint(32.0)
    yarn_beta_slow: Any = of_checkpoint(1.0)
    yarn_mscale: Any = of_checkpoint(None)
    yarn_mscale_all_dim: Any = of_checkpoint(None)
    yarn_correction_range_round_to_int: bool | None = of_checkpoint(True)
    apply_embedding_scaling: bool | None = of_checkpoint(False)
    embedding_multiplier: float | None = of_checkpoint(1.0, above=0)
    residual_multiplier: float | None = of_checkpoint(1.0, above=0)
    logits_scaling: float | None = of_checkpoint(1.0, above=0)
    qkv_bias: bool | None = of_checkpoint(False)
    add_qkv_bias: bool | None = of_checkpoint("${.qkv_bias}")
    bias: bool | None = of_checkpoint(True)
    share_embeddings_and_output_weights: bool | None = of_checkpoint(True)
    make_vocab_size_divisible_by: Any = of_checkpoint(128)
    override_vocab_size: Any = of_checkpoint(None)
    init_method_std: Any = of_checkpoint(0.02)
    use_scaled_init_method: bool | None = of_checkpoint(True)
    hidden_dropout: Any = of_checkpoint(0.0)
    attention_dropout: Any = of_checkpoint(0.0)
    tokenizer: Tokenizer = section()
    num_moe_experts: int | None = of_checkpoint(None, at_least=1)
    moe_router_topk: int | None = of_checkpoint(2, at_least=1)
    moe_ffn_hidden_size: int | None = of_checkpoint("${.ffn_hidden_size}", at_least=1)
    moe_layer_freq: Any = of_checkpoint(1)
    moe_shared_expert_intermediate_size: int | None = of_checkpoint(None, at_least=1)
    moe_shared_expert_gate: bool | None = of_checkpoint(False)
    moe_router_pre_softmax: bool | None = of_checkpoint(False)
    moe_router_load_balancing_type: Literal["aux_loss", "none"] | None = of_checkpoint("aux_loss")


class Split(Architecture):
    """How a model is split over ranks, and what is recomputed.

    tensor_model_parallel_size, pipeline_model_parallel_size, virtual_pipeline_model_parallel_size,
        context_parallel_size: the product of tensor, pipeline and context parallelism divides the
        ranks; what is left is data parallelism. See [parallelism.md](parallelism.md)
    num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage: pipeline stages of
        different sizes: layers of the first, of the last; the others share the rest evenly
    expert_model_parallel_size: data-parallel ranks over which the experts are spread
    sequence_parallel: with tensor parallelism: norms and dropout split along the sequence
    activations_checkpoint_granularity, activations_checkpoint_method,
        activations_checkpoint_num_layers: recompute activations: `selective` or `full`; `uniform`
        or `block`; layers
    """

    tensor_model_parallel_size: int | None = of_checkpoint(1, at_least=1)
    pipeline_model_parallel_size: int | None = of_checkpoint(1, at_least=1)
    virtual_pipeline_model_parallel_size: int | None = of_checkpoint(None, at_least=1)
    context_parallel_size: int | None = of_checkpoint(1, at_least=1)
    num_layers_in_first_pipeline_stage: Any = key(ABSENT, fallback=None)
    num_layers_in_last_pipeline_stage: Any = key(ABSENT, fallback=None)
    expert_model_parallel_size: int | None = of_checkpoint(1, at_least=1)
    sequence_parallel: bool = key(False, fallback=False)
    activations_checkpoint_granularity: Literal["selective", "full"] | None = key(
        ABSENT, fallback=None
    )
    activations_checkpoint_method: Literal["uniform", "block"] | None = key(ABSENT, fallback=None)
    activations_checkpoint_num_layers: int | None = key(ABSENT, at_least=1, fallback=None)


class Model(Split):
    """What all models have.

    micro_batch_size: samples of one forward pass
    dynamic_micro_batch_tokens: **new**: most tokens of one forward pass, padding included, with
        and without gradient. Samples of similar length share a micro-batch, and micro-batches have
        nearly equal numbers of tokens; a longer sample is alone. It takes the place of
        `micro_batch_size` and `forward_micro_batch_size`. null: fixed numbers of samples. Refused
        with `loss_reduction=microbatch` and with losses that balance experts
    encoder_seq_length, max_position_embeddings: longest sequence
    seed: seed of everything random
    precision: `bf16` or `32`
    megatron_amp_O2: with bf16: master weights in fp32, as Megatron Core always does; accepted for
        old scripts
    moe_aux_loss_coeff, moe_z_loss_coeff: weights of the losses that balance the experts. They are
        statistics of a micro-batch, so with them numbers depend on the split
    moe_token_dispatcher_type: how tokens travel to their experts; only `alltoall` lets ranks hold
        different numbers and lengths of samples
    mcore_customization_config: fields of Megatron Core's `TransformerConfig`, which are passed on
        as they are: `{recompute_modules: [mlp]}`. A field that another key sets is refused with
        that key, one that would break a promise (the same numbers at any split, generation as in
        training, checkpoints of one form) with the promise
    overwrite_base_config: keys of the checkpoint's configuration to delete before this one is laid
        over it
    """

    micro_batch_size: int | None = key(ABSENT, at_least=1, fallback=1)
    dynamic_micro_batch_tokens: int | None = key(None, at_least=1, fallback=None)
    encoder_seq_length: int | None = key(ABSENT, at_least=2)
    max_position_embeddings: int | None = key(
        ABSENT, at_least=1, fallback="${.encoder_seq_length}"
    )
    seed: int = key(1234, at_least=0, fallback=1234)
    precision: Any = key("${trainer.precision}", fallback=32)
    megatron_amp_O2: bool = key(ABSENT)
    moe_aux_loss_coeff: float | None = key(ABSENT, at_least=0, fallback=0.0)
    moe_z_loss_coeff: float | None = key(ABSENT, at_least=0, fallback=None)
    moe_token_dispatcher_type: Literal["alltoall"] | None = key(ABSENT, fallback="alltoall")
    use_cpu_initialization: bool | None = key(ABSENT, fallback=None)
    gradient_accumulation_fusion: bool = key(ABSENT, fallback=False)
    persist_layer_norm: bool = key(ABSENT, fallback=True)
    masked_softmax_fusion: bool = key(ABSENT, fallback=True)
    bias_dropout_add_fusion: bool = key(ABSENT, fallback=True)
    apply_rope_fusion: bool = key(ABSENT, fallback=False)
    mcore_customization_config: dict | None = key(ABSENT, free=True)
    overwrite_base_config: Any = key(ABSENT, free=True)
    target: Any = key(ABSENT)
    nemo_version: Any = key(ABSENT)
    hugging_face: dict | None = key(ABSENT, free=True)


class Schedule(Section):
    """The learning-rate schedule.

    name: or `constant`, `WarmupPolicy`, `WarmupHoldPolicy`, `WarmupAnnealing` (linear),
        `InverseSquareRootAnnealing`, `SquareAnnealing`, `SquareRootAnnealing`,
        `PolynomialDecayAnnealing`, `PolynomialHoldDecayAnnealing`, `WarmupHoldAnnealLinear`,
        `WarmupHoldAnnealOneMinusSquareRoot`, `NoamAnnealing`, `NoamHoldAnnealing`,
        `T5InverseSquareRootAnnealing`, `StepLR`: NeMo's classes, with the keys that they read
    warmup_steps, constant_steps, min_lr: linear warm-up; steps at `min_lr` at the end. All count
        updates
    warmup_ratio, hold_steps, hold_ratio, constant_ratio, power, cycle, decay_rate, d_model,
        step_size, gamma: of single schedules, as in NeMo; a ratio is a share of the job's updates,
        in place of the steps. A key that the schedule does not read is named in a warning
    """

    name: str | None = key("CosineAnnealing", fallback="constant")
    warmup_steps: Any = key(10, fallback=0)
    constant_steps: Any = key(1000, fallback=0)
    min_lr: Any = key(9e-07, fallback=0.0)
    warmup_ratio: Any = key(ABSENT)
    hold_steps: Any = key(ABSENT)
    hold_ratio: Any = key(ABSENT)
    constant_ratio: Any = key(ABSENT)
    power: Any = key(ABSENT)
    cycle: bool = key(ABSENT)
    decay_rate: Any = key(ABSENT)
    d_model: Any = key(ABSENT)
    step_size: Any = key(ABSENT)
    gamma: Any = key(ABSENT)


class Optim(Section):
    """The optimizer.

    name: `distributed_fused_adam` and `mcore_distributed_optim` both mean Megatron Core's
        distributed optimizer; `adamw`, `fused_adam`, `megatron_fused_adam`: the same, not
        distributed; `adam`: weight decay is added to the gradient; `sgd`
    lr, weight_decay, betas, momentum: `betas` of Adam; `momentum` of `sgd`, 0.0
    bucket_cap_mb, overlap_grad_sync: size of a gradient bucket; reduce gradients during the
        backward pass
    mcore_customization_config: **new**: likewise, of its `DistributedDataParallelConfig` and
        `OptimizerConfig`: `{decoupled_lr: 1.0e-5}`
    eps: of Adam
    """

    name: str = key("distributed_fused_adam")
    lr: float = key(9e-06, above=0, fallback=0.001)
    weight_decay: Any = key(0.1, fallback=0.0, required=True)
    betas: Any = key([0.9, 0.98], fallback=[0.9, 0.98], required=True)
    eps: Any = key(ABSENT, fallback=1e-08, required=True)
    momentum: Any = key(ABSENT, fallback=0.0)
    bucket_cap_mb: Any = key(200, fallback=None)
    overlap_grad_sync: bool = key(False, fallback=False)
    contiguous_grad_buffer: Any = inert(True)
    mcore_customization_config: dict | None = key(ABSENT, free=True)
    sched: Schedule = section()


class AdapterCheckpoint(Section):
    """NeMo's other place of a base.

    checkpoint_dir, checkpoint_name: the same, as folder and name of a checkpoint
    """

    checkpoint_dir: str | None = key(None)
    checkpoint_name: str | None = key(None)


class LoraTuning(Section):
    """The adapters.

    target_modules: `attention_qkv`, `attention_dense`, `mlp_fc1`, `mlp_fc2`; `attention`, `mlp`,
        `all`. With experts: `attention`
    adapter_dim: rank; any size at any split
    alpha: scale, in units of 1 / `adapter_dim`; null: `adapter_dim` (scale 1)
    adapter_dropout, dropout_position: dropout of the adapters' outputs (`post`, as in NeMo) or
        inputs (`pre`, as in PEFT)
    column_init_method, row_init_method: initial A and B
    layer_selection: layers with adapters, numbered from 1; null: all
    position_embedding_strategy: only null
    weight_tying: all layers share the adapters of the first (one pipeline stage)
    variant: `nemo`: queries, keys and values share one A, as in NeMo; `canonical`: one A each, as
        in PEFT. The same for gate and up projection
    """

    target_modules: Any = key(["attention_qkv"], required=True)
    adapter_dim: int = key(32, at_least=1)
    alpha: float | None = key(None, above=0)
    adapter_dropout: float = key(0.0, at_least=0, at_most=1)
    dropout_position: Literal["pre", "post"] = key("post")
    column_init_method: Literal["xavier", "normal", "kaiming", "zero"] = key("xavier")
    row_init_method: Literal["xavier", "normal", "kaiming", "zero"] = key("zero")
    layer_selection: Any = key(None)
    weight_tying: bool = key(False)
    position_embedding_strategy: Any = key(None)
    variant: Literal["nemo", "canonical"] = key("nemo")


class Peft(Section):
    """Adapters in place of all weights.

    peft_scheme: `lora`; `none` trains every weight
    restore_from_path: adapters to start from (`.nemo`, checkpoint folder, [PEFT
        folder](models.md)); their form wins over `lora_tuning`
    """

    peft_scheme: str | None = key("none")
    restore_from_path: str | None = key(None)
    restore_from_ckpt: AdapterCheckpoint = section()
    lora_tuning: LoraTuning = section()


class PolicyPeft(Peft):
    """Adapters of a model that generates.

    merge_for_generation: merge the adapters into the weights while responses are generated. False
        saves the memory for a copy of the weights with adapters
    """

    merge_for_generation: bool = key(True)


class TrainedModel(Model):
    """What all models have that are trained.

    global_batch_size: samples of one update over all ranks: a multiple of `micro_batch_size` x
        data-parallel size
    save_hf: write a [Hugging Face folder](models.md) beside the checkpoints: True at the end of
        the job, `every_checkpoint` with each checkpoint (a critic server, which has no end, takes
        only this); of adapters a [PEFT folder](models.md#adapters-of-hugging-face-peft)
    """

    micro_batch_size: int = key(1, at_least=1, fallback=1)
    global_batch_size: int = key(64, at_least=1)
    encoder_seq_length: int = key(4096, at_least=2)
    max_position_embeddings: int | None = key(
        "${model.encoder_seq_length}", at_least=1, fallback="${.encoder_seq_length}"
    )
    megatron_amp_O2: bool = key(True)
    save_hf: Any = key(None)
    mcore_gpt: Any = inert(True)
    optim: Optim = section()


DEFAULT_MASK_VALUE = -100  # the number that means "no label"


class Regression(Section):
    """The numbers that a regression model gives.

    num_attributes, attribute_weights: of a regression model; null: as in the checkpoint
    merge_attributes: the reward is the weighted sum of the attributes
    loss_mask_val: a label of this value does not count. All others have the same weight, so a
        sample with fewer labels weighs less
    loss_func: of a regression model: `regression` (mean squared error), or for pairs of lines with
        a preference `regular_bt`, `margin_bt`, `scaled_bt` ([reward
        model](algorithms.md#reward-model))
    load_rm_head_weights: start from the head in the checkpoint too, not only from its language
        model
    """

    num_attributes: Any = key(None, of_checkpoint=True, fallback=1)
    merge_attributes: bool = key(False, fallback=False)
    attribute_weights: Any = key(None, of_checkpoint=True, fallback=None)
    loss_mask_val: Any = key(ABSENT, fallback=DEFAULT_MASK_VALUE)
    loss_func: str | None = key(ABSENT, fallback="regression")
    load_rm_head_weights: bool = key(ABSENT, fallback=False)


class RewardStandardization(Section):
    """reward = (raw - mean) / std

    enable, mean, std: reward = (raw - mean) / std
    """

    enable: bool = key(False, fallback=False)
    mean: float | None = key(None, fallback=None)
    std: float | None = key(None, above=0, fallback=None)


class RewardHead(Section):
    """The head of a reward model or critic.

    reward_model_type: `binary_ranking` or `regression`; null: as in the checkpoint
    output_sequence: one value per token
    use_avg_pool, pad_token_id: head over the mean of all positions instead of the last token;
        **new**: the last token is the last other than this one ([Hugging
        Face](models.md#architectures)); null: as in the checkpoint
    force_head_dtype: dtype of the head. A reward-model server keeps the checkpoint's: with a
        bfloat16 head its rewards differ from those of a combined critic in the third digit
    forward_micro_batch_size: samples of one forward pass without gradient
    """

    reward_model_type: str | None = key(None, of_checkpoint=True, fallback="binary_ranking")
    output_sequence: bool = key(True, fallback=False)
    use_avg_pool: bool | None = key(None, of_checkpoint=True, fallback=False)
    pad_token_id: Any = key(None, of_checkpoint=True, fallback=None)
    force_head_dtype: str | None = key("float32", fallback="float32")
    forward_micro_batch_size: int | None = key(
        "${.micro_batch_size}", at_least=1, fallback="${.micro_batch_size}"
    )
    regression: Regression = section()
    reward_standardization: RewardStandardization = section()
