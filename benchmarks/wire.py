# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What a request to the critic server costs, behind each front, beside a bare HTTP POST of as
many bytes.

    OMP_NUM_THREADS=1 python benchmarks/wire.py

A critic job whose model does nothing is called as an actor calls it, from the batch of tensors to
the checked reply: `critic_infer` of [64, 1024], and `critic_train` of [512, 1024], 10.5 MB. A bare
server in another process reads the same bytes over a new connection and replies with as many as
the critic. The calls take turns. CPU seconds are those of all processes, client and server.
"""

import argparse
import functools
import http.client
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import measure

from nemo_aligner.config.server_rules import FRONTENDS
from nemo_aligner.servers.ports import find_free_port

SCORED, TRAINED, COLUMNS, VOCABULARY = 64, 512, 1024, 32000


# ---- the servers, each in a process of its own ----


def serve_critic(port: int, frontend: str) -> None:
    """A critic job of one rank; its model gives zeros and its optimizer does nothing."""
    import torch
    from omegaconf import OmegaConf

    from nemo_aligner.algorithms.critic_server_trainer import CriticServerTrainer
    from nemo_aligner.parallel.device import keep_freed_memory

    keep_freed_memory()  # as every job does

    class Nothing:
        """Model, optimizer, schedule, logger and checkpoints."""

        cfg = {"encoder_seq_length": COLUMNS}
        config = type("Config", (), {"clip_grad": 0.0})()
        param_groups = [{"lr": 0.0}]

        def infer_rm_critic(self, inputs):
            tokens, _lengths = inputs
            return torch.zeros(len(tokens), 1), torch.zeros(tokens.shape)

        def get_loss_and_metrics(self, batch, forward_only):
            return 0.0, {}

        def step(self, **_increment):
            return True, 0.0, None

        def saved_at(self, _counter):
            return {}

        def custom_save(self, *_args, trainer_state=None):
            """Save nothing."""

        def _nothing(self, *_args, **_named):
            """Prepare or finish a phase, zero gradients, log metrics."""

        prepare_for_inference = finish_inference = prepare_for_training = finish_training = (
            _nothing
        )
        prepare_for_training_step = finish_training_step = zero_grad = _nothing
        log_metrics = log_samples = _nothing

    nothing: Any = Nothing()
    CriticServerTrainer(
        cfg=OmegaConf.create(
            {
                "host": "127.0.0.1",
                "port": port,
                "combine_rm_and_critic_server": True,
                "alarms": {"replica_check_interval": 0},
            }
        ),
        model=nothing,
        optimizer=nothing,
        scheduler=nothing,
        logger=nothing,
        ckpt_callback=nothing,
        tokenize_func=nothing._nothing,
        gbs=TRAINED,
        model_forward_micro_batch_size=SCORED,
        server=OmegaConf.create({"frontend": frontend}),
    ).run_server()


def serve_bare(port: int) -> None:
    """Read the body of each POST, and reply with as many bytes as its path says."""
    buffer = bytearray(2**20)
    with socket.create_server(("127.0.0.1", port)) as server:
        while True:
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as stream:
                size = int(stream.readline().split()[1].strip(b"/"))
                left = 0
                while line := stream.readline().strip():
                    if line.lower().startswith(b"content-length:"):
                        left = int(line.split(b":")[1])
                while left:
                    left -= stream.readinto1(memoryview(buffer)[:left])
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode()
                connection.sendall(head + bytes(size))


# ---- the client ----


def post(port: int, body: bytes, reply_size: int) -> None:
    """A bare POST over a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", f"/{reply_size}", body)
    assert len(connection.getresponse().read()) == reply_size
    connection.close()


def cpu_seconds(processes: list[subprocess.Popen[bytes]]) -> float:
    """CPU seconds that these processes and their descendants have used."""
    return sum(measure.tree_cpu_seconds(process.pid) for process in processes)


def take_turns(
    calls: dict[str, tuple[Callable[[], object], list[subprocess.Popen[bytes]]]], repeats: int
) -> dict[str, dict[str, float]]:
    """Call the functions in turns, each with the servers that it uses.

    Returns:
        By name: the median of the seconds of a call ("wall_s"), the mean of the CPU seconds of
        this process and those servers ("cpu_s"), whose clock is too coarse for one call, and the
        share of the machine's cores that everybody else kept busy meanwhile ("others").
    """
    walls: dict[str, list[float]] = {name: [] for name in calls}
    used = {name: -cpu_seconds(servers) for name, (_call, servers) in calls.items()}
    busy, began = measure.busy_seconds(), time.perf_counter()
    for _ in range(repeats):
        for name, (call, _servers) in calls.items():
            start, cpu = time.perf_counter(), time.process_time()
            call()
            walls[name].append(time.perf_counter() - start)
            used[name] += time.process_time() - cpu
    for name, (_call, servers) in calls.items():
        used[name] += cpu_seconds(servers)
    capacity = (time.perf_counter() - began) * (os.cpu_count() or 1)
    others = max(measure.busy_seconds() - busy - sum(used.values()), 0.0) / capacity
    return {
        name: {
            "wall_s": statistics.median(walls[name]),
            "cpu_s": used[name] / repeats,
            "others": others,
        }
        for name in calls
    }


def compare(
    front: str, ports: dict[str, int], processes: dict[str, Any], repeats: int
) -> list[dict]:
    """Both endpoints behind a front, beside a bare POST of the same bytes."""
    import torch
    from omegaconf import OmegaConf

    from nemo_aligner.parallel.device import keep_freed_memory
    from nemo_aligner.servers.critic_client import RemoteGPTRMCriticClient

    keep_freed_memory()  # as every job does
    section = {
        "pad_to_length": None,
        "combine_rm_and_critic_server": True,
        "critic": {"ip": "127.0.0.1", "port": ports[front]},
        "init_timeout_s": 120,
    }
    client = RemoteGPTRMCriticClient(OmegaConf.create(section))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (TRAINED, COLUMNS), generator=generator)
    numbers = torch.randn(TRAINED, COLUMNS - 1, generator=generator)
    rollout = {
        "response_tokens": tokens[:SCORED],
        "response_lengths": torch.full((SCORED,), COLUMNS),
        "prompt_lengths": torch.full((SCORED,), 32),
    }
    batch = {
        "response_tokens": tokens,
        "returns": numbers,
        "values": numbers,
        "mask": torch.ones_like(numbers),
        "sample_order": torch.randperm(TRAINED, generator=generator),
    }
    scores = 4 * SCORED * (COLUMNS + 1)
    sizes = {  # of the request and of the reply
        "critic_infer": (8 * SCORED * (COLUMNS + 1), scores),
        "critic_train": (8 * tokens.numel() + 3 * 4 * numbers.numel(), 4),
    }
    calls = {
        "critic_infer": lambda: client.infer_rm_critic(rollout).result(),
        "critic_train": lambda: client.train(batch).result(),
    }
    rows = []
    for name, call in calls.items():
        request, reply = sizes[name]
        bare = functools.partial(post, ports["bare"], os.urandom(request), reply)
        pair = {name: (call, [processes[front]]), "bare": (bare, [processes["bare"]])}
        take_turns(pair, 3)  # the first calls are slower
        found = take_turns(pair, repeats)
        ours, plain = found[name], found["bare"]
        busy = ours["others"]
        rows.append(
            {
                "call": name,
                "front": front,
                "MB": round((request + reply) / 1e6, 2),
                "CPU ms": round(1e3 * ours["cpu_s"], 1),
                "bare, CPU ms": round(1e3 * plain["cpu_s"], 1),
                "times, CPU": round(ours["cpu_s"] / plain["cpu_s"], 1),
                "clock ms": round(1e3 * ours["wall_s"], 1),
                "bare, clock ms": round(1e3 * plain["wall_s"], 1),
                "times, clock": round(ours["wall_s"] / plain["wall_s"], 1),
                "others": f"{busy:.0%}",
            }
        )
    client.communicator.close()
    return rows


def main() -> None:
    parser = measure.arguments(__doc__, repeats=60)
    parser.add_argument("--serve", choices=[*FRONTENDS, "bare"], help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        if args.serve == "bare":
            serve_bare(args.port)
        else:
            serve_critic(args.port, args.serve)
        return
    ports = {name: find_free_port() for name in (*FRONTENDS, "bare")}
    processes: dict[str, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryFile() as log:
        try:
            for name, port in ports.items():
                command = [sys.executable, __file__, "--serve", name, "--port", str(port)]
                processes[name] = subprocess.Popen(command, stdout=log, stderr=log)
            rows = [
                row
                for front in FRONTENDS
                for row in compare(front, ports, processes, args.repeats)
            ]
        except BaseException:
            log.seek(0)
            sys.stderr.buffer.write(log.read()[-4000:])
            raise
        finally:
            for process in processes.values():
                process.terminate()
            for process in processes.values():
                process.wait(30)
    measure.report("wire", "Requests to the critic server, beside a bare POST", rows, args.json)


if __name__ == "__main__":
    main()
