# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The critic job: a critic (and, combined with it, a reward model) that remote actors use, train
and save.

Path of a request: thread of its endpoint (decode, check) -> queue -> main thread of rank 0 -> all
ranks compute -> reply; see servers/server_loop.py, scoring.py and schema.py (tensors). N samples
of a request, n of one data-parallel rank's share, S padded token length; column t of [N, S-1]
predicts token t+1.
"""

import collections
import concurrent.futures
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from nemo.utils import logging
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.algorithms.alarms import Alarms
from nemo_aligner.algorithms.training_loop import complete_outputs
from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.config.defaults import complete
from nemo_aligner.core.errors import ConfigError, SaveError, cause_of
from nemo_aligner.core.types import Optimizer, Scheduler
from nemo_aligner.models.alignable_interface import CriticModelInterface
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.device import get_device
from nemo_aligner.servers import schema
from nemo_aligner.servers.constants import ServerSignal
from nemo_aligner.servers.control_group import ControlGroup
from nemo_aligner.servers.requests import PieceStore, pad_rows
from nemo_aligner.servers.schema import Array, Arrays, read_request_id, validate_training_inputs
from nemo_aligner.servers.scoring import (
    Inputs,
    Scorer,
    model_limits,
    share_of_rank,
)
from nemo_aligner.servers.server_loop import (
    OperationFailedError,
    ServerLoop,
    ServerStoppingError,
    read_front,
)
from nemo_aligner.training.loggers import CustomLoggerWrapper, named
from nemo_aligner.training.megatron_steps import naming_step
from nemo_aligner.training.optim import train_on_batch
from nemo_aligner.training.passes import FORWARD, TRAIN, token_metrics
from nemo_aligner.training.schedule import logged_phase

# Number of critic_train replies that are kept for clients that repeat a request.
REMEMBERED_REQUESTS = 64


@dataclass(frozen=True)
class _Save:
    step: int  # optimizer steps of the weights
    actor_step: int  # that they belong to
    # without a value, or an error, when the checkpoint is complete, or cannot be
    outcome: "concurrent.futures.Future[None]" = field(default_factory=concurrent.futures.Future)


class CriticServerTrainer:
    """Trains the critic, and serves the endpoints of its actors (`critic_*`).

    Args:
        cfg: `trainer.ppo`; missing keys have the defaults of gpt_ppo_critic.yaml.
        model: the critic, with the reward model if both are served here.
        tokenize_func: list of str -> (tokens int64 [N, S], lengths int64 [N]).
        gbs: samples of one optimizer step, over all data-parallel ranks.
        model_forward_micro_batch_size: samples of one forward pass per data-parallel rank.
        server: the section `server`; missing keys have their defaults.
    """

    def __init__(
        self,
        cfg: DictConfig,
        model: CriticModelInterface,
        optimizer: Optimizer,
        scheduler: Scheduler,
        logger: CustomLoggerWrapper,
        ckpt_callback: CheckpointCallback,
        tokenize_func: Callable[[list[str]], tuple[Any, Any]],
        gbs: int,
        model_forward_micro_batch_size: int,
        server: DictConfig | None = None,
    ):
        cfg = self.cfg = complete(cfg, "gpt_ppo_critic", "trainer.ppo")
        self.model = model
        self.optimizer, self.scheduler = optimizer, scheduler
        self.logger, self.ckpt_callback = complete_outputs(logger, ckpt_callback)
        self.gbs = gbs
        self.host, self.port = cfg.host, int(cfg.port)
        self.combine_rm_and_critic_server = cfg.combine_rm_and_critic_server

        server = complete(server, "gpt_ppo_critic", "server")
        self._make_front = read_front(cfg, server, "trainer.ppo", cfg.require_lease)
        dp_size = parallel_state.get_data_parallel_world_size()
        if gbs % dp_size:
            raise ConfigError(
                f"model.global_batch_size={gbs} does not divide over the critic's {dp_size} data-"
                "parallel ranks. Change it, trainer.devices, or the other parallel sizes."
            )
        self.vocab_size, self.max_length = model_limits(model)
        self._scorer = Scorer(
            self._score_rows,
            tokenize_func,
            model_forward_micro_batch_size,
            cfg.strip_sequence_length_to_multiple,
            self.vocab_size,
            self.max_length,
            tokenizer=getattr(model, "tokenizer", None),
            passes=(self._score_values, self._score_rewards)
            if self.combine_rm_and_critic_server
            else (),
        )

        self.alarms = Alarms("trainer.ppo.alarms", cfg.alarms)
        self.step = 0  # optimizer steps of the weights in memory
        self.saved_step = 0  # optimizer steps of the last checkpoint written or loaded
        self.actor_step = 0  # actor step of that checkpoint
        self._written: tuple[int, int] | None = None  # both, of what is on the disk for certain
        self._last_save: _Save | None = None  # the newest save
        # Ends what the model was last prepared for, if that was interrupted.
        self._finish: Callable[[], None] | None = None
        self._replies: collections.OrderedDict[str, Arrays | Exception] = collections.OrderedDict()
        self._pieces = PieceStore()
        self._loop: ServerLoop | None = None

    # ---- state ----

    @property
    def _saving(self) -> _Save | None:
        save = self._last_save
        return None if save is None or save.outcome.done() else save

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "actor_step": self.actor_step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.step = self.saved_step = int(state_dict["step"])
        self.actor_step = int(state_dict.get("actor_step", schema.UNKNOWN_STEP))
        self._written = self.step, self.actor_step

    def keep_first_weights(self) -> None:
        """Save the weights of a new job as those of actor step 0, where the actor starts again
        after an early death. Every rank calls it before `run_server`.
        """
        if self.step == 0 and not self.ckpt_callback.saved_at("actor_step"):
            self.save(actor_step=0)
            self.ckpt_callback.finish_save()  # whose error ends the job
            self._end_save(wait=False)

    # ---- serving ----

    def run_server(self) -> None:
        """Serve until SIGTERM or SIGINT reaches any rank; every rank calls it."""
        combined = self.combine_rm_and_critic_server
        self._loop = ServerLoop(
            name="critic server",
            endpoints=[
                (schema.critic_infer_endpoint(combined), self.server_infer),
                (schema.critic_train_endpoint(), self.server_train),
                (schema.critic_save_endpoint(), self.server_save),
                (schema.critic_resume_endpoint(), self.server_resume),
                (schema.critic_status_endpoint(), self.server_status),
            ],
            operations={
                ServerSignal.FORWARD: self._scorer.forward,
                ServerSignal.TRAIN: self._update,
                ServerSignal.SAVE: self._save,
                ServerSignal.RESUME: self._resume,
            },
            after_failure=self._recover,
            control=self.control,
            make_front=self._make_front,
            is_saving=lambda: self._saving is not None,
            end_save=self._end_save,
        )
        self._loop.run()

    def run_subscriber_loop(self) -> None:
        """`run_server`, as ranks above 0 may call it."""
        self.run_server()

    def server_infer(self, **inputs: Array) -> Arrays:
        return self._scorer.reply_to(inputs, self._loop)

    def server_train(self, **inputs: Array) -> Arrays:
        """Handle `critic_train`. A `request_id` seen before gets its first reply again: nothing is
        applied twice. Of a request in pieces the last one starts the update.
        """
        sent_id, piece = inputs.pop("request_id", None), inputs.pop("piece", None)
        request_id = None if sent_id is None else read_request_id(sent_id)
        self._check_training(inputs)
        if request_id is not None and request_id in self._replies:
            logging.warning(f"critic_train: request {request_id} came again: no second update")
            return self._reply_to(request_id)
        whole: Arrays | None = inputs
        if piece is None:
            self._pieces.drop()  # of a client that has given its request up
        elif request_id is None:
            raise schema.RequestError("critic_train: 'piece' is sent without a 'request_id'.")
        else:
            first, rows = np.ravel(piece).tolist()
            whole = self._pieces.add(request_id, first, rows, inputs)
        if whole is None:
            return {"loss_mean": np.array([np.nan], dtype=np.float32)}
        with self._scorer.turns.changing():
            if request_id is None:
                return self._submit(ServerSignal.TRAIN, whole)
            step = self.step
            try:
                self._replies[request_id] = self._submit(ServerSignal.TRAIN, whole)
            except Exception as error:
                if self.step == step:
                    raise
                self._replies[request_id] = error
        if len(self._replies) > REMEMBERED_REQUESTS:
            self._replies.popitem(last=False)
        return self._reply_to(request_id)

    def _reply_to(self, request_id: str) -> Arrays:
        reply = self._replies[request_id]
        if isinstance(reply, Exception):
            raise OperationFailedError(
                f"request {request_id} failed halfway and is not repeated: {cause_of(reply)}"
            ) from reply
        return reply

    def server_save(self, **inputs: Array) -> Arrays:
        """Handle `critic_save`; the reply comes when the checkpoint is complete. If that is
        written in the background, other requests are worked on before.
        """
        actor_step = inputs.get("actor_step", schema.UNKNOWN_STEP)
        reply = self._submit(ServerSignal.SAVE, {"actor_step": np.ravel(actor_step)})
        # Requests to this endpoint come one after the other: nobody has begun another save.
        save = self._last_save
        while save is not None and not concurrent.futures.wait([save.outcome], 0.2).done:
            if self._loop is None or self._loop.is_closed:
                raise ServerStoppingError("the critic server is shutting down")
        if save is not None:
            save.outcome.result()
        return reply

    def server_resume(self, **inputs: Array) -> Arrays:
        with self._scorer.turns.changing():
            self._submit(ServerSignal.RESUME, {"actor_step": np.ravel(inputs["actor_step"])})
        return self.server_status()

    def server_status(self, **_inputs: Array) -> Arrays:
        """Handle `critic_status`; replies at once, also during a training request."""
        checkpoints = json.dumps(self.ckpt_callback.saved_at("actor_step"))
        return {
            "actor_step": np.array([self.actor_step], dtype=np.int64),
            "critic_step": np.array([self.step], dtype=np.int64),
            "saved_critic_step": np.array([self.saved_step], dtype=np.int64),
            "checkpoints": np.array([checkpoints.encode()]),
        }

    def _submit(self, signal_: ServerSignal, arrays: Arrays) -> Arrays:
        assert self._loop is not None, "the server does not run"
        return self._loop.submit(signal_, arrays)

    def _recover(self, signal_: ServerSignal) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    # ---- operations: every rank runs them together ----

    @property
    def control(self) -> ControlGroup:
        return self._scorer.control

    @contextlib.contextmanager
    def _prepared(self, prepare: Callable[[], None], finish: Callable[[], None]) -> Iterator[None]:
        """Call `prepare()` now and `finish()` at the end; after an error only `_recover` calls
        `finish`, once all ranks are known to have failed alike.
        """
        prepare()
        self._finish = finish
        yield
        self._finish = None
        finish()

    def run_inference(self, inputs: Inputs | None = None, **named: Array) -> Arrays:
        """Score a batch: values float32 [N, S] and, when combined, rewards float32 [N, 1].

        Every rank calls it, rank 0 with `tokens` int64 [N, S] and `sequence_lengths` int64 [N] or
        [N, 1] (or `sentences`), by name or as one dict; the others get an empty dict.
        """
        return self._scorer.run({**(inputs or {}), **named})

    def _score_rows(
        self, tokens: Tensor, lengths: Tensor, _prompt_lengths: Tensor | None
    ) -> dict[str, Tensor]:
        """Return values [n, S] and, when combined, rewards [n, 1] of this rank's samples."""
        if not self.combine_rm_and_critic_server:
            return self._score_values(tokens, lengths)
        rewards, values = self._scored(self.model.infer_rm_critic, tokens, lengths)
        return {"rewards": torch.as_tensor(rewards).reshape(-1, 1), "values": values}

    def _score_values(self, *samples: Tensor | None) -> dict[str, Tensor]:
        return {"values": self._scored(self.model.infer, *samples)}

    def _score_rewards(self, *samples: Tensor | None) -> dict[str, Tensor]:
        rewards = self._scored(self.model.infer_rewards, *samples)
        return {"rewards": torch.as_tensor(rewards).reshape(-1, 1)}

    def _scored(self, infer: Callable[..., Any], *samples: Tensor | None) -> Any:
        with (
            logged_phase(self.logger, self.step, "score"),
            self._prepared(self.model.prepare_for_inference, self.model.finish_inference),
        ):
            return infer(samples[:2])

    def _check_training(self, arrays: Arrays) -> Arrays:
        validate_training_inputs(**arrays, vocab_size=self.vocab_size, max_length=self.max_length)
        return arrays

    def run_training(
        self,
        tokens: Array | Inputs | None = None,
        returns: Array | None = None,
        prev_values: Array | None = None,
        mask: Array | None = None,
    ) -> Arrays:
        """Run one optimizer step per `gbs` samples, in order; {"loss_mean": float32 [1]} is the
        mean of the losses. Every rank calls it, rank 0 with `tokens` int64 [N, S] and `returns`,
        `prev_values`, `mask` float32 [N, S-1], or with one dict of them. Rows that fill up the
        last global batch have mask 0, and no weight in the loss.
        """
        if isinstance(tokens, Mapping):
            return self.run_training(**tokens)
        named = {"tokens": tokens, "returns": returns, "prev_values": prev_values, "mask": mask}
        inputs = {name: array for name, array in named.items() if array is not None}
        return self._update(**self.control.from_rank_zero(lambda: self._check_training(inputs)))

    def _update(self, **arrays: Array) -> Arrays:
        losses = []
        # Empty rows, whose mask is 0, up to whole batches.
        arrays = {name: pad_rows(array, self.gbs) for name, array in arrays.items()}
        with (
            logged_phase(self.logger, self.step, "train"),
            self._prepared(self.model.prepare_for_training, self.model.finish_training),
        ):
            for start in range(0, arrays["tokens"].shape[0], self.gbs):
                share = share_of_rank(start, self.gbs)
                with naming_step(f"critic step {self.step + 1}"):
                    losses.append(
                        self._train_step(
                            {k: torch.from_numpy(v[share]) for k, v in arrays.items()}
                        )
                    )
        return {"loss_mean": np.array([np.mean(losses)], dtype=np.float32)}

    def _train_step(self, batch: dict[str, Tensor]) -> float:
        start = time.monotonic()
        batch = {name: tensor.to(get_device()) for name, tensor in batch.items()}
        metrics = train_on_batch(
            self.model, self.optimizer, self.scheduler, batch, self.cfg.gradient_clip_val
        )
        metrics["step_time"] = time.monotonic() - start
        self.step += 1
        names, seconds = {FORWARD: "scoring", TRAIN: "train"}, {"train": metrics["step_time"]}
        counts = token_metrics(names, seconds)
        self.logger.log_metrics(named("train/", metrics) | counts, step=self.step)
        self.alarms.check_replicas(self.model, self.step)
        return float(metrics["loss"])

    def _save(self, actor_step: Array) -> Arrays:
        # The same request again, whose first reply was lost, finds its checkpoint written, or
        # waits for it.
        asked = self.step, int(actor_step[0])
        saving = self._saving and (self._saving.step, self._saving.actor_step)
        if asked[1] == schema.UNKNOWN_STEP or asked not in (self._written, saving):
            with logged_phase(self.logger, self.step, "save"):
                self.save(actor_step=asked[1])
        return {"status": np.zeros(1, dtype=np.int64)}

    def _resume(self, actor_step: Array) -> Arrays:
        step = int(actor_step[0])
        self._end_save(wait=True)
        if step != self.actor_step or self.step != self.saved_step:
            with self._prepared(self.model.prepare_for_training, self.model.finish_training):
                self.load_state_dict(self.ckpt_callback.load_at("actor_step", step))
            logging.info(f"critic server: went back to the checkpoint of actor step {step}")
        return {}

    def save(
        self,
        extra_candidates: dict[str, Any] | None = None,
        is_train_end: bool = False,
        save_top_only: bool = False,
        actor_step: int = schema.UNKNOWN_STEP,
    ) -> None:
        """Write a checkpoint that belongs to `actor_step`, or begin to write it in the background;
        every rank calls it. `save_top_only` has no effect; it is there for old callers.
        """
        self._end_save(wait=True)
        self._last_save = None
        state = {**self.state_dict(), "actor_step": actor_step}
        with self._prepared(self.model.prepare_for_training, self.model.finish_training):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            candidates = {"step": torch.tensor(self.step), **(extra_candidates or {})}
            self.ckpt_callback.custom_save(
                monitor_candidates=candidates, is_train_end=is_train_end, trainer_state=state
            )
        self._last_save = _Save(self.step, actor_step)
        self._end_save(wait=False)

    def _end_save(self, wait: bool) -> None:
        """Note the outcome of the save that is being written, if it has come (`wait` for it), for
        the request that waits and in the counters; every rank calls it.
        """
        save = self._saving
        if save is None:
            return
        try:
            if wait:
                self.ckpt_callback.finish_save()
            else:
                self.ckpt_callback.check_save()
        except SaveError as error:  # on all ranks
            logging.error(f"critic server: no checkpoint of actor step {save.actor_step}: {error}")
            save.outcome.set_exception(OperationFailedError(cause_of(error)))
            return
        if not self.ckpt_callback.is_saving:
            self.saved_step, self.actor_step = save.step, save.actor_step
            self._written = save.step, save.actor_step
            save.outcome.set_result(None)
