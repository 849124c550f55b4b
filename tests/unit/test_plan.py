# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The plan: numbers of weights against models that are built, bytes by hand, splits against the
rules of the jobs, and the command line.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.config.checks import check_config
from nemo_aligner.config.defaults import complete_model
from nemo_aligner.config.peft_rules import LoRASettings
from nemo_aligner.config.values import plain_dict
from nemo_aligner.core.errors import UserError
from nemo_aligner.generate.settings import compose_settings
from nemo_aligner.generation import engine
from nemo_aligner.models.nlp.gpt.adapter_mixin import NLPAdapterModelMixin
from nemo_aligner.models.nlp.gpt.megatron_gpt_critic import MegatronGPTCriticModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.plan import memory, parameters
from nemo_aligner.plan.__main__ import main, read_memory, read_model
from nemo_aligner.plan.jobs import ACTOR, JOBS, STEERLM2, STUDENT, job_config, read_workload
from nemo_aligner.plan.memory import GRADIENTS, OPTIMIZER, Workload, job_memory, rank_memory
from nemo_aligner.plan.parameters import Architecture, Split, count_weights, read_architecture
from nemo_aligner.plan.splits import fit_passes, shares
from tests import hugging_face
from tests.cases import some_of
from tests.tiny_models import GPT2_LIKE, LLAMA_LIKE, tiny_config

pytestmark = pytest.mark.slow

GB = 2**30
FRACTION = "model.knowledge_distillation.on_policy.fraction"
DPO, KTO, REWARD_MODEL = (JOBS[name][0] for name in ("dpo", "kto", "rm"))
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2}
VARIANTS = {"gpt2": GPT2_LIKE, "llama": LLAMA_LIKE}
VARIANTS |= {"gpt2, untied": GPT2_LIKE | {"share_embeddings_and_output_weights": False}}
VARIANTS |= {"llama, tied": LLAMA_LIKE | {"share_embeddings_and_output_weights": True}}
VARIANTS |= {"llama, one query group": LLAMA_LIKE | {"num_query_groups": 1}}
VARIANTS |= {"llama, bias of queries": LLAMA_LIKE | {"qkv_bias": True}}
VARIANTS |= {"llama, wide heads": LLAMA_LIKE | {"kv_channels": 24}}
VARIANTS |= {"llama, no gate": LLAMA_LIKE | {"activation": "squared-relu"}}
VARIANTS |= {"gpt2, gate": GPT2_LIKE | {"activation": "swiglu"}}
VARIANTS |= {"no positions": LLAMA_LIKE | {"position_embedding_type": "none"}}
VARIANTS |= {"experts": LLAMA_LIKE | EXPERTS, "experts with biases": GPT2_LIKE | EXPERTS}
VARIANTS |= {"narrow experts": LLAMA_LIKE | EXPERTS | {"moe_ffn_hidden_size": 16}}
LORA = {"variant": "canonical", "adapter_dim": 4}


def with_lora(*targets, **keys):
    tuning = LORA | {"target_modules": list(targets)} | keys
    return {"peft": {"peft_scheme": "lora", "lora_tuning": tuning}}


VARIANTS |= {f"HF {name}": model.keys for name, model in hugging_face.MODELS.items()}


def architecture_of(model, head_outputs=0):
    """Of a model that is built."""
    cfg = plain_dict(model.cfg, resolve=True)
    return read_architecture(cfg, model.padded_vocab_size, head_outputs)


def size_of(tensors):
    return sum(tensor.numel() for tensor in tensors)


@some_of("variant", VARIANTS, keep=12)
def test_number_of_weights_is_that_of_the_built_model(tiny_tokenizer_dir, variant):
    model = MegatronGPTModel(tiny_config(tiny_tokenizer_dir, **VARIANTS[variant]))
    (module,) = model.unwrapped()
    assert count_weights(architecture_of(model)).total == size_of(module.parameters())


def test_number_of_weights_of_a_critic(tiny_tokenizer_dir):
    regression = {"num_attributes": (attributes := 5), "merge_attributes": True}
    cfg = tiny_config(tiny_tokenizer_dir, regression=regression, precision="bf16")
    model = MegatronGPTCriticModel(cfg)
    (module,) = model.unwrapped()
    weights = count_weights(architecture_of(model, attributes), Split())
    assert weights.head == size_of(module.rm_head.parameters())
    assert weights.total == size_of(module.parameters())


@pytest.mark.parametrize(
    ("variant", "peft"),
    [
        ("llama", with_lora("all")),
        ("gpt2", with_lora("all", variant="nemo")),
        ("llama", with_lora("attention_dense", "mlp_fc1", layer_selection=[2])),
        ("gpt2, gate", with_lora("all", weight_tying=True)),
        ("experts", with_lora("attention")),
    ],
)
def test_number_of_weights_with_adapters(tiny_tokenizer_dir, variant, peft):
    model = NLPAdapterModelMixin(tiny_config(tiny_tokenizer_dir, **VARIANTS[variant] | peft))
    model.init_peft(model.cfg.peft)
    weights = count_weights(architecture_of(model), Split())
    tensors = list(model.unwrapped()[0].parameters())
    assert weights.total == size_of(tensors)
    assert weights.trained.total == size_of(p for p in tensors if p.requires_grad)
    assert weights.merged == size_of(linear.weight for linear, _ in model._adapters)


LARGE_LLAMA = LLAMA_LIKE | dict(num_layers=32, hidden_size=4096, ffn_hidden_size=14336)
LARGE_LLAMA |= dict(num_attention_heads=32, num_query_groups=8, encoder_seq_length=4096)


def large(**keys):
    """Plain complete section `model` of a model with 8 billion weights, with changes."""
    cfg = complete_model(LARGE_LLAMA | {"precision": "bf16"} | keys, "gpt_ppo_actor")
    return plain_dict(cfg, resolve=True)


@some_of(
    ("variant", "keys"),
    [
        ("llama", {"precision": "bf16"}),
        ("gpt2", {"precision": "bf16"}),
        ("experts", {"precision": "bf16"}),
        ("llama", with_lora("all")),
        ("llama", {}),
        ("llama", {"num_query_groups": 1, "kv_channels": 16}),
        ("llama", {"normalization": "layernorm", "precision": "bf16"}),
        ("llama", {"window_size": [64, 0]}),
        ("llama", {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
        ("gpt2", {}),
        ("experts", {}),
        ("llama", with_lora("attention_qkv", variant="nemo") | {"precision": "bf16"}),
        ("llama", with_lora("mlp")),
        ("gpt2", with_lora("attention_dense")),
        ("gpt2", with_lora("all") | {"precision": "bf16"}),
    ],
    keep=4,
)
def test_activations_are_the_tensors_that_autograd_keeps(tiny_tokenizer_dir, variant, keys):
    width, samples = 256, 2
    sizes = {"hidden_size": 64, "ffn_hidden_size": 256, "encoder_seq_length": width}
    cfg = tiny_config(tiny_tokenizer_dir, **VARIANTS[variant] | sizes | keys)
    model = NLPAdapterModelMixin(cfg)
    model.init_peft(cfg.get("peft"))
    (module,) = model.unwrapped()
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept, alive = {}, []

    def keep(tensor):
        storage = tensor.untyped_storage()
        alive.append(tensor)  # so that no other tensor gets its address
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    hidden = torch.randn(width, samples, 64, dtype=module.config.params_dtype, requires_grad=True)
    rotary = module.rotary_pos_emb(width) if cfg.position_embedding_type == "rope" else None
    module.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module.decoder.layers[1](hidden, attention_mask=None, rotary_pos_emb=rotary)
    workload = Workload(width=width, samples=samples, on_gpu=False)
    predicted = memory.layer_bytes(architecture_of(model), Split(), workload)
    assert predicted == pytest.approx(sum(kept.values()), rel=0.02)


# --- bytes by hand -------------------------------------------------------------------------------

LLAMA_8B = Architecture(32, 4096, 14336, 32, 8, 128, 128256)
N, ALONE = 8_030_261_248, Split()


def phase(name, split=ALONE, **keys):
    """{part: bytes} of a phase."""
    return job_memory(LLAMA_8B, split, Workload(**keys)).phases[name]


def test_what_stands_all_the_time():
    parts = phase("update", forward_samples=0)
    assert (parts[memory.WEIGHTS], parts[GRADIENTS], parts[OPTIMIZER]) == (2 * N, 4 * N, 12 * N)
    shared = phase("update", Split(dp=4, cp=2), forward_samples=0)
    assert (shared[GRADIENTS], shared[OPTIMIZER]) == (4 * N, 12 * N / 8)
    assert phase("update", Split(dp=4), distributed_optimizer=False)[OPTIMIZER] == 12 * N


def test_the_optimizer_states_of_experts_have_fewer_replicas():
    split, w = Split(dp=4, ep=2), Workload()
    weights = parameters.Weights(dense=1000, expert=600)
    assert memory.optimizer_bytes(LLAMA_8B, weights, split, w) == 12 * 1000 / 4 + 12 * 600 / 2


def test_copies_in_host_memory():
    w = Workload(reference=True, offloads=True, rollout_samples=8, response=2048)
    needed = job_memory(LLAMA_8B, Split(dp=4), w)
    assert sum(needed.host.values()) == 2 * 2 * N + 8 * N / 4
    # What is in host memory while the policy generates is not on the GPU.
    resting = needed.phases["generation"][OPTIMIZER]
    assert resting == needed.phases["update"][OPTIMIZER] - 8 * N / 4
    assert needed.phases["generation"]["KV cache"] == 32 * 2 * 8 * 128 * 2 * 8 * 4096
    critic = job_memory(LLAMA_8B, Split(), Workload(swaps=True))
    assert sum(critic.host.values()) == 2 * 2 * N


def test_stages_that_are_gathered_and_a_cache_of_given_size():
    sample, others = 32 * 2 * 8 * 128 * 2 * 4096, "weights of other stages"
    rollout = {"rollout_samples": 8, "response": 2048}
    parts = phase("generation", Split(pp=4), **rollout, generation=(1, 1))
    assert parts["KV cache"] == 2 * sample
    assert parts[others] + parts[memory.WEIGHTS] == 2 * N
    assert others not in phase("generation", **rollout, generation=(1, 1))
    parts = phase("generation", Split(tp=4), **rollout, generation=(1, 1))
    assert parts["KV cache"] == 2 * sample
    assert parts[others] == 2 * N  # all of them beside the shards
    parts = phase("generation", **rollout, generation=(2, 1))
    assert parts["KV cache"] == 8 * sample  # twice the samples, half of each
    parts = phase("generation", **rollout, cache_memory=5.5 * sample)
    assert parts["KV cache"] == 5 * sample


def with_qkv_adapters(dim, layers=None):
    rest = 32.0, 0.0, "post", "xavier", "zero", layers, False, "nemo"
    return replace(LLAMA_8B, lora=LoRASettings(("attention_qkv",), dim, *rest))


def test_adapters_take_the_place_of_weights():
    dim = 16
    lora = with_qkv_adapters(dim)
    w = Workload(reference=True, swaps=True, merges=True, rollout_samples=1)
    adapters = 32 * dim * (4096 + 6144)
    for split, own in (
        (Split(), adapters),
        (Split(tp=2, dp=2), 32 * dim * (4096 + 6144 // 2)),  # A is whole on each rank
        (Split(pp=2), adapters // 2),
    ):
        needed = rank_memory(lora, split, 0, w)
        update = needed.phases["update"]
        assert update[GRADIENTS] == 4 * own
        assert update[OPTIMIZER] == 12 * own / split.dp
        base = rank_memory(LLAMA_8B, split, 0, w).phases["update"][memory.WEIGHTS]
        assert update[memory.WEIGHTS] == base + 2 * own
        merged = 32 * 4096 * 6144 // split.tp // split.pp
        assert needed.phases["generation"]["merged adapters"] == 2 * merged
        # The reference policy is the base; of critic and reward model only adapters change places.
        kept = dict.fromkeys(("reward model", "critic while the reward model computes"), 2 * own)
        assert needed.host == kept


def test_a_stage_without_adapters_trains_nothing():
    lora, split = with_qkv_adapters(16, layers=(1,)), Split(pp=2)
    stages = [rank_memory(lora, split, stage, Workload()) for stage in (0, 1)]
    first, last = (stage.phases["update"] for stage in stages)
    assert first[GRADIENTS] == 4 * 16 * (4096 + 6144)
    assert last[GRADIENTS] == last[OPTIMIZER] == 0


def test_a_tied_table_has_a_copy_on_the_last_stage():
    tied = replace(LLAMA_8B, tied=True)
    parts = [count_weights(tied, Split(pp=2), stage).total for stage in (0, 1)]
    assert sum(parts) == count_weights(tied).total + 128256 * 4096


def test_layers_with_and_without_experts():
    model = large(num_moe_experts=8, moe_router_topk=2, moe_layer_freq=[1] * 30 + [0, 1])
    model |= {"moe_shared_expert_intermediate_size": 512, "moe_shared_expert_gate": True}
    mixed = read_architecture(model, 128256)
    dense, sparse = (parameters.count_layer(kind).total for kind in (LLAMA_8B, mixed))
    feed_forward = 3 * 4096 * 14336
    assert sparse == dense + 7 * feed_forward + 3 * 4096 * 512 + 4096 * (8 + 1)
    whole = count_weights(mixed).total
    assert whole == N + 31 * (sparse - dense)
    assert sum(count_weights(mixed, Split(pp=2), stage).total for stage in (0, 1)) == whole
    half = read_architecture(model | {"moe_layer_freq": 2}, 128256)
    assert count_weights(half).total == N + 16 * (sparse - dense)


def test_micro_batches_in_flight():
    assert [memory.in_flight(Split(pp=4), stage, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert memory.in_flight(Split(pp=4), 0, 2) == 2
    assert memory.in_flight(Split(pp=2, vpp=2), 0, 8) == (2 + 2 + 1) / 2


def test_what_makes_activations_smaller():
    activations = lambda *split, **keys: phase("update", *split, **keys)["activations"]
    assert activations(Split(cp=2)) == pytest.approx(activations() / 2, rel=1e-6)
    assert activations(samples=2) == pytest.approx(2 * activations(), rel=0.01)
    parallel = activations(Split(tp=2))
    assert activations(Split(tp=2, sequence_parallel=True)) < parallel < activations()
    assert activations(recompute="selective") == activations()


def test_full_recomputation_keeps_the_inputs_of_layers():
    layer, inputs = memory.layer_bytes(LLAMA_8B, alone := Split(), Workload()), 4096 * 4096 * 2

    def kept(**keys):
        return memory.kept_bytes(LLAMA_8B, alone, 0, Workload(recompute="full", **keys))

    assert kept() == (32 * inputs, layer)
    assert kept(recompute_layers=4) == (8 * inputs, 4 * layer)
    assert kept(recompute_layers=4, block=True) == (4 * inputs + 28 * layer, layer)


def test_bytes_of_a_number():
    for precision, size in {"32": 4, "bf16-mixed": 2}.items():
        assert read_architecture(large(precision=precision), 1).number_bytes == size
    with pytest.raises(UserError, match="trainer.precision='16' must be one of"):
        read_architecture(large(precision="16"), 1)


# --- splits --------------------------------------------------------------------------------------


@pytest.fixture
def model_file(tmp_path):
    """A YAML file with the section `model` of a model of 8 billion weights."""

    def write(**keys):
        path = tmp_path / "model.yaml"
        section = LARGE_LLAMA | {"override_vocab_size": 128256} | keys
        OmegaConf.save(OmegaConf.create({"model": section}), path)
        return str(path)

    return write


def on(gpus, memory="80GB", job=None):
    """Words of the command line."""
    return ["--gpus", str(gpus), "--memory", memory, *(["--job", job] if job else [])]


@pytest.fixture
def plan(model_file, capsys):
    """`plan(words)`: what the command prints as JSON, of `model_file()` or of another file."""

    def plan(words, path=None):
        assert main([path or model_file(), *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return plan


def sizes_of(job, *names):
    return {tuple(c[name] for name in names) for c in job["candidates"]}


def test_splits_that_a_job_would_refuse_are_no_candidates(model_file, plan):
    path = model_file(num_layers=6, num_attention_heads=12, num_query_groups=6, kv_channels=128)
    (job,) = plan(on(8, job="sft"), path)["jobs"]
    assert sizes_of(job, "tp") == {(1,), (2,)}  # 6 query groups
    assert sizes_of(job, "pp") == {(1,), (2,)}  # 6 layers
    parts = "train_ds", "validation_ds"
    arguments = [f"model.data.{part}.global_batch_size=2" for part in parts]
    (job,) = plan([*arguments, *on(8, job="sft")], path)["jobs"]
    assert sizes_of(job, "dp") == {(1,), (2,)}  # samples of a global batch


def test_experts_are_spread(model_file, plan):
    path = model_file(num_moe_experts=8, moe_router_topk=2, num_layers=4)
    (job,) = plan(on(4, job="sft"), path)["jobs"]
    found = sizes_of(job, "tp", "ep", "dp")
    assert {(1, 4, 4), (2, 2, 2), (1, 1, 4)} <= found
    assert (1, 8, 4) not in found


@some_of("kind", ["ppo", "rs", "sft", "rm"])
def test_the_arguments_start_the_job(plan, kind):
    result = plan(["model.encoder_seq_length=2048", *on(8, job=kind)])
    configs = {"ppo": ("gpt_ppo_actor", "gpt_ppo_critic"), "rs": ("gpt_rs_actor", "inference_rm")}
    configs |= {"sft": ("gpt_sft",), "rm": ("training_rm",)}
    for job, config_name in zip(result["jobs"], configs[kind], strict=True):
        data = ["model.data.data_prefix={train: [a], validation: [a], test: [a]}"]
        if kind == "sft":
            data = [f"model.data.{part}_ds.file_path=a" for part in ("train", "validation")]
        data = [] if config_name in ("gpt_ppo_critic", "inference_rm") else data
        cfg = compose_settings(config_name, [*job["overrides"], *data])
        check_config(cfg, config_name, visible_devices=8, env={})
        chosen = job["recommended"]
        assert chosen["fits"]
        assert cfg.model.tensor_model_parallel_size == chosen["tp"]
        assert cfg.trainer.devices * cfg.trainer.num_nodes == chosen["gpus"]


def test_an_override_goes_to_the_jobs_that_have_the_key(plan):
    given = ["model.ppo.rollout_micro_batch_size=4", "model.loss_clip_val=0.3", "model.seed=5"]
    actor, critic = plan([*given, "--critic", "model.micro_batch_size=2", *on(8)])["jobs"]
    assert actor["overrides"][-2:] == ["model.ppo.rollout_micro_batch_size=4", "model.seed=5"]
    given = ["model.loss_clip_val=0.3", "model.seed=5", "model.micro_batch_size=2"]
    assert critic["overrides"][-3:] == given
    assert critic["recommended"]["phases"]["update"]["activations"] > 0


def test_ppo_without_a_critic_has_a_reward_server(plan):
    given = ["trainer.ppo.advantage_estimator=grpo", "model.ppo.num_rollouts_per_prompt=4"]
    given += ["remote_critic_rm.combine_rm_and_critic_server=False"]
    jobs = plan([*given, *on(8)])["jobs"]
    assert [job["job"] for job in jobs] == ["actor", "reward server"]


TEACHER = "trainer.ppo.teacher_kl_coef=0.5"


def test_ppo_with_a_teacher_has_three_jobs(model_file, plan, capsys):
    jobs = plan([TEACHER, *on(8)])["jobs"]
    counts = {job["job"]: job["recommended"]["gpus"] for job in jobs}
    assert counts == {"actor": 4, "critic": 2, "teacher": 2}
    assert main([model_file(), TEACHER, *on(2)]) == 2
    assert "3 jobs run at the same time" in capsys.readouterr().err


def test_micro_batches_by_tokens_hold_so_many_of_the_longest_samples(plan):
    by_size = ["model.micro_batch_size=2", "model.ppo.forward_micro_batch_size=2"]
    by_tokens = [f"model.dynamic_micro_batch_tokens={2 * 4096 + 5}"]
    jobs = [plan([*given, *on(16)])["jobs"][0] for given in (by_size, by_tokens)]
    whole = [[c for c in job["candidates"] if not c["changes"]] for job in jobs]
    phases = [{(c["tp"], c["pp"], c["cp"]): c["phases"] for c in each} for each in whole]
    assert phases[0] and phases[0] == phases[1]


@pytest.mark.parametrize("given", [[], [TEACHER]])
def test_actor_and_servers_on_one_gpu(model_file, plan, given):
    small = dict(num_layers=4, hidden_size=512, ffn_hidden_size=1024, kv_channels=64)
    result = plan([*given, *on(1, "24GB")], model_file(**small, num_attention_heads=8))
    assert result["shared"] and len(result["jobs"]) == 2 + len(given)
    together = sum(job["recommended"]["peak"] for job in result["jobs"])
    assert together <= result["limit"] == 0.9 * 24 * GB
    for job in result["jobs"]:
        left = result["limit"] - together + job["recommended"]["peak"]
        assert all(c["fits"] == (c["peak"] <= left) for c in job["candidates"])


def test_adapters_need_less(model_file, plan, capsys):
    arguments = on(1, job="sft")
    assert main([model_file(), *arguments]) == 2  # all weights of 8 billion do not fit
    capsys.readouterr()
    lora = ["model.peft.peft_scheme=lora", "model.peft.lora_tuning.target_modules=[all]"]
    (job,) = plan([*arguments, *lora])["jobs"]
    per_layer = 2 * 4096 + 6144 + 4096 + 4096 + 3 * 14336 + 4096
    assert job["trained"] == 32 * 32 * per_layer
    assert job["weights"] == N + job["trained"]
    assert {*lora} <= set(job["overrides"])
    assert main([model_file(), *arguments, *lora]) == 0
    assert "of which 71.303 million are trained" in capsys.readouterr().out


def test_shares_of_the_gpus():
    for gpus, share in ((8, (4, 4)), (3, (2, 1)), (24, (16, 8)), (8, (4, 2, 2)), (2, (1, 1))):
        assert shares(gpus, 8, len(share))[0] == share
    assert all(n <= 8 or n % 8 == 0 for pair in shares(32, 8, 2) for n in pair)


def test_nothing_fits_says_how_many_gpus_do(model_file, capsys):
    start = lambda gpus: main([model_file(), *on(gpus, "24GB", "sft")])
    assert start(2) == 2
    error = capsys.readouterr().err
    assert "no split of 2 GPUs of 24 GiB" in error
    enough = int(error.split("SFT. ")[1].split()[0])
    assert [start(enough), start(enough // 2)] == [0, 2]


# --- the command ---------------------------------------------------------------------------------


def test_memory_of_a_gpu():
    assert read_memory("80GB") == read_memory("80 gib") == read_memory("80") == 80 * GB
    assert read_memory("1536MB") == 1.5 * GB
    for text in ("much", "-1GB", "0GB", "8TB", ""):
        with pytest.raises(UserError, match="such as 80GB"):
            read_memory(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (on(0), "--gpus=0"),
        (on(8, "80apples"), "--memory=80apples"),
        ([*on(8), "--reserve", "100"], "--reserve=100"),
        (["model.wings=2", *on(8)], "model.wings"),
        (["wings", *on(8)], "'wings' is no override"),
        (["model.global_batch_size=7", *on(16)], "no split of 16 GPUs is possible: "),
        (["model.encoder_seq_length=null", *on(16, job="dpo")], "is not set"),
        ([f"{FRACTION}=abc", *on(16, job="distill")], f"{FRACTION}='abc'"),
        (None, "nowhere.nemo does not exist"),
    ],
)
def test_bad_input_is_one_line(model_file, capsys, arguments, message):
    assert main([model_file(), *arguments] if arguments else ["nowhere.nemo", *on(8)]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_the_text_names_what_counts(model_file, capsys):
    assert main([model_file(), *on(8)]) == 0
    text = capsys.readouterr().out
    jobs = {"ACTOR": 8.030, "CRITIC": 7.505}
    said = [f"{job}: {weights:.3f} billion weights, 4 GPUs" for job, weights in jobs.items()]
    for words in (*said, "All GPUs of the job together: ", "serve_ppo_critic.py"):
        assert words in text


@some_of(
    ("job", "key"),
    [
        ("dpo", "model.dpo.log_prob_forward_micro_batch_size"),
        ("kto", "model.kto.log_prob_forward_micro_batch_size"),
        ("steerlm2", "model.steerlm2.forward_micro_batch_size"),
    ],
)
def test_smaller_passes_have_the_key_of_the_job(plan, job, key):
    (planned,) = plan([f"{key}=256", *on(8, "46GB", job)])["jobs"]
    changes = planned["recommended"]["changes"]
    assert set(changes) == {key} and 1 <= changes[key] < 256
    most = plan([f"{key}={changes[key] * 2}", *on(8, "46GB", job)])["jobs"][0]["candidates"]
    chosen = planned["recommended"]
    (twice,) = (c for c in most if all(c[k] == chosen[k] for k in ("tp", "pp", "cp", "recompute")))
    assert twice["changes"] == {key: changes[key]}  # twice as many do not fit


def workload(job, path, *overrides, pp=1):
    """What a job computes at once."""
    model, _rows = read_model(Path(path))
    cfg = job_config(job, model, list(overrides), path)
    return read_workload(job, cfg, Split(pp=pp))


@pytest.mark.parametrize("pp", [1, 2])
def test_graphs_keep_the_memory_of_a_step(model_file, pp):
    path, found = model_file(), []
    for more in ((), ("model.ppo.generation.cuda_graphs=False",)):
        w = workload(ACTOR, path, *more, pp=pp)
        needed = rank_memory(LLAMA_8B, Split(pp=pp), 0, w)
        found.append(sum(needed.phases["generation"].values()))
    choice = w.rollout_samples * LLAMA_8B.vocab_rows * (2 + 4 + 4 + 8 + 8)
    assert found[0] - found[1] == (choice + (96 << 20) if pp == 1 else 0)


def test_passes_of_dpo_count_pairs_by_number_and_responses_by_tokens(model_file):
    path, key = model_file(), "log_prob_forward_micro_batch_size=2"
    pairs = workload(DPO, path, f"model.dpo.{key}")
    assert (pairs.forward_samples, pairs.unit) == (4, 2)
    singles = workload(KTO, path, f"model.kto.{key}")
    assert (singles.forward_samples, singles.unit) == (2, 1)
    for job in (DPO, KTO):
        found = workload(job, path, f"model.dynamic_micro_batch_tokens={3 * 4096 + 5}")
        assert (found.forward_samples, found.unit) == (3, 1)


@pytest.mark.parametrize(
    ("job", "overrides", "counts"),
    [
        (DPO, [], False),
        (DPO, ["model.attention_dropout=0"], False),
        (DPO, ["model.hidden_dropout=null"], True),
        (DPO, ["model.hidden_dropout=0.2"], True),
        (REWARD_MODEL, [], True),
    ],
)
def test_a_stored_dropout_counts_where_the_job_keeps_it(model_file, job, overrides, counts):
    path = model_file(hidden_dropout=0.1)
    cfg = job_config(job, read_model(Path(path))[0], overrides, path)
    assert read_architecture(cfg["model"], 128256).dropout == counts


def test_a_student_generates_only_if_some_responses_are_its_own(model_file):
    path, key = model_file(), FRACTION
    rest = "model.knowledge_distillation.outside_top_k=bucket", "model.global_batch_size=8"
    assert workload(STUDENT, path, f"{key}=0.5", *rest).rollout_samples == 8
    assert workload(STUDENT, path, f"{key}=0.0", *rest).rollout_samples == 0
    together = "model.knowledge_distillation.on_policy.rollout_micro_batch_size"
    assert workload(STUDENT, path, f"{key}=0.5", f"{together}=3", *rest).rollout_samples == 3
    assert workload(STUDENT, path, f"{key}=0.5", f"{together}=9", *rest).rollout_samples == 8


@pytest.mark.full  # the other jobs' passes are planned by the same code
def test_steerlm2_is_planned_as_its_script_starts(model_file, plan, capsys):
    (job,) = plan(on(16, job="steerlm2"))["jobs"]
    assert "model.data.chat=True" in job["overrides"]
    for refused in ("model.data.chat=False", "model.loss_reduction=sequence"):
        assert main([model_file(), refused, *on(16, job="steerlm2")]) == 2
        assert refused.split("=")[0] in capsys.readouterr().err
    # The batch counts prompts; how many responses each has is not known.
    small = "model.global_batch_size=8", "model.steerlm2.micro_batch_size=8"
    assert workload(STEERLM2, model_file(), *small, pp=4).micro_batches == 4


def test_a_server_has_no_activations_to_recompute(plan):
    given = "model.activations_checkpoint_granularity=selective"
    server = plan([given, *on(16, job="rs")])["jobs"][1]
    assert [word for word in server["overrides"] if "activations_checkpoint" in word] == [given]
    assert all(c["recompute"] is None for c in server["candidates"])


def test_jobs_have_the_keys_of_their_passes():
    for job in [job for jobs in JOBS.values() for job in jobs]:
        cfg = compose_settings(job.config.name, [])
        for key in filter(None, (job.forward_key, *job.rollout_keys)):
            assert OmegaConf.select(cfg, key, default="absent") != "absent", (job.name, key)


def test_distillation_has_a_teacher_if_the_student_responds(model_file, plan, capsys):
    machine, critic = on(16, job="distill"), ["--critic", "model.micro_batch_size=2"]
    own = [f"{FRACTION}=0.5", "model.knowledge_distillation.outside_top_k=bucket"]
    (alone,) = plan(machine)["jobs"]
    assert set(alone["recommended"]["phases"]) == {"update"}
    student, teacher = plan([*machine, *own, *critic])["jobs"]
    assert student["script"].endswith("train_gpt_knowledge_distillation.py")
    assert teacher["script"].endswith("serve_teacher.py")
    assert set(student["recommended"]["phases"]) == {"generation", "update"}
    assert set(teacher["recommended"]["phases"]) == {"log-probs"}
    assert teacher["recommended"]["host"] == {}
    assert main([model_file(), *machine, *critic]) == 2
    assert "on_policy.fraction" in capsys.readouterr().err


def test_log_probs_that_are_kept_leave_no_reference_in_host_memory(plan):
    kept = ["model.dpo.ref_log_probs_dir=/shared/kept"]
    for given, held in (([], True), (kept, False)):
        (job,) = plan([*given, *on(16, job="dpo")])["jobs"]
        assert ("reference policy" in json.dumps(job)) == held


def test_a_nemo_file(tiny_tokenizer_dir, tmp_path, plan):
    model = MegatronGPTModel(tiny_config(tiny_tokenizer_dir))
    model.save_to(path := str(tmp_path / "tiny.nemo"))
    (job,) = plan(["model.encoder_seq_length=48", *on(2, "8GB", "sft")], path)["jobs"]
    assert job["weights"] == size_of(model.unwrapped()[0].parameters())


def test_the_command_starts_without_pytorch(model_file):
    code = (
        "import sys; from nemo_aligner.plan.__main__ import main; "
        "code = main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", code, model_file(), *on(8)], check=True)


def test_a_pass_over_prompts_is_planned_as_the_engine_makes_it():
    assert memory.PREFILL_TOKENS == engine.PREFILL_TOKENS


def test_passes_by_tokens_become_smaller_by_tokens():
    given = {"width": 4096, "by_tokens": True}
    most = sum(phase("log-probs", **given, forward_samples=2).values())
    given = Workload(**given, forward_samples=8)
    smaller, keys = fit_passes(ACTOR, LLAMA_8B, Split(), given, most)
    assert smaller.forward_samples == 2
    assert keys == {"model.dynamic_micro_batch_tokens": 8192}
