# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A critic server with exactly the endpoints of NeMo-Aligner's, for tests: real Triton processes
around a small critic in numpy.

The endpoints' tensors, their batching and their padding are those of NeMo-Aligner 0.7.0. None of
this package's additions is there (`tokenizer`, `request_id`, `actor_step`, `critic_status`). The
process imports neither torch nor NeMo, so that it starts within seconds.

The critic is that of critic_job.py in numpy: the value at t is the mean embedding of the tokens up
to t, times a vector; an update is one SGD step on the squared error per global batch, averaged
over the masked transitions. The reward of a sample is a number per token id, of its last token.
"""

import json
import sys
from pathlib import Path

import numpy as np

from tests.functional.triton_process import TritonProcess, running_triton

VOCAB, WIDTH, RATE = 32, 8, 0.1
RAISE = 30  # a token id that makes training fail


def initial_weights():
    """Embedding [VOCAB, WIDTH], vector [WIDTH] and rewards by token id [VOCAB]."""
    random = np.random.RandomState(0)
    normal = lambda *shape: random.standard_normal(shape).astype(np.float32)
    return normal(VOCAB, WIDTH), normal(WIDTH), normal(VOCAB)


class NumpyCritic:
    """The model behind the endpoints; token ids count modulo VOCAB."""

    def __init__(self):
        self.embedding, self.vector, self.rewards = initial_weights()
        self.updates = 0

    def features(self, tokens):
        """Mean embedding up to each position, [N, S, WIDTH]."""
        positions = np.arange(1, tokens.shape[1] + 1)[None, :, None]
        return self.embedding[tokens % VOCAB].cumsum(1) / positions

    def update(self, tokens, returns, mask):
        """One step on a global batch; returns its loss."""
        if (tokens == RAISE).any():
            raise ArithmeticError("the critic met a token it cannot stand")
        features = self.features(tokens)[:, :-1]
        mask = mask.astype(bool)
        error = np.where(mask, features @ self.vector - returns, 0.0)
        loss = (error**2).sum() / mask.sum()
        error *= 2 / mask.sum()
        # The gradient of the mean embedding at t, spread over the tokens up to t.
        positions = np.arange(1, tokens.shape[1])[None, :]
        per_token = np.cumsum((error / positions)[:, ::-1], axis=1)[:, ::-1]
        gradient = np.zeros_like(self.embedding)
        np.add.at(gradient, tokens[:, :-1] % VOCAB, per_token[..., None] * self.vector)
        self.vector -= RATE * np.einsum("ns,nsw->w", error, features)
        self.embedding -= RATE * gradient
        self.updates += 1
        return loss


def serve(port: int, combined: bool, gbs: int, record: Path) -> None:
    """Serve until SIGTERM; each request adds a line to `record`: endpoint, and dtype and shape by
    input name.
    """
    from pytriton.decorators import batch, sample
    from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor

    critic = NumpyCritic()

    def note(endpoint, inputs):
        forms = {name: [array.dtype.name, list(array.shape)] for name, array in inputs.items()}
        with record.open("a") as file:
            file.write(json.dumps([endpoint, forms]) + "\n")

    @batch
    def infer(**inputs):
        note("critic_infer", inputs)
        tokens, lengths = inputs["tokens"], inputs["sequence_lengths"]
        outputs = {"values": (critic.features(tokens) @ critic.vector).astype(np.float32)}
        if combined:
            last = np.take_along_axis(tokens, lengths - 1, axis=1)
            outputs["rewards"] = critic.rewards[last % VOCAB]
        return outputs

    @sample
    def train(**inputs):
        note("critic_train", inputs)
        # Empty samples up to a multiple of the global batch, with mask 0.
        extra = -len(inputs["tokens"]) % gbs
        padded = {k: np.pad(v, [(0, extra), (0, 0)]) for k, v in inputs.items()}
        for first in range(0, len(padded["tokens"]), gbs):
            rows = slice(first, first + gbs)
            loss = critic.update(*(padded[k][rows] for k in ("tokens", "returns", "mask")))
        return {"loss_mean": np.array((loss,))}

    @sample
    def save(**inputs):
        note("critic_save", inputs)
        np.savez(record.with_suffix(".npz"), embedding=critic.embedding, vector=critic.vector)
        return {"status": np.array((0,), dtype=np.int32)}

    scoring = [
        Tensor(name="sentences", shape=(-1,), dtype=bytes, optional=True),
        Tensor(name="tokens", shape=(-1,), dtype=np.int64, optional=True),
        Tensor(name="sequence_lengths", shape=(-1,), dtype=np.int64, optional=True),
    ]
    outputs = [Tensor(name="values", shape=(-1,), dtype=np.float32)]
    if combined:
        outputs.append(Tensor(name="rewards", shape=(-1,), dtype=np.float32))
    training = [Tensor(name="tokens", shape=(-1, -1), dtype=np.int64)] + [
        Tensor(name=name, shape=(-1, -1), dtype=np.float32)
        for name in ("returns", "prev_values", "mask")
    ]
    one_by_one = ModelConfig(batching=False, max_batch_size=0, batcher=None)
    batcher = DynamicBatcher(max_queue_delay_microseconds=2000, preferred_batch_size=[4])
    merged = ModelConfig(batching=True, max_batch_size=9999999, batcher=batcher)
    loss = [Tensor(name="loss_mean", shape=(1,), dtype=np.float32)]
    dummy = [Tensor(name="dummy_var", shape=(1,), dtype=np.int64)]
    status = [Tensor(name="status", shape=(1,), dtype=np.int64)]
    with running_triton(port) as triton:
        triton.bind("critic_infer", infer, scoring, outputs, config=merged)
        triton.bind("critic_train", train, training, loss, config=one_by_one)
        triton.bind("critic_save", save, dummy, status, config=one_by_one)


class NeMoAlignerCritic(TritonProcess):
    """The critic server of this file.

    Args:
        combined: it also gives rewards.
        gbs: samples of one update.
    """

    def __init__(self, combined: bool = True, gbs: int = 4):
        super().__init__("critic_save")
        self.record = self.directory / "requests.jsonl"
        self.record.touch()
        self.run_python(__file__, str(self.port), str(int(combined)), str(gbs), str(self.record))

    def requests(self) -> list:
        """Each request so far: endpoint, and {input: [dtype, shape]}."""
        return [json.loads(line) for line in self.record.read_text().splitlines()]


if __name__ == "__main__":
    port_, combined_, gbs_, record_ = sys.argv[1:]
    serve(int(port_), bool(int(combined_)), int(gbs_), Path(record_))
