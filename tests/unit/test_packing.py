# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Packed SFT sequences: the packs, their batches, and loss and gradient against the examples one
by one; and how the losses of examples, packed or not, become one.
"""

import itertools
import json
import random

import pytest
import torch

from nemo_aligner.core.tensors import one_row_per_sample
from nemo_aligner.data.nlp.sft import PackedDataset, pack
from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel
from nemo_aligner.parallel.device import get_device
from tests.cases import some_of
from tests.data_sets import sft
from tests.tiny_models import NORMS_AFTER, assert_gradients_of, tiny_config

LINES = [("the film", "was a joy"), ("a dull", "plot"), ("I loved the music", "and the story")]
LINES += [("x", "y"), ("", "z"), ("a warm evening with old friends", "ends"), ("b", "cc")]


@pytest.fixture(scope="module")
def build(tmp_path_factory, tiny_tokenizer):
    path = tmp_path_factory.mktemp("sft") / "data.jsonl"
    path.write_text("".join(json.dumps({"input": i, "output": o}) + "\n" for i, o in LINES))

    def make(**section):
        section = {"max_seq_length": 48, **section}
        return sft(str(path), tiny_tokenizer, section, allow_empty_prompt=True)

    return make


# --- which examples make a pack ---


def test_packs_hold_every_example_once_and_are_full():
    rng = random.Random(0)
    slots = [rng.choice([1, 2, rng.randint(1, 64), 64]) for _ in range(3000)]
    packs = pack(slots, 64)
    assert sorted(itertools.chain(*packs)) == list(range(3000))
    fill = [sum(slots[number] for number in each) for each in packs]
    assert max(fill) == 64 and sum(fill) / (64 * len(packs)) > 0.97
    assert packs == pack(slots, 64)
    assert all(each == sorted(each) for each in packs)
    assert [each[0] for each in packs] == sorted(each[0] for each in packs)
    # No example could have been put into an earlier pack with less room.
    naive: list[list[int]] = []
    for number, needed in enumerate(slots[:401]):
        room = [64 - sum(slots[i] for i in each) for each in naive]
        fits = [(left, which) for which, left in enumerate(room) if left >= needed]
        naive[min(fits)[1]].append(number) if fits else naive.append([number])
    assert pack(slots[:401], 64) == naive


# --- batches ---


def test_a_batch_by_hand(build, tiny_tokenizer):
    packed, plain = build(packed_sequence=True), build()
    assert isinstance(packed, PackedDataset)
    lengths = [len(plain[n]["tokens"]) for n in range(len(LINES))]
    assert packed.dataset.lengths.tolist() == lengths
    assert packed.packs == pack([n - 1 for n in lengths], 48)
    batch = packed.collate_fn([packed[n] for n in range(len(packed))])
    width = batch["tokens"].size(1)
    assert width % 16 == 0 and width <= 48
    for row, numbers in enumerate(packed.packs):
        expected = {"tokens": [], "labels": [], "loss_mask": [], "packed_position_ids": []}
        for number in numbers:
            tokens, start = plain[number]["tokens"], plain[number]["trained"].count(False)
            expected["tokens"] += tokens[:-1]
            expected["labels"] += tokens[1:]
            expected["loss_mask"] += [float(t + 1 >= start) for t in range(len(tokens) - 1)]
            expected["packed_position_ids"] += range(len(tokens) - 1)
        used = len(expected["tokens"])
        for key, values in expected.items():
            assert batch[key][row, :used].tolist() == values, key
        assert batch["loss_mask"][row, used:].sum() == 0
        assert batch["packed_position_ids"][row, used:].tolist() == list(range(width - used))
    wide = build(packed_sequence=True, pad_to_max_length=True)
    assert wide.collate_fn([wide[0]])["tokens"].shape == (1, 48)
    empty = packed[-1]
    assert packed.collate_fn([empty])["loss_mask"].sum() == 0
    batches = [packed.collate_fn([pack])["tokens"] for pack in (empty, packed[0])]
    assert batches[0].equal(batches[1])


def test_blends_and_limits_are_packed(build, tmp_path):
    path = tmp_path / "other.jsonl"
    path.write_text('{"input": "q", "output": "r"}\n' * 9)
    first = build(packed_sequence=True)
    files = [0.5, str(first.dataset.lines.paths[0]), 0.5, str(path)]
    both, blend = build(file_path=files), build(file_path=files, packed_sequence=True)
    tokens = [example["tokens"] for n in range(len(blend)) for example in blend[n]["examples"]]
    assert sorted(tokens) == sorted(both[n]["tokens"] for n in range(len(both)))


# --- loss and gradient ---


RECOMPUTED = {"granularity": "full", "method": "uniform", "num_layers": 1}
SELECTIVE = {"activations_checkpoint_granularity": "selective"}
ARCHITECTURES = {
    "gpt2": {"architecture": "gpt2"},
    "llama": {},
    "window": {"window_size": [3, 0]},
    "norms after": NORMS_AFTER | {"attn_logit_softcapping": 0.5},
    "beside": {"parallel_attention": True},
    "recomputed": {f"activations_checkpoint_{key}": x for key, x in RECOMPUTED.items()},
    "selective": SELECTIVE,
    "modules": {
        **SELECTIVE,
        "mcore_customization_config": {"recompute_modules": ["core_attn", "mlp"]},
    },
}


@some_of("reduction", ["token", "sequence"], keep=["sequence"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loss_and_gradient_are_those_of_the_examples_alone(
    tiny_tokenizer_dir, tiny_tokenizer, build, architecture, reduction
):
    """Against a loop over the examples with the bare model; two packs to a micro-batch."""
    packed, plain = build(packed_sequence=True), build()
    own = {"micro_batch_size": 2, "loss_reduction": reduction, **ARCHITECTURES[architecture]}
    cfg = tiny_config(tiny_tokenizer_dir, **own)
    vocab = tiny_tokenizer.vocab_size
    reference = GPTSFTModel(cfg).unwrapped()[0]
    losses = []
    for number in range(len(LINES)):
        ids, start = plain[number]["tokens"], plain[number]["trained"].count(False)
        tokens = torch.tensor([ids], device=get_device())
        positions = torch.arange(len(ids), device=get_device())[None]
        logits = reference(tokens, positions, None)[0, :, :vocab]
        predicted = range(max(start, 1), len(ids))
        own = [-torch.log_softmax(logits[t - 1], -1)[ids[t]] for t in predicted]
        losses.append(torch.stack(own))
    means = losses if reduction == "token" else [loss.mean()[None] for loss in losses]
    expected = torch.cat(means).mean()
    expected.backward()

    packs = [packed[n] for n in range(len(packed))]
    packs += [packed[-1]] * (-len(packs) % 2)  # an empty slot
    assert max(len(each) for each in packed.packs) > 1
    model = GPTSFTModel(cfg)
    model.setup_megatron_optimization(10)
    model.prepare_for_training_step()
    loss, metrics = model.get_loss_and_metrics(packed.collate_fn(packs), forward_only=False)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["weights"] == sum(len(each) for each in means)
    assert_gradients_of(reference, model, rtol=1e-5)
    model.prepare_for_validation_step()
    again, _ = model.get_loss_and_metrics(packed.collate_fn(packs), forward_only=True)
    assert again == pytest.approx(loss, rel=1e-6)
    model.finish_validation_step()


def test_rows_of_the_samples_of_a_pack():
    mask = torch.tensor([[1.0, 0, 1, 1, 1], [0.0, 1, 1, 0, 1]])
    positions = torch.tensor([[0, 1, 0, 1, 2], [0, 0, 1, 2, 0]])
    rows = [[1, 0, 0, 0, 0], [0, 0, 1, 1, 1], [0] * 5, [0] * 5, [0, 1, 1, 0, 0], [0, 0, 0, 0, 1]]
    assert one_row_per_sample(mask, positions).tolist() == rows


@pytest.mark.parametrize("reduction", ["token", "sequence", "microbatch"])
def test_loss_reductions_and_their_weights(tiny_tokenizer_dir, build, reduction):
    """Against the loss of each sample alone. Validation weights batches by `weights`, so the mean
    of two batches must be that of both together.
    """
    cfg = tiny_config(tiny_tokenizer_dir, micro_batch_size=1, loss_reduction=reduction)
    model, dataset = GPTSFTModel(cfg), build()
    model.prepare_for_validation_step()
    samples = [dataset[0], dataset[3], dataset[1], dataset[-1]]  # the last one is empty
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
