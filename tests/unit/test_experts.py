# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts in one process: the losses that balance experts, and combinations that are
refused. Those of transformers are in test_hugging_face_models.py and test_peft_folders.py.
"""

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from nemo_aligner.checkpoint import nemo_archive
from nemo_aligner.config.defaults import complete_model
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.models.nlp.gpt.megatron_config import build_transformer_config
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.parallel.megatron_switches import take_balance_table
from nemo_aligner.training.megatron_steps import forward_backward, forward_collect
from tests.tiny_models import tiny_config

pytestmark = pytest.mark.slow

TOKENS = torch.tensor([[5, 9, 200, 31, 7, 8, 11, 250], [3, 3, 17, 90, 121, 60, 2, 1]])
EXPERTS = 4
MOE = {"num_moe_experts": EXPERTS, "moe_ffn_hidden_size": 24, "init_method_std": 0.3}


@pytest.fixture(autouse=True)
def no_balance_losses_are_left_behind():
    """Routers that are called directly leave their losses in a table of the process."""
    yield
    take_balance_table()


def logits_of(model):
    return forward_collect(
        model.model, {"tokens": TOKENS}, micro_batch_size=2, output_fn=lambda output, _: output
    )


def test_router_computes_in_float32(tiny_tokenizer_dir):
    model = MegatronGPTModel(tiny_config(tiny_tokenizer_dir, **MOE, precision="bf16"))
    router = model.unwrapped()[0].decoder.layers[0].mlp.router
    hidden = torch.randn(3, 2, 32).bfloat16()
    expected = hidden.double() @ router.weight.double().T
    assert router.weight.dtype is torch.bfloat16 and router.gating(hidden).dtype is torch.float32
    torch.testing.assert_close(router.gating(hidden).double(), expected, atol=1e-5, rtol=1e-5)
    assert logits_of(model).isfinite().all()


def router_with(tokenizer_dir, **losses):
    model = MegatronGPTModel(tiny_config(tokenizer_dir, **MOE, **losses))
    model.set_train()
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    return model.unwrapped()[0].decoder.layers[0].mlp.router


def balance_gradient(router, hidden):
    """Gradient of the router's weights from its balance losses alone."""
    router.weight.grad = None
    probabilities, chosen = router(hidden)
    (0.0 * probabilities).sum().backward()
    return router.weight.grad, chosen


def test_gradients_of_the_balance_losses(tiny_tokenizer_dir):
    router = router_with(tiny_tokenizer_dir, moe_aux_loss_coeff=0.7, moe_z_loss_coeff=0.2)
    hidden = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(1))
    gradient, chosen = balance_gradient(router, hidden)
    weight = router.weight.detach().clone().requires_grad_()
    logits = hidden.reshape(15, 32) @ weight.T
    share_of_tokens = chosen.float().sum(0) / (15 * 2)
    # Switch Transformer, eq. 4.
    balance = EXPERTS * (share_of_tokens * logits.softmax(-1).mean(0)).sum()
    z_loss = logits.logsumexp(-1).square().mean()  # ST-MoE, eq. 5
    (0.7 * balance + 0.2 * z_loss).backward()
    torch.testing.assert_close(gradient, weight.grad, atol=1e-6, rtol=1e-4)
    silent = router_with(tiny_tokenizer_dir, moe_aux_loss_coeff=0.0)
    assert not balance_gradient(silent, hidden)[0].any()


@pytest.mark.parametrize("layers", [1, [0, 0, 1]])
def test_balance_losses_are_metrics(tiny_tokenizer_dir, layers):
    """Means over the layers with experts: one of them."""
    layout = {"num_layers": 1 if layers == 1 else 3, "moe_layer_freq": layers}
    losses = {"moe_aux_loss_coeff": 0.7, "moe_z_loss_coeff": 0.2}
    cfg = tiny_config(tiny_tokenizer_dir, **MOE, **layout, **losses)
    model = MegatronGPTModel(cfg)
    model.setup_megatron_optimization(max_steps=1)
    seen, layer = [], model.unwrapped()[0].decoder.layers[-1].mlp
    scores = lambda layer, inputs, _: seen.append(layer.router.gating(inputs[0]).detach())
    layer.register_forward_hook(scores)
    for _ in range(2):  # the second pass starts from nothing
        model.prepare_for_training_step()
        nothing = lambda logits, _: (logits.sum() * 0, {"loss": logits.sum() * 0})
        options = {"micro_batch_size": 1, "loss_fn": nothing}
        metrics, _ = forward_backward(model.model, {"tokens": TOKENS}, **options)
    balance, z_loss = 0.0, 0.0
    for logits in (scores.reshape(-1, EXPERTS) for scores in seen[-2:]):
        share = torch.zeros_like(logits).scatter(1, logits.topk(2).indices, 1.0).mean(0) / 2
        balance += EXPERTS * float(share @ logits.softmax(-1).mean(0)) / 2
        z_loss += float(logits.logsumexp(-1).square().mean()) / 2
    assert metrics["moe_load_balancing_loss"] == pytest.approx(balance, rel=1e-5)
    assert metrics["moe_z_loss"] == pytest.approx(z_loss, rel=1e-5)
    model = MegatronGPTModel(tiny_config(tiny_tokenizer_dir)).model
    own = {"micro_batch_size": 1, "forward_only": True}
    own["loss_fn"] = lambda logits, _: (logits.sum(), {"loss": logits.sum()})
    metrics, _ = forward_backward(model, {"tokens": TOKENS}, **own)
    assert set(metrics) == {"loss"}


TWO_STAGES = {"pipeline_model_parallel_size": 2}
SHARED = {"moe_shared_expert_intermediate_size": 16}
REFUSED = [
    ({"expert_model_parallel_size": 3}, "num_moe_experts=4.*multiple of .*parallel_size=3"),
    ({"num_moe_experts": None, "expert_model_parallel_size": 2}, "size=2.*is not set"),
    ({"moe_router_topk": 5}, "moe_router_topk=5.*num_moe_experts=4"),
    ({"moe_router_topk": 1}, "moe_router_topk=1 needs model.moe_router_pre_softmax=True"),
    ({"moe_router_load_balancing_type": "sinkhorn"}, "=sinkhorn .*aux_loss or none"),
    ({"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1}, "has no effect"),
    ({"moe_token_dispatcher_type": "allgather"}, "=allgather .*only alltoall"),
    ({"moe_layer_freq": 0}, "moe_layer_freq=0 must be a whole number from 1 on"),
    ({"moe_layer_freq": [1, 0, 1]}, "list with 1 .experts. or 0 .*num_layers=2"),
    ({"moe_layer_freq": [0, 0]}, "no layer of pipeline stage 0 has experts"),
    ({"moe_layer_freq": 2, **TWO_STAGES}, "pipeline stage 1 has experts with .*freq=2"),
    ({**SHARED, "bias": True}, "moe_shared_expert_intermediate_size=16 needs model.bias=False"),
    ({"moe_shared_expert_gate": True}, "moe_shared_expert_gate=True needs"),
    ({"tensor_model_parallel_size": 2}, "needs model.sequence_parallel=True"),
    ({"tensor_model_parallel_size": 2, "sequence_parallel": True, "bias": True}, "bias=False"),
]


@pytest.mark.parametrize("keys, message", REFUSED)
def test_refused_combinations(tiny_tokenizer_dir, keys, message):
    with pytest.raises(ConfigError, match=message):
        cfg = tiny_config(tiny_tokenizer_dir, **{**MOE, **keys})
        build_transformer_config(complete_model(cfg))


def test_the_former_name_of_the_norm_before_experts_loads(tiny_tokenizer_dir, tmp_path):
    """Without Transformer Engine it once was stored as the norm before an MLP."""
    cfg = tiny_config(tiny_tokenizer_dir, num_moe_experts=2)
    source = MegatronGPTModel(cfg)
    sharded = source.sharded_weights()
    for name, item in sharded["model0"].items():
        if "pre_mlp_layernorm" in name:
            item.data.detach().normal_()
            item.key = item.key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    nemo_archive.write_nemo(tmp_path / "former", source.cfg, sharded, as_directory=True)
    restored = MegatronGPTModel.restore_from(str(tmp_path / "former"))
    pairs = zip(restored._named_weights(), source._named_weights(), strict=True)
    for (name, weight), (_, expected) in pairs:
        assert torch.equal(weight, expected), name
