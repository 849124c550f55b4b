# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The remedy for an actor and a critic at different steps names only checkpoints that both have,
in arguments that a shell and Hydra read back as the folder.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.checkpoint.folders import mismatch_remedy, resume_argument, step_to_resume

CONF = Path(__file__).resolve().parents[2] / "conf"
ACTOR = {step: f"/a/megatron_gpt-step={step}-val_rewards=0.1" for step in (1, 2, 3)}
CRITIC = {step: f"/c/megatron_gpt-step={4 * step}" for step in (2, 3, 4)}


@pytest.mark.parametrize("config", ["gpt_ppo_actor", "gpt_ppo_critic"])
@pytest.mark.parametrize(
    "folder",
    [
        "/x/megatron_gpt-step=2",
        "/it's a [test], {a: 1}/step=2",
        '/say "x"/step=2',
        "/$HOME/`x`/a\\b=\\",
    ],
)
def test_a_pasted_argument_names_the_folder(config, folder):
    (argument,) = shlex.split(resume_argument(folder))
    with initialize_config_dir(str(CONF), version_base=None):
        assert compose(config, [argument]).exp_manager.resume_from_checkpoint == folder


@pytest.mark.parametrize(
    "steps, actor_has, critic_has, expected, used",  # steps: of the actor, the critic
    [
        # The newest step of both is neither's.
        ((3, 4), (1, 2, 3), (2, 4), "Both have a checkpoint of actor step 2", {2}),
        # Trained, but not saved since: the actor was killed.
        ((3, 3), (2, 3), (2, 3), "Restart the critic server with the same command", set()),
        ((0, 0), (), (), "Restart the critic server with the same command", set()),
        # Nothing in common.
        ((3, 0), (2, 3), (), "No step .*actor: 2, 3; critic: none.*explicit_log_dir", set()),
    ],
)
def test_only_checkpoints_that_match_are_named(steps, actor_has, critic_has, expected, used):
    actor, critic = {s: ACTOR[s] for s in actor_has}, {s: CRITIC[s] for s in critic_has}
    text = mismatch_remedy(*steps, actor, critic)
    assert re.match(expected, text), text
    named = {each for each in (*ACTOR.values(), *CRITIC.values()) if f'"{each}"' in text}
    assert named == {folders[step] for folders in (ACTOR, CRITIC) for step in used}


@pytest.mark.parametrize(
    "actor, critic, expected",
    [
        ((), (0,), 0),
        ((), (0, 2), 0),  # the actor died in its first save
        ((2,), (0,), 0),  # the critic died in its first save
        ((2,), (0, 2), 2),
        ((2, 4), (2, 4, 6), 4),  # the actor died in a later save
        ((2, 4), (0, 2), 2),  # the critic did
        ((1, 2, 4), (1, 3), 1),
        ((), (), None),
        ((2, 4), (0,), None),  # a critic in another folder
        ((), (0, 2, 4), None),  # an actor in another folder
        ((2, 4), (6, 8), None),
        ((2,), (-1,), None),
    ],
)
def test_a_pair_resumes_from_the_newest_step_of_both(actor, critic, expected):
    assert step_to_resume(actor, critic) == expected


def test_incomplete_checkpoints_are_not_counted(tmp_path, monkeypatch):
    for number, (name, step, complete) in enumerate(
        [("a", 1, True), ("b", 2, False), ("c", 3, True), ("d", 1, True)]
    ):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        state = {"save_number": number, "trainer": {"step": step}, "metrics": {}}
        (folder / "state.json").write_text(json.dumps(state))
        if complete:
            (folder / "COMPLETE").touch()
    monkeypatch.chdir(tmp_path)
    callback = CheckpointCallback(".", None, None, None, name="x")
    checkpoints = tmp_path / "checkpoints"
    newer = {1: str(checkpoints / "d")}
    assert callback.saved_at("step") == {**newer, 3: str(checkpoints / "c")}
    assert callback.saved_at("actor_step") == {}
    (checkpoints / "c/state.json").write_bytes(b'{"save_number": null}')  # torn
    assert callback.saved_at("step") == newer
    (checkpoints / "c/state.json").unlink()  # being removed
    assert callback.saved_at("step") == newer
