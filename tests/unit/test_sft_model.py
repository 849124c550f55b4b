# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: loss and gradient against a loop over the tokens of the responses."""

import json

import pytest
import torch

from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel
from tests.data_sets import sft
from tests.tiny_models import assert_gradients_of, tiny_config

LINES = [("the film", "was a joy"), ("a dull", "plot")]
LINES += [("I loved the music", "and the story is warm"), ("x", "y")]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory, tiny_tokenizer):
    path = tmp_path_factory.mktemp("sft") / "data.jsonl"
    path.write_text("".join(json.dumps({"input": i, "output": o}) + "\n" for i, o in LINES))
    return sft(str(path), tiny_tokenizer, {"max_seq_length": 48})


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_loss_and_gradient_equal_a_loop_over_response_tokens(
    tiny_tokenizer_dir, tiny_tokenizer, dataset, architecture, micro_batch_size
):
    # The last slot of the batch is empty.
    batch = dataset.collate_fn([dataset[0], dataset[1], dataset[2], dataset[-1]])
    own = {"architecture": architecture, "micro_batch_size": micro_batch_size}
    cfg = tiny_config(tiny_tokenizer_dir, **own)
    vocab = tiny_tokenizer.vocab_size
    plain = GPTSFTModel(cfg).unwrapped()[0]
    terms = []
    for prompt, response in LINES[:3]:
        prompt = tiny_tokenizer.text_to_ids(prompt)
        ids = prompt + tiny_tokenizer.text_to_ids(" " + response) + [tiny_tokenizer.eos_id]
        logits = plain(torch.tensor([ids]), torch.arange(len(ids))[None], None)[0, :, :vocab]
        for t in range(len(prompt), len(ids)):
            terms.append(-torch.log_softmax(logits[t - 1], -1)[ids[t]])
    expected = sum(terms) / len(terms)
    expected.backward()

    model = GPTSFTModel(cfg)
    model.setup_megatron_optimization(10)
    model.prepare_for_training_step()
    loss, metrics = model.get_loss_and_metrics(batch, forward_only=False)
    assert loss == metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["weights"] == len(terms)
    assert_gradients_of(plain, model)
    model.prepare_for_validation_step()
    assert model.get_loss_and_metrics(batch, forward_only=True)[0] == pytest.approx(loss, rel=1e-6)
    model.finish_validation_step()


@pytest.mark.parametrize("reduction", ["token", "sequence", "microbatch"])
def test_loss_reductions_and_their_weights(tiny_tokenizer_dir, dataset, reduction):
    """Against the loss of each sample alone. Validation weights batches by `weights`, so the mean
    of two batches must be that of both together.
    """
    cfg = tiny_config(tiny_tokenizer_dir, micro_batch_size=1, loss_reduction=reduction)
    model = GPTSFTModel(cfg)
    model.prepare_for_validation_step()
    samples = [dataset[0], dataset[2], dataset[1], dataset[-1]]  # the last one is empty
    batches = [dataset.collate_fn([sample]) for sample in samples]
    alone = [model.get_loss_and_metrics(batch, forward_only=True)[0] for batch in batches]
    lengths = [int(dataset.collate_fn([sample])["loss_mask"].ne(0).sum()) for sample in samples]
    assert lengths[3] == 0 and len(set(lengths)) == 4 and alone[3] == 0
    sums, counts = {
        "token": ([mean * length for mean, length in zip(alone, lengths, strict=True)], lengths),
        "sequence": (alone, [1, 1, 1, 0]),
        "microbatch": (alone, [1, 1, 1, 1]),
    }[reduction]
    for taken in ([0, 1], [2, 3], [0, 1, 2, 3]):
        loss, metrics = model.get_loss_and_metrics(
            dataset.collate_fn([samples[i] for i in taken]), forward_only=True
        )
        count = sum(counts[i] for i in taken)
        assert metrics["weights"] == count
        assert loss == pytest.approx(sum(sums[i] for i in taken) / count, rel=1e-5)
    model.finish_validation_step()
