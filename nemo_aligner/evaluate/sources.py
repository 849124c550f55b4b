# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the responses of an evaluation come from: a file, or a policy that generates them now."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from nemo_aligner.core.errors import UserError
from nemo_aligner.generate.prompts import ChatForm
from nemo_aligner.generate.responses import Response, read_prompts, read_responses, write_responses
from nemo_aligner.parallel.environment import is_rank_zero

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def is_file_of_responses(source: str) -> bool:
    """Whether a word of the command line names responses and not a policy."""
    return source.endswith((".jsonl", ".json"))


def check_sources(sources: Sequence[str], prompts: str | None) -> None:
    """Check what can be checked before anything expensive.

    Raises:
        UserError: a source does not exist, or prompts are missing or not needed.
    """
    policies = [source for source in sources if not is_file_of_responses(source)]
    for source in sources:
        if source in policies and not Path(source).expanduser().exists():
            raise UserError(
                f"{source} does not exist; name a policy (a .nemo file or folder, or the folder "
                "of a job) or a .jsonl file of responses that nemo-aligner generate "
                "wrote."
            )
    if policies and prompts is None:
        raise UserError(
            f"{policies[0]} is a policy, so --prompts FILE must give the prompts that it is to "
            "respond to."
        )
    if prompts is not None and not policies:
        raise UserError(
            f"--prompts {prompts} is not used: {' and '.join(sources)} hold responses already; "
            "leave it out."
        )
    if prompts is not None:
        read_prompts(prompts)


def read_files(sources: Sequence[str]) -> dict[str, list[Response]]:
    return {source: read_responses(source) for source in sources if is_file_of_responses(source)}


def responses_of_policy(
    source: str, cfg: DictConfig, trainer: "Trainer", prompts: str, form: ChatForm, out: Path
) -> list[Response]:
    """Have a policy respond to a file of prompts; all ranks call it, and all get the responses.

    Rank 0 also writes them to `out`. The memory of the policy is free again afterwards.
    """
    from nemo_aligner.generate.batch import respond
    from nemo_aligner.generate.policy import free, load_policy
    from nemo_aligner.parallel.device import clear_memory

    cfg = cfg.copy()
    cfg.pretrained_checkpoint.restore_from_path = source
    policy = load_policy(cfg, trainer)
    responses = respond(policy, read_prompts(prompts), form, prompts)
    if is_rank_zero():
        write_responses(out, responses)
    free(policy)
    del policy
    clear_memory()
    return responses
