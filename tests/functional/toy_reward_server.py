# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Reward servers for tests: real Triton processes around a sum, and the handles that tests kill
and restart.

The process imports neither torch nor NeMo, so that it restarts within seconds. Its reward of a
sample is `scale * (sum of the real tokens) + 0.001 * number of prompt tokens`. A sample starting
with one of the ids below makes it fail on purpose.
"""

import sys
import time

import numpy as np

from tests.functional.triton_process import TritonProcess, running_triton

RAISE, NAN, SLEEP = 901, 902, 905


def expected_rewards(tokens, lengths, prompts=None, scale=1.0):
    """Rewards float32 [N, 1], sample by sample in plain Python."""
    rewards = []
    for row in range(len(tokens)):
        total = scale * sum(int(tokens[row][i]) for i in range(int(lengths[row])))
        rewards.append([total + (0.001 * int(prompts[row]) if prompts is not None else 0.0)])
    return np.array(rewards, np.float32)


def serve(port: int, scale: float, delay_s: float, count_file: str, endpoint_name: str) -> None:
    """Serve until SIGTERM. Each call of the model adds a line with its number of rows to
    `count_file`.
    """
    from pytriton.decorators import batch, group_by_keys
    from pytriton.model_config import DynamicBatcher, ModelConfig

    from nemo_aligner.servers.schema import reward_model_endpoint, triton_tensors

    def infer(tokens, sequence_lengths, prompt_lengths=None):
        first = set(tokens[:, 0].tolist())
        if RAISE in first:
            raise ArithmeticError("the toy met a token it cannot stand")
        if SLEEP in first:
            time.sleep(60)
        time.sleep(delay_s)
        with open(count_file, "a") as file:
            file.write(f"{len(tokens)}\n")
        rewards = expected_rewards(tokens, sequence_lengths[:, 0], None, scale)
        if prompt_lengths is not None:
            rewards = rewards + np.float32(0.001) * prompt_lengths.astype(np.float32)
        if NAN in first:
            rewards[-1] = np.nan
        return {"rewards": rewards.astype(np.float32)}

    endpoint = reward_model_endpoint()
    with running_triton(port) as triton:
        triton.bind(
            model_name=endpoint_name,
            infer_func=group_by_keys(batch(lambda **arrays: infer(**arrays))),
            inputs=triton_tensors(endpoint.inputs),
            outputs=triton_tensors(endpoint.outputs),
            config=ModelConfig(batching=True, max_batch_size=9999, batcher=DynamicBatcher()),
            strict=False,
        )


class ToyRewardServer(TritonProcess):
    """A server on a port of its own that can be killed and started again. Leaving the `with` block
    ends it.

    Args:
        scale: factor of its rewards.
        delay_s: how long each call takes.
        start: False leaves it dead at first.
    """

    def __init__(
        self,
        scale: float = 1.0,
        delay_s: float = 0.0,
        endpoint: str = "reward_model",
        start: bool = True,
    ):
        super().__init__(endpoint)
        self.scale, self.delay_s = scale, delay_s
        self.count_file = self.directory / "count.txt"
        self.count_file.touch()
        if start:
            self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the process, without waiting until it is ready."""
        arguments = [self.port, self.scale, self.delay_s, self.count_file, self.model]
        self.run_python(__file__, *map(str, arguments))

    def kill_python(self) -> list:
        """SIGKILL to the Python process alone; returns the others, which hold the port for some
        more seconds.
        """
        others = self.family()[1:]
        self.process.kill()
        self.process.wait(10)
        return others

    def rows(self) -> list:
        """Number of rows of each call of the model, over all its lives."""
        return [int(line) for line in self.count_file.read_text().split()]


if __name__ == "__main__":
    port_, scale_, delay_, count_file_, endpoint_ = sys.argv[1:]
    serve(int(port_), float(scale_), float(delay_), count_file_, endpoint_)
