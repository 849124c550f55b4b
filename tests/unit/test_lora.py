# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""LoRA: the adapters' arithmetic against plain PyTorch, base and reference bit for bit, merging,
checkpoints of adapters, bad input. Splits: tests/distributed/test_matrix.py.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import load_tensors_metadata
from omegaconf import OmegaConf, open_dict
from torch.func import functional_call

from nemo_aligner.checkpoint import adapters, sources
from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.config.defaults import complete
from nemo_aligner.config.peft_rules import check_peft
from nemo_aligner.config.values import Values, plain_dict
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.launch.model_loading import load_from_nemo
from nemo_aligner.models.nlp.gpt.megatron_gpt_critic import MegatronGPTCriticModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_dpo_model import MegatronGPTSPINModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_policy import MegatronGPTActorModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from nemo_aligner.training.megatron_steps import forward_collect
from nemo_aligner.training.optim import train_on_batch
from tests.cases import some_of
from tests.tiny_models import PPO, tiny_config

pytestmark = pytest.mark.slow

TOKENS = torch.randint(0, 299, (4, 9), generator=torch.Generator().manual_seed(5))
LENGTHS = torch.tensor([9, 6, 8, 4])


def peft(**tuning) -> dict:
    """A section `model.peft`: adapters on all layers that are not 0 at the start."""
    defaults = {"target_modules": ["all"], "adapter_dim": 4, "alpha": 6}
    defaults["row_init_method"] = "normal"
    return {"peft_scheme": "lora", "lora_tuning": {**defaults, **tuning}}


@pytest.fixture(scope="module")
def bases(tiny_tokenizer_dir, tmp_path_factory):
    """A language model and a reward model of each architecture, as `.nemo` folders."""
    folder = tmp_path_factory.mktemp("bases")
    for architecture in ("llama", "gpt2"):
        cfg = tiny_config(tiny_tokenizer_dir, architecture)
        MegatronGPTModel(cfg).save_to(f"{folder}/{architecture}/")
    MegatronGPTRewardModel(tiny_config(tiny_tokenizer_dir)).save_to(f"{folder}/rm/")
    return folder


def load(bases, name="llama", model_class=MegatronGPTActorModel, **keys):
    cfg = OmegaConf.create({"ppo": PPO, "micro_batch_size": 2, **keys})
    return load_from_nemo(model_class, cfg, None, restore_path=bases / name)


def actor_with(bases, name="llama", **tuning):
    model = load(bases, name)
    model.init_peft(peft(**tuning))
    model.set_eval()
    return model


def logits_of(model) -> torch.Tensor:
    model.set_eval()
    with torch.no_grad():
        return forward_collect(
            model.model, {"tokens": TOKENS}, micro_batch_size=4, output_fn=lambda x, _: x.clone()
        )


def batch_of(model) -> dict:
    generator = torch.Generator().manual_seed(8)
    model.set_eval()
    batch = {"response_tokens": TOKENS, "is_end": torch.ones(4, dtype=torch.bool)}
    batch["advantages"] = torch.randn(4, 8, generator=generator)
    batch["prev_logprobs"] = model.get_inference_log_probs(TOKENS)
    return batch | {"mask": torch.ones(4, 8)}


def train(model, steps=3):
    optimizer, scheduler = model.setup_megatron_optimization(max_steps=10)
    batch = batch_of(model)
    for _ in range(steps):
        train_on_batch(model, optimizer, scheduler, batch, 1.0)
    return optimizer, scheduler


# --- arithmetic


def naive_weights(model) -> dict[str, torch.Tensor]:
    """The weights of the bare module with `W + alpha/dim B A` in place of each W, row by row."""
    module, settings = model.unwrapped()[0], model.lora
    heads, groups, size = 4, module.config.num_query_groups, 8
    weights = dict(module.named_parameters())
    for name in [name for name in weights if name.endswith(".lora.a")]:
        stem = name.removesuffix("lora.a")
        a, b, whole = weights[name], weights[f"{stem}lora.b"], weights[f"{stem}weight"]
        row = torch.arange(len(whole))
        block = torch.zeros_like(row)  # whose A is that of a row of B
        if settings.variant == "canonical" and "linear_qkv" in stem:
            place = row % ((heads // groups + 2) * size) // size  # query heads, key, value
            block = (place - heads // groups + 1).clamp(min=0)
        elif settings.variant == "canonical" and "linear_fc1" in stem:
            block += module.config.gated_linear_unit & (row >= len(whole) // 2)
        product = torch.einsum("rd,rdi->ri", b, a.unflatten(0, (-1, settings.dim))[block])
        weights[f"{stem}weight"] = whole + settings.alpha / settings.dim * product
    return weights


@pytest.mark.parametrize("variant", ["nemo", "canonical"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_outputs_and_gradients_are_those_of_the_sum_of_the_weights(bases, architecture, variant):
    model = actor_with(bases, architecture, variant=variant, column_init_method="kaiming")
    module = model.unwrapped()[0]
    positions = torch.arange(9).expand(4, -1)
    with model.adapters_disabled():
        expected = functional_call(module, naive_weights(model), (TOKENS, positions, None))
    found = module(TOKENS, positions, None)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    assert set(trained) == {n for n, _ in module.named_parameters() if ".lora." in n}
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    wanted = torch.autograd.grad((expected * direction).sum(), list(trained.values()))
    mine = torch.autograd.grad((found * direction).sum(), list(trained.values()))
    for name, ours, theirs in zip(trained, mine, wanted, strict=True):
        scale = float(theirs.abs().max())
        assert scale > 0 and float((ours - theirs).abs().max()) < 1e-5 * scale, name


def test_fresh_adapters_change_no_bit_and_the_reference_stays_the_base(bases):
    model = load(bases)
    before = model.get_inference_log_probs(TOKENS)
    model.init_peft(peft(row_init_method="zero"))
    model.set_reference_policy()
    model.set_eval()
    assert torch.equal(model.get_inference_log_probs(TOKENS), before)
    assert model.starts_as_reference
    train(model)
    model.set_eval()
    assert not torch.allclose(model.get_inference_log_probs(TOKENS), before, atol=1e-3)
    assert torch.equal(model.get_init_policy_logprobs(TOKENS), before)
    assert model.init_policy_state_dict is None  # no second copy of the weights


def test_merged_weights_give_the_same_and_come_back_bit_for_bit(bases):
    model = actor_with(bases, variant="canonical")
    weights = {n: p.detach().clone() for n, p in model.unwrapped()[0].named_parameters()}
    apart = logits_of(model)
    with pytest.raises(RuntimeError, match="inside"), model.adapters_merged():
        torch.testing.assert_close(logits_of(model), apart, rtol=1e-5, atol=1e-5)
        raise RuntimeError("inside")
    for name, parameter in model.unwrapped()[0].named_parameters():
        assert torch.equal(parameter, weights[name]), name
    assert torch.equal(logits_of(model), apart)


def test_initial_values_have_the_documented_distributions(bases):
    """Standard deviation of A: Xavier sqrt(2 / (in + dim)), normal 0.2, Kaiming's uniform
    sqrt(1 / (3 in)); B is 0."""
    expected = {"xavier": math.sqrt(2 / (32 + 64)), "normal": 0.2, "kaiming": math.sqrt(1 / 96)}
    for method, deviation in expected.items():
        init = {"column_init_method": method, "row_init_method": "zero"}
        model = actor_with(bases, target_modules="attention_qkv", adapter_dim=64, **init)
        linear = model.unwrapped()[0].decoder.layers[0].self_attention.linear_qkv
        assert abs(linear.lora.a.std().item() / deviation - 1) < 0.1
        assert not linear.lora.b.any()


@pytest.mark.parametrize("position", ["pre", "post"])
def test_dropout_acts_in_training_only_and_keeps_the_mean(bases, position):
    own = {"adapter_dropout": 0.5, "dropout_position": position}
    model = actor_with(bases, target_modules=["mlp_fc2"], **own)
    linear = model.unwrapped()[0].decoder.layers[0].mlp.linear_fc2
    inputs = torch.randn(3, 2, 48, generator=torch.Generator().manual_seed(1))
    base, exact = F.linear(inputs, linear.weight), linear(inputs)[0]
    model.set_train()
    draws = torch.stack([linear(inputs)[0] for _ in range(2000)])
    added = draws - base
    torch.testing.assert_close(added.mean(0), exact - base, rtol=0.1, atol=0.1)
    zeros = float((added.abs() < 1e-6).float().mean())
    assert (0.45 < zeros < 0.55) if position == "post" else zeros < 0.01


def test_selected_layers_and_tied_weights(bases):
    model = actor_with(bases, layer_selection=[2], target_modules=["attention"])
    names = [n for n, p in model.unwrapped()[0].named_parameters() if p.requires_grad]
    assert len(names) == 4 and all(".layers.1.self_attention." in name for name in names)
    tied = actor_with(bases, weight_tying=True, target_modules="mlp_fc1")
    first, second = (layer.mlp.linear_fc1.lora for layer in tied.unwrapped()[0].decoder.layers)
    assert first.a is second.a and first.b is second.b
    train(tied)
    assert sum(p.requires_grad for p in tied.unwrapped()[0].parameters()) == 2


def test_gradients_and_optimizer_hold_adapters_alone(bases):
    model = actor_with(bases)
    optimizer, _ = model.setup_megatron_optimization(max_steps=10)
    count = sum(p.numel() for n, p in model.unwrapped()[0].named_parameters() if ".lora." in n)
    assert sum(b.grad_data.numel() for b in model.model[0].buffers) < count + 256  # padded
    assert sum(p.numel() for p in optimizer.get_parameters()) == count
    assert sum(t.numel() for t in model.weights_to_cpu().values()) == count


# --- checkpoints


def test_a_nemo_of_adapters_is_small_and_stands_for_the_merged_model(bases, tmp_path, warnings):
    model = actor_with(bases, variant="canonical")
    train(model)
    expected, path = logits_of(model), tmp_path / "adapters.nemo"
    model.save_to(str(path))
    stored = sources.open_source(path).stored_config()
    assert stored.lora_base.restore_from_path == str(bases / "llama")
    assert "lora_base" not in sources.read_config(path)
    with sources.open_source(path).own_tensors() as weights:
        assert all(".lora." in key for key in weights.shapes())
    for keys in ({}, {"precision": "bf16"}):
        merged = load_from_nemo(MegatronGPTModel, OmegaConf.create(keys), None, restore_path=path)
        bounds = {"rtol": 1e-5, "atol": 1e-5} if not keys else {"rtol": 0.1, "atol": 0.15}
        torch.testing.assert_close(logits_of(merged).float(), expected, **bounds)
    warnings.clear()
    again = load(bases)
    again.init_peft({**peft(adapter_dim=9), "restore_from_path": str(path)})
    assert ["the reference policy is the base" in line for line in warnings] == [False, True]
    spin = OmegaConf.create({"sampling_params": PPO["sampling_params"]})
    load(bases, model_class=MegatronGPTSPINModel, spin=spin).init_peft(
        {**peft(), "restore_from_path": str(path)}
    )
    load(bases).init_peft({"peft_scheme": "lora"})
    assert len(warnings) == 3  # SPIN's reference moves; new adapters change nothing
    assert again.lora.dim == 4  # the file says what the adapters look like
    assert not again.starts_as_reference and not model.starts_as_reference  # normal B
    assert torch.equal(logits_of(again), expected)


def test_a_resumed_job_goes_on_to_the_same_bits(bases, tmp_path):
    def callback(model, *training):
        return CheckpointCallback(tmp_path, model, *training, name="actor")

    model = actor_with(bases)
    training = train(model, steps=2)
    callback(model, *training).custom_save({}, trainer_state={"step": 2})
    train_on_batch(model, *training, batch_of(model), 1.0)
    resumed = actor_with(bases)
    training = resumed.setup_megatron_optimization(max_steps=10)
    assert callback(resumed, *training).load_latest() == {"step": 2}
    train_on_batch(resumed, *training, batch_of(resumed), 1.0)
    pairs = zip(resumed._named_weights(), model._named_weights(), strict=True)
    for (name, ours), (_, theirs) in pairs:
        assert torch.equal(ours, theirs), name
    folder = next((tmp_path / "checkpoints").iterdir())
    keys = load_tensors_metadata(str(folder / "weights"))
    assert keys and all(".lora." in key for key in keys)
    started = load(bases)
    path = {"checkpoint_dir": str(folder.parent), "checkpoint_name": folder.name}
    started.init_peft({**peft(), "restore_from_ckpt": path})
    assert logits_of(started).isfinite().all()


def test_critic_and_reward_model_share_one_base(bases):
    """Two sets of adapters and heads; the rewards are those of the reward model to the bit."""
    keys = {"forward_micro_batch_size": 2}
    rewards = load(bases, "rm", MegatronGPTRewardModel, **keys).infer((TOKENS, LENGTHS))
    critic = load(bases, "rm", MegatronGPTCriticModel, output_sequence=True, **keys)
    critic.init_peft(peft(row_init_method="zero"))
    critic.set_reward_model()
    trained = sum(p.numel() for p in critic.unwrapped()[0].parameters() if p.requires_grad)
    assert sum(t.numel() for t in critic.rm_state_dict_cpu.values()) == trained < 5000
    optimizer, scheduler = critic.setup_megatron_optimization(max_steps=10)
    first, values = critic.infer_rm_critic((TOKENS, LENGTHS))
    assert torch.equal(first, rewards.flatten())
    returns = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
    batch = {"tokens": TOKENS, "returns": returns, "prev_values": values[:, :-1]}
    batch["mask"] = torch.ones(4, 8)
    for _ in range(2):
        train_on_batch(critic, optimizer, scheduler, batch, 1.0)
    again, moved = critic.infer_rm_critic((TOKENS, LENGTHS))
    assert torch.equal(again, rewards.flatten()) and not torch.equal(moved, values)


# --- the base and its checksum


def test_the_checksum_names_the_base(bases, tmp_path):
    model = actor_with(bases)
    with sources.open_source(bases / "llama").tensors() as source:
        assert adapters.checksum_of_source(source) == model._base.checksum
    bf16 = load(bases, precision="bf16")
    bf16.init_peft(peft())
    assert bf16._base.checksum == model._base.checksum
    with torch.no_grad():
        other = load(bases)
        other.unwrapped()[0].decoder.layers[1].self_attention.linear_qkv.weight.mul_(1.01)
    other.init_peft(peft())
    assert other._base.checksum != model._base.checksum


def test_adapters_of_adapters_find_their_base_again(tmp_path, tiny_tokenizer_dir):
    """The base of the second adapters is the first ones merged into theirs: its checksum is the
    same for the model that was trained and for the files.
    """
    wide = {"hidden_size": 512, "ffn_hidden_size": 640}
    MegatronGPTModel(tiny_config(tiny_tokenizer_dir, **wide)).save_to(f"{tmp_path}/base/")
    for before, after in (("base", "sft"), ("sft", "ppo")):
        model = load(tmp_path, before)
        model.init_peft(peft(adapter_dim=16, alpha=1))
        model.save_to(f"{tmp_path}/{after}/")
    path = tmp_path / "ppo"
    merged = load_from_nemo(MegatronGPTModel, OmegaConf.create({}), None, restore_path=path)
    torch.testing.assert_close(logits_of(merged), logits_of(model), rtol=1e-4, atol=1e-4)


@some_of("targets", ["attention_qkv", "attention_dense", "mlp_fc1", "mlp_fc2"], keep=2)
def test_a_base_with_other_adapters_merged_in_is_another_base(bases, tmp_path, targets):
    model = actor_with(bases, target_modules=targets)
    before = model._base.checksum
    model.save_to(f"{tmp_path}/adapters/")
    merged = load(tmp_path, "adapters")
    merged.init_peft(peft())
    assert merged._base.checksum != before


def test_adapters_of_another_base_are_refused(bases, tmp_path):
    model = actor_with(bases)
    model.save_to(f"{tmp_path}/adapters/")
    reward_model = load(bases, "rm", MegatronGPTRewardModel, forward_micro_batch_size=2)
    with torch.no_grad():
        reward_model.unwrapped()[0].decoder.layers[0].self_attention.linear_proj.weight.add_(1)
    with pytest.raises(UserError, match="adapters are adapters of another base: they were"):
        reward_model.init_peft({**peft(), "restore_from_path": f"{tmp_path}/adapters"})
    with pytest.raises(UserError, match="holds all weights of a model, not adapters"):
        load(bases).init_peft({**peft(), "restore_from_path": str(bases / "rm")})
    with pytest.raises(UserError, match="does not exist"):
        load(bases).init_peft({**peft(), "restore_from_path": str(tmp_path / "nothing")})


def test_a_base_that_is_gone_or_changed_is_an_error(bases, tmp_path, tiny_tokenizer_dir):
    moved = tmp_path / "base"
    MegatronGPTModel(tiny_config(tiny_tokenizer_dir)).save_to(f"{moved}/")
    model = load(tmp_path, "base")
    model.init_peft(peft())
    model.save_to(f"{tmp_path}/adapters/")
    MegatronGPTModel(tiny_config(tiny_tokenizer_dir, seed=8)).save_to(f"{moved}/")
    with pytest.raises(UserError, match=f"another base: they were trained on {moved}"):
        load(tmp_path, "adapters")
    moved.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"their base {moved} does not exist"):
        load(tmp_path, "adapters")


def test_a_checkpoint_of_another_kind_of_training_is_refused(bases, tmp_path):
    model = actor_with(bases)
    training = model.setup_megatron_optimization(max_steps=10)
    CheckpointCallback(tmp_path, model, *training, name="actor").custom_save({})
    for other, message in (
        (load(bases), "trained adapters, but this job has model.peft.peft_scheme=none"),
        (actor_with(bases, alpha=7), r"another form: .*alpha=7.0 \(checkpoint: 6.0\)"),
        (actor_with(bases, target_modules="mlp"), r"target_modules=\['mlp_fc1', 'mlp_fc2'\]"),
    ):
        training = other.setup_megatron_optimization(max_steps=10)
        with pytest.raises(UserError, match=message):
            CheckpointCallback(tmp_path, other, *training, name="actor").load_latest()


def test_the_form_of_adapters_to_start_from_is_checked(bases, tmp_path):
    actor_with(bases, weight_tying=True).save_to(f"{tmp_path}/adapters/")
    model = load(bases)
    with open_dict(model.cfg):  # as on two stages
        model.cfg.pipeline_model_parallel_size = 2
    with pytest.raises(ConfigError, match="weight_tying"):
        model.init_peft({**peft(), "restore_from_path": f"{tmp_path}/adapters"})


# --- settings


def tuned(**tuning):
    section = {"peft_scheme": "lora", "lora_tuning": tuning}
    return {"peft": plain_dict(complete(section, "gpt_ppo_actor", "model.peft"))}


CKPT = {"checkpoint_dir": "a", "checkpoint_name": None}
TWO_STAGES = {"pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (tuned(target_modules=["attention_qv"]), "'attention_qv' does not exist; use attention"),
        (tuned(target_modules=[]), r"target_modules=\[\] must be a list"),
        (tuned(adapter_dropout=1), "adapter_dropout=1 drops everything"),
        (tuned(column_init_method="zero"), "both zero: such adapters have no gradient"),
        (tuned(layer_selection=[0, 1]), "0, which is not the number of a layer; .* from 1 to 2"),
        (tuned(layer_selection=[1, 1]), "names a layer twice"),
        (tuned(layer_selection=1), "must be a list of layer numbers"),
        (tuned(position_embedding_strategy="add"), "embedding_strategy=add is not avail"),
        ({"peft": {"restore_from_path": "a.nemo"}}, "names adapters, but .*peft_scheme=none"),
        ({"peft": {"restore_from_path": 5}}, "restore_from_path=5 is not a path"),
        ({"peft": {"restore_from_ckpt": CKPT}}, "needs both checkpoint_dir and checkpoint_name"),
        ({"peft": peft(weight_tying=True), **TWO_STAGES}, "pipeline stage; .*=2 is more"),
        ({"peft": peft(), "num_moe_experts": 4}, "no adapters, but .* mlp_fc2; use atten"),
    ],
)
def test_what_cannot_work_names_the_value_and_the_remedy(model, message):
    model = {"num_layers": 2, **model, "peft": {"peft_scheme": "none", **model["peft"]}}
    with pytest.raises(ConfigError, match=message):
        check_peft(Values({"model": model}))


def test_adapters_are_set_up_once_and_before_the_optimizer(bases):
    model = load(bases)
    model.init_peft({"peft_scheme": None})  # null: every weight is trained
    assert not model.use_peft
    model.init_peft(peft())
    with pytest.raises(UserError, match="init_peft was called twice"):
        model.init_peft(peft())
    model = load(bases)
    model.setup_megatron_optimization(max_steps=10)
    with pytest.raises(UserError, match="after the optimizer was built"):
        model.init_peft(peft())
