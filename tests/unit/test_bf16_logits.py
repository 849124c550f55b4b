# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A bf16 policy makes no float32 copy of its logits, and its log-probs in training are those of
inference to the bit.
"""

import torch

from benchmarks.logprob_memory import peak_bytes
from nemo_aligner.models.nlp.gpt import log_probs
from nemo_aligner.models.nlp.gpt.megatron_gpt_ppo_actor import MegatronGPTActorModel
from nemo_aligner.parallel.vocab_parallel import from_parallel_logits_to_logprobs
from tests.tiny_models import PPO, tiny_config

ROWS, WIDTH, VOCABULARY = 4, 40, 16384  # the tokenizer's few hundred ids, and padding


def test_bf16_logits_without_a_float32_copy(tiny_tokenizer_dir, monkeypatch):
    own = {"ppo": {**PPO, "forward_micro_batch_size": ROWS}, "micro_batch_size": ROWS}
    own |= {"precision": "bf16", "make_vocab_size_divisible_by": VOCABULARY}
    cfg = tiny_config(tiny_tokenizer_dir, **own)
    actor = MegatronGPTActorModel(cfg)
    actor.set_reference_policy()
    torch.manual_seed(0)
    tokens = torch.randint(0, actor.tokenizer.vocab_size, (ROWS, WIDTH))
    (model,) = actor.model
    positions = torch.arange(WIDTH).expand_as(tokens)
    actor.set_eval()
    with torch.no_grad():
        copied = model(tokens, positions, None)  # Megatron's default
    logprobs = actor.get_inference_log_probs(tokens)
    assert copied.dtype == torch.float32
    own = {"vocab_size": actor.tokenizer.vocab_size}
    assert torch.equal(logprobs, from_parallel_logits_to_logprobs(copied, tokens, True, **own))
    # Step 0: the KL is exactly 0.
    assert torch.equal(actor.get_init_policy_logprobs(tokens), logprobs)

    size = copied.nbytes // 2  # of the bf16 logits
    del copied
    assert size <= peak_bytes(lambda: actor.get_inference_log_probs(tokens)) < 1.5 * size

    actor.setup_megatron_optimization(max_steps=10)
    seen = []
    score = log_probs.logprobs_and_entropy

    def recorded(logits, tokens, **options):
        results = score(logits, tokens, **options)
        seen.append((logits.dtype, results[0].detach()))
        return results

    monkeypatch.setattr(log_probs, "logprobs_and_entropy", recorded)
    actor.prepare_for_training_step()
    ones = torch.ones(ROWS, WIDTH - 1)
    batch = {"response_tokens": tokens, "is_end": torch.ones(ROWS, dtype=torch.bool)}
    batch |= {"mask": ones, "advantages": ones, "prev_logprobs": logprobs}
    peak = peak_bytes(lambda: actor.get_loss_and_metrics(batch))
    ((dtype, in_training),) = seen
    assert dtype == torch.bfloat16 and torch.equal(in_training, logprobs)  # the ratio is exactly 1
    # The gradient takes the place of the logits. With a copy: of that copy (2 sizes), and it is
    # cast (1).
    assert size <= peak < 2.5 * size
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert all(parameter.main_grad.isfinite().all() for parameter in trained)
