# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A critic server job around a small torch model, for tests: the program, and the tests' handle.

The model is real (it scores, learns and saves) but takes no time to build: these tests are about
the server. Some token ids make it fail or sleep on purpose, on the ranks that get them.
"""

import contextlib
import glob
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from functools import partialmethod
from pathlib import Path

import psutil

from nemo_aligner.servers.ports import find_free_port
from tests.patience import Deadline, patience, wait_until
from tests.processes import family, kill_all, left_of
from tests.warm_start import start_python

VOCAB, WIDTH = 32, 8
# Ids that make the model raise (ranks without it then wait in a collective), sleep a minute, or
# half a second.
RAISE, SLEEP, NAP = 30, 28, 29


class TinyTokenizer:
    """The part of a tokenizer that the server uses; each id is a word of its own."""

    vocab_size, eos_id = VOCAB, 0

    @staticmethod
    def ids_to_tokens(ids):
        return [f"word{id_}" for id_ in ids]


def build_model():
    """The critic and reward model, the same in every process."""
    import torch

    def sum_over_ranks(tensor):
        from nemo_aligner.parallel import parallel_state

        if parallel_state.get_data_parallel_world_size() > 1:
            group = parallel_state.get_data_parallel_group()
            torch.distributed.all_reduce(tensor, group=group)
        return tensor

    class TinyCritic(torch.nn.Module):
        """Value at t from the mean embedding of tokens <= t; reward from the last token.

        Padding changes neither.
        """

        cfg = {"encoder_seq_length": 64}

        def __init__(self):
            super().__init__()
            generator = torch.Generator().manual_seed(0)
            self.embedding = torch.nn.Parameter(torch.randn(VOCAB, WIDTH, generator=generator))
            self.value = torch.nn.Parameter(torch.randn(WIDTH, generator=generator))
            self.register_buffer("reward", torch.randn(VOCAB, generator=generator))
            self.prepared = None
            self.vocabulary = VOCAB
            self.tokenizer = TinyTokenizer

        def forward(self, tokens):
            positions = torch.arange(1, tokens.shape[1] + 1)[None, :, None]
            return (self.embedding[tokens].cumsum(1) / positions) @ self.value

        def misbehave(self, tokens):
            if (tokens == SLEEP).any():
                print("the model met SLEEP", flush=True)
                time.sleep(60)
            if (tokens == NAP).any():
                print("the model met NAP", flush=True)
                time.sleep(0.5)
            if (tokens == RAISE).any():
                raise ArithmeticError("the model met a token it cannot stand")
            if torch.distributed.is_initialized():
                torch.distributed.barrier()

        def switch(self, before, after):
            assert self.prepared == before, f"prepared for {self.prepared}, expected {before}"
            self.prepared = after

        prepare_for_inference = partialmethod(switch, None, "inference")
        finish_inference = partialmethod(switch, "inference", None)
        prepare_for_training = partialmethod(switch, None, "training")
        prepare_for_training_step = partialmethod(switch, "training", "step")

        def finish_training(self):
            if self.prepared == "step":  # the step was given up
                self.prepared = "training"
            self.switch("training", None)

        def finish_training_step(self):
            self.switch("step", "training")
            for parameter in self.parameters():
                sum_over_ranks(parameter.grad)

        @torch.no_grad()
        def infer(self, inputs):
            assert self.prepared == "inference"
            tokens, _lengths = inputs
            self.misbehave(tokens)
            return self(tokens)

        @torch.no_grad()
        def infer_rewards(self, inputs):
            assert self.prepared == "inference"
            tokens, lengths = inputs
            self.misbehave(tokens)
            return self.reward[tokens.gather(1, lengths[:, None] - 1)]

        @torch.no_grad()
        def infer_rm_critic(self, inputs):
            tokens, lengths = inputs
            values = self.infer(inputs)
            return self.reward[tokens.gather(1, lengths[:, None] - 1)], values

        def get_loss_and_metrics(self, batch, forward_only=False):
            """Squared error averaged over the response tokens of the global batch; empty slots may
            hold NaN.
            """
            assert self.prepared == "step"
            self.misbehave(batch["tokens"])
            mask = batch["mask"] > 0
            count = sum_over_ranks(batch["mask"].sum())
            errors = torch.where(mask, self(batch["tokens"])[:, :-1] - batch["returns"], 0.0)
            loss = (errors**2).sum() / count
            loss.backward()
            return float(sum_over_ranks(loss.detach().clone())), {}

    return TinyCritic()


def build_optimizer(model):
    """Return (optimizer, scheduler) with Megatron's interface: SGD with a fixed rate."""
    import torch

    class Optimizer(torch.optim.SGD):
        config = type("Config", (), {"clip_grad": 0.0})()

        def step(self):
            super().step()
            return True, 1.0, None

    class Scheduler:
        def step(self, increment):
            pass

    return Optimizer([model.embedding, model.value], lr=0.1), Scheduler()


def main() -> None:
    """One rank of the job. Settings come as JSON in the first argument."""
    settings = json.loads(sys.argv[1])
    import numpy as np
    from omegaconf import OmegaConf

    from nemo_aligner.parallel import parallel_state

    parallel_state.initialize(tensor_model_parallel_size=1)

    from nemo_aligner.algorithms.critic_server_trainer import CriticServerTrainer
    from nemo_aligner.core.errors import SaveError
    from nemo_aligner.parallel.collectives import gathered
    from nemo_aligner.servers import requests, server_loop, triton_host

    class Logger:
        def log_metrics(self, metrics, step):
            if parallel_state.get_rank() == 0:
                with open(settings["metrics"], "a") as file:
                    file.write(json.dumps({"step": step, **metrics}) + "\n")

        def log_samples(self, name, rows, step):
            """Keep nothing: the times of phases are not looked at here."""

    class Checkpoint:
        def custom_save(self, monitor_candidates, is_train_end, trainer_state):
            # SIGTERM must end a forked writer, and the server must not take it for its own.
            writer = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            writer.start()
            time.sleep(0.2)
            writer.terminate()
            writer.join(patience(10))
            assert writer.exitcode == -signal.SIGTERM, writer.exitcode
            print("the checkpoint is being written", flush=True)
            self.state = trainer_state
            self.thread = threading.Thread(target=time.sleep, args=(settings["save_s"],))
            self.thread.start()
            if not settings["background"]:
                self.finish_save()

        thread = None

        @property
        def is_saving(self):
            return self.thread is not None

        def check_save(self):
            if self.is_saving and not any(gathered(self.thread.is_alive())):
                self.finish_save()

        def finish_save(self):
            if self.is_saving:
                self.thread.join()
                self.thread = None
                if Path(settings["checkpoint"] + ".full").exists():
                    raise SaveError("no space left for the checkpoint")
                if parallel_state.get_rank() == 0:
                    Path(settings["checkpoint"]).write_text(json.dumps(self.state))

        def load_at(self, counter, count):
            """The counters of a checkpoint without weights: these tests are about the server."""
            state = json.loads(Path(settings["checkpoint"]).read_text())
            if state[counter] != count:
                raise ValueError(f"no checkpoint of {counter}={count}")
            return state

        def saved_at(self, counter):
            file = Path(settings["checkpoint"])
            return {json.loads(file.read_text())[counter]: str(file)} if file.exists() else {}

    def tokenize(sentences):
        rows = [list(text.encode())[:8] for text in sentences]
        tokens = np.array([[b % VOCAB for b in row] + [0] * (8 - len(row)) for row in rows])
        return tokens, np.array([len(row) for row in rows])

    class MinimalCheckpoint:
        """What NeMo-Aligner's interface asks of it."""

        def custom_save(self, monitor_candidates, is_train_end=False):
            if parallel_state.get_rank() == 0:
                Path(settings["checkpoint"] + ".minimal").write_text(
                    str(monitor_candidates["step"].item())
                )

    model = build_model()
    optimizer, scheduler = build_optimizer(model)
    logger, checkpoint = Logger(), Checkpoint()
    if settings["minimal"]:
        del Logger.log_samples
        checkpoint = MinimalCheckpoint()
    parts = {"cfg": OmegaConf.create(settings["cfg"]), "model": model, "optimizer": optimizer}
    parts |= {"scheduler": scheduler, "logger": logger, "ckpt_callback": checkpoint}
    parts |= {"tokenize_func": tokenize, "gbs": settings["gbs"]}
    parts |= {"model_forward_micro_batch_size": 2, "server": OmegaConf.create(settings["server"])}
    trainer = CriticServerTrainer(**parts)
    if os.path.exists(settings["checkpoint"]):
        trainer.load_state_dict(json.loads(Path(settings["checkpoint"]).read_text()))
    server_loop.FAILURE_GRACE_S = patience(3.0)
    server_loop.SAVE_GRACE_S = settings["save_grace_s"]
    server_loop.CHECK_INTERVAL_S = triton_host.PROBE_S = settings["look_s"]
    triton_host.START_S = settings["start_s"] or triton_host.START_S
    requests.SLICE_TOKENS = settings["slice_tokens"]
    trainer.run_server()
    parallel_state.destroy()


SETTINGS = {
    "gbs": 4,
    "save_s": 0.0,  # how long a save takes
    "save_grace_s": 60.0,  # how long it may take after SIGTERM
    "slice_tokens": 512,  # of a slice of a scoring request
    # Checkpoints are written in the background; not while there is a file `checkpoint.json.full`.
    "background": False,
    "minimal": False,  # logger and checkpoints have NeMo-Aligner's interface only
    "look_s": 5.0,  # between two looks at Triton, and how long it may take to reply to one
    "start_s": None,  # within which Triton must be ready, one for each start; None: the real ones
    "server": {},  # the section of the configuration
}


class CriticJob:
    """A running job; leaving its `with` block ends all of its processes.

    Args:
        ranks: number of processes.
        launcher: "torchrun", or "direct" for processes that only share environment variables, as
            SLURM starts them.
        combined: the server also gives rewards.
        given: other values of `SETTINGS`, and of `trainer.ppo`.
    """

    def __init__(self, ranks=1, launcher="direct", combined=True, **given):
        self.directory = Path(tempfile.mkdtemp(prefix="cj_", dir="/tmp"))
        (self.directory / "t").mkdir()
        self.port = find_free_port()
        self.ranks = ranks
        settings = {
            **{name: given.pop(name, default) for name, default in SETTINGS.items()},
            "metrics": str(self.directory / "metrics.jsonl"),
            "checkpoint": str(self.directory / "checkpoint.json"),
            "cfg": {
                "host": "127.0.0.1",
                "port": self.port,
                "combine_rm_and_critic_server": combined,
                "require_lease": False,  # for clients without our checks
                "inference_micro_batch_size": 2,
                "gradient_clip_val": 1.0,
                "alarms": {"replica_check_interval": 0},  # the tiny model cannot be looked into
                **given,
            },
        }
        root = Path(__file__).resolve().parents[2]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
        environment |= {"TMPDIR": str(self.directory / "t"), "PYTHONUNBUFFERED": "1"}
        script = [__file__, json.dumps(settings)]
        self.log_path = self.directory / "log.txt"

        def start(arguments, environment, others=0):
            return start_python(
                [*arguments, *script], environment, self.directory, self.log_path, others
            )

        if launcher == "torchrun":
            command = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
            command += [f"--master_port={find_free_port()}"]
            self.processes = [start(command, environment, others=ranks)]
        else:
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
            shared["WORLD_SIZE"] = str(ranks)
            self.processes = [
                start([], {**environment, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
                for rank in range(ranks)
            ]
        self._family = {}
        self._shared_memory = set()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.look_around()
        kill_all(self._family.values())
        for process in self.processes:
            process.wait(10)
        subprocess.run(["rm", "-rf", str(self.directory)], check=True)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_until_serving(self, limit_s=300):
        """Return once all endpoints answer."""
        deadline = Deadline(limit_s)
        while "serving critic_infer" not in self.log():
            ended = any(process.poll() is not None for process in self.processes)
            if ended or deadline.passed():
                raise AssertionError(f"the server did not come up:\n{self.log()}")
            time.sleep(0.2)
        self.look_around()
        return self

    def rank_pids(self) -> list:
        """Process ids of the ranks, in rank order."""
        if len(self.processes) == self.ranks:
            return [process.pid for process in self.processes]
        children = psutil.Process(self.processes[0].pid).children()
        in_order = sorted(children, key=lambda child: (child.create_time(), child.pid))
        # torchrun starts them one after the other, and anything else later.
        return [child.pid for child in in_order[: self.ranks]]

    def children_named(self, name: str) -> list:
        """Processes that rank 0 has started, however far down, with `name` in their names or, if
        it is a function that Python runs, in their commands.
        """
        found = []
        for process in family(self.rank_pids()[0])[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since it was listed
                if name in process.name() or f"import {name};" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def look_around(self) -> None:
        """Note the processes of the job and the shared memory they have mapped."""
        for process in self.processes:
            for member in family(process.pid):
                self._family[member.pid] = member
                with contextlib.suppress(psutil.Error):  # it has ended since it was listed
                    for mapping in member.memory_maps():
                        if mapping.path.startswith("/dev/shm/"):
                            self._shared_memory.add(mapping.path.removesuffix(" (deleted)"))

    def must_exit_with(self, *codes: int, limit_s=15) -> None:
        """Fail unless the processes that were started end in time, with these exit codes, or
        without any all with errors; and nothing is left.
        """
        have_ended = lambda: all(process.poll() is not None for process in self.processes)
        wait_until(have_ended, limit_s, lambda: f"the end of\n{self.log()}")
        found = [process.returncode for process in self.processes]
        assert found == list(codes) if codes else all(found), f"exit codes {found}\n{self.log()}"
        self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        """No process, no port, no shared memory, no workspace."""
        alive = left_of(self._family.values(), 2)  # some have just been told to end
        assert not alive, alive
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", self.port))
        left = [path for path in self._shared_memory if os.path.exists(path)]
        assert not left, left
        assert not glob.glob(str(self.directory / "t" / "triton_*"))

    def signal_rank(self, rank: int, number=signal.SIGTERM) -> None:
        self.look_around()
        os.kill(self.rank_pids()[rank], number)


if __name__ == "__main__":
    main()
