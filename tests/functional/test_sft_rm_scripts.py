# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The SFT, reward-model, DPO, KTO and SPIN scripts as a user starts them: on one rank and two,
resumed, and with bad input.
"""

import functools
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_aligner.checkpoint.folders import complete_checkpoints
from tests.cases import some_of
from tests.chat_forms import OTHERS as FAMILIES
from tests.chat_forms import write_tokenizer
from tests.functional.jobs import (
    ScriptJob,
    assert_same_metrics,
    must_fail_with,
    must_succeed,
    read_metrics,
    samples_of,
    second_rank,
    wait_for_log,
    write_lines,
)

pytestmark = pytest.mark.timeout(300)

OTHER_SCRIPT = Path(__file__).parent / "other_scripts" / "preferences.py"
RESPONSES = ["was a joy", "is dull", "bad", "a sad and very long evening"]
LORA = ["model.peft.peft_scheme=lora", "model.peft.lora_tuning.target_modules=[all]"]
BATCHES = ["model.global_batch_size=4", "model.micro_batch_size=1"]
DROPOUT = "++model.hidden_dropout=0.1"  # a resumed job must draw the same numbers


def preferences(count: int, ask: Callable, reply: Callable) -> dict[str, list[dict]]:
    """Records of DPO and KTO, whose prompts and responses are written in some form."""
    pairs = [(ask(n), reply("was a joy"), reply(RESPONSES[1 + n % 3])) for n in range(count)]
    both = [(p, each) for p, *pair in pairs for each in zip(pair, ("chosen", "rejected"))]
    return {
        "dpo": [dict(zip(("prompt", "chosen", "rejected"), pair)) for pair in pairs],
        "kto": [{"prompt": p, "response": r, "preference": which} for p, (r, which) in both],
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Small jsonl files for all scripts."""
    folder = tmp_path_factory.mktemp("data")
    for name, count in (("train", 24), ("validation", 6)):
        records = preferences(count, "the film {}".format, " {}".format)
        both = [{"text": each["prompt"] + each["response"]} for each in records["kto"]]
        inputs = [f"the film {n}" for n in range(count)]
        outputs = [{"input": p, "output": RESPONSES[n % 4]} for n, p in enumerate(inputs)]
        records |= {"sft": outputs, "pairs": both}
        for kind, lines in records.items():
            write_lines(folder / f"{kind}_{name}.jsonl", lines)
    return folder


def training(script, log_dir, *overrides, **kwargs) -> ScriptJob:
    """A job in `log_dir`, beside which its log lies."""
    log_dir.mkdir(exist_ok=True)
    common = [f"exp_manager.explicit_log_dir={log_dir}"]
    common += ["exp_manager.create_checkpoint_callback=True"]
    common += ["exp_manager.checkpoint_callback_params.save_top_k=-1"]
    common += ["exp_manager.checkpoint_callback_params.save_nemo_on_train_end=True"]
    common += ["exp_manager.checkpoint_callback_params.filename='step-{step}'"]
    common += ["trainer.accelerator=cpu", "trainer.precision=32", "model.encoder_seq_length=48"]
    common += ["model.optim.lr=1e-2", "model.optim.sched.warmup_steps=1"]
    common += ["model.optim.sched.constant_steps=0"]
    return ScriptJob(script, log_dir.with_suffix(".log"), [*common, *overrides], **kwargs)


def steps(section: str, count: int = 4) -> list[str]:
    """So many updates, with a checkpoint after each second one."""
    keys = {"max_steps": count, "val_check_interval": 2, "save_interval": 2}
    return [f"trainer.{section}.{key}={value}" for key, value in keys.items()]


def texts(train, validation) -> list[str]:
    files = {"train": train, "validation": validation}
    return [f"model.data.{part}_ds.file_path={file}" for part, file in files.items()]


def prefix(train, validation) -> list[str]:
    files = f"{{train: [{train}], validation: [{validation}]}}"
    return [f"model.data.data_prefix={files}", "model.data.validation_drop_last=False"]


def sft(data, tokenizer, log_dir, *overrides, script="train_gpt_sft.py", **kwargs) -> ScriptJob:
    """Four updates of a tiny model from random weights."""
    architecture = (
        "num_layers=2 hidden_size=32 num_attention_heads=4 position_embedding_type=rope bias=False"
    )
    settings = [f"model.{setting}" for setting in architecture.split()]
    settings += ["model.tokenizer.library=huggingface", f"model.tokenizer.type={tokenizer}"]
    settings += texts(data / "sft_train.jsonl", data / "sft_validation.jsonl")
    settings += ["model.data.train_ds.global_batch_size=4"]
    settings += ["model.data.train_ds.micro_batch_size=2", "trainer.sft.max_steps=4"]
    settings += ["trainer.sft.val_check_interval=2", *overrides]
    return training(script, log_dir, *settings, **kwargs)


def paired(section, data, base, log_dir, *overrides, script, **kwargs) -> ScriptJob:
    """Four updates of a reward model, DPO or KTO."""
    kind = "pairs" if section == "rm" else section
    files = prefix(data / f"{kind}_train.jsonl", data / f"{kind}_validation.jsonl")
    own = [f"pretrained_checkpoint.restore_from_path={base}", *files, *BATCHES, DROPOUT]
    return training(script, log_dir, *own, *steps(section), *overrides, **kwargs)


def reward_model(data, base, log_dir, *overrides, **kwargs) -> ScriptJob:
    own = ["model.force_head_dtype=float32", "trainer.precision=bf16"]
    script = "train_reward_model.py"
    return paired("rm", data, base, log_dir, *own, *overrides, script=script, **kwargs)


PREFERENCES = ["+model.data.append_eod=True", "model.optim.lr=1e-3"]


def dpo(data, base, log_dir, *overrides, script="train_gpt_dpo.py", **kwargs) -> ScriptJob:
    overrides = [*PREFERENCES, *overrides]
    return paired("dpo", data, base, log_dir, *overrides, script=script, **kwargs)


def kto(data, base, log_dir, *overrides, script="train_gpt_kto.py", **kwargs) -> ScriptJob:
    overrides = [*PREFERENCES, *overrides]
    return paired("kto", data, base, log_dir, *overrides, script=script, **kwargs)


def spin(data, base, log_dir, *overrides, script="train_gpt_spin.py", **kwargs) -> ScriptJob:
    """Two iterations of three steps, for which the responses are generated together."""
    return training(
        script,
        log_dir,
        f"pretrained_checkpoint.restore_from_path={base}",
        "model.data.chat=False",
        *texts(data / "sft_train.jsonl", data / "sft_validation.jsonl"),
        *BATCHES,
        "model.spin.rollout_micro_batch_size=9",
        "model.spin.length_params.max_length=12",
        "model.spin.ref_policy_kl_penalty=[0.2,0.4]",
        "model.optim.lr=3e-3",
        DROPOUT,
        "trainer.spin.limit_train_batches=3",
        "trainer.spin.max_iterations=2",
        "trainer.spin.val_check_interval=2",
        "trainer.spin.save_interval=2",
        *overrides,
        **kwargs,
    )


JOBS = {"rm": reward_model, "dpo": dpo, "kto": kto, "spin": spin}


def must_resume_exactly(job, whole) -> None:
    """`job(folder)`, of which `whole` is the folder, killed before its last checkpoint and
    resumed: the metrics behind the one before it, to the bit.
    """
    again = whole.with_name(f"{whole.name}-again")
    losses = read_metrics(whole, "train/loss")
    resume_from(whole, again, lost_step=len(losses))
    must_succeed(job(again))
    assert_same_metrics(again, whole, last=True)
    assert len(read_metrics(again, "train/loss")) == 2


def resume_from(log_dir, copy, lost_step):
    """A copy of the job's folder as a job that was killed before the checkpoint of `lost_step`
    leaves it.
    """
    shutil.copytree(log_dir, copy)
    shutil.rmtree(copy / "checkpoints" / f"step-step={lost_step}")
    (copy / "metrics.jsonl").unlink()
    for nemo in (copy / "checkpoints").glob("*.nemo"):
        nemo.unlink()


@pytest.fixture(scope="module")
def sft_run(data, tiny_tokenizer_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft") / "one"
    must_succeed(sft(data, tiny_tokenizer_dir, folder))
    return folder


@pytest.fixture(scope="module")
def base(sft_run):
    return sft_run / "checkpoints" / "megatron_gpt_sft.nemo"


@pytest.mark.full
def test_each_turn_trains_with_the_date_of_the_run(tmp_path):
    """On two ranks, and a resumed job takes the date from the run's folder."""
    family = FAMILIES["qwen3"]
    template = "{{ strftime_now('%d %b %Y') }}" + family.template
    tokenizer = write_tokenizer(tmp_path / "tokenizer", family, template)
    for name, count in (("train", 8), ("validation", 4)):
        turns = [("user", "assistant")[n % 2] for n in range(4)]
        messages = [[{"role": role, "content": f"{role} {n}"} for role in turns] for n in range(8)]
        lines = [{"messages": each} for each in messages[:count]]
        write_lines(tmp_path / f"sft_{name}.jsonl", lines)
    options = ["model.data.one_turn_per_sample=True"]
    options += [f"model.data.{part}_ds.max_seq_length=256" for part in ("train", "validation")]
    options += ["model.encoder_seq_length=256"]
    job, whole = functools.partial(sft, tmp_path, tokenizer, ranks=2), tmp_path / "whole"
    must_succeed(job(whole, *options, "model.data.chat_date=2024-02-05"))
    assert len(read_metrics(whole, "train/loss")) == 4  # of 16 samples, 4 in a batch
    must_resume_exactly(lambda folder: job(folder, *options), whole)
    assert "written in the tokenizer's chat template" in (tmp_path / "whole-again.log").read_text()


def test_sft_learns_and_resumes_exactly(data, tiny_tokenizer_dir, sft_run):
    losses = read_metrics(sft_run, "train/loss")
    assert len(losses) == 4 and losses[3] < losses[0]
    validation = read_metrics(sft_run, "validation/loss")
    assert len(validation) == 2 and validation[1] < validation[0]
    nemo = sft_run / "checkpoints" / "megatron_gpt_sft.nemo"
    assert nemo.is_file()
    lines = sft_run.with_suffix(".log").read_text().rstrip().splitlines()[-8:]
    values = [f"{value:.4g} (step {step})" for value, step in zip(validation, (2, 4), strict=True)]
    assert lines[0] == f"validation: loss {' -> '.join(values)}"
    shown = nemo.relative_to(sft_run.parent)  # where the job ran
    assert lines[-2].startswith(f"      next: nemo-aligner convert nemo-to-hf {shown} ")
    page = (sft_run / "report.html").read_text()
    assert "train_gpt_sft.py" in page and "(step 4)</td>" in page and "model.optim.lr" in page
    must_resume_exactly(functools.partial(sft, data, tiny_tokenizer_dir), sft_run)


@pytest.mark.full
def test_a_folder_of_other_data_is_refused_and_another_batch_size_goes_on_in_samples(
    data, tiny_tokenizer_dir, sft_run, tmp_path
):
    resume_from(sft_run, tmp_path / "again", lost_step=4)
    job = functools.partial(sft, data, tiny_tokenizer_dir, tmp_path / "again", ranks=2)
    other = ["model.seed=5", f"model.data.train_ds.file_path={data}/sft_validation.jsonl"]
    must_fail_with(job(*other), "24 samples of sft_train", "6 samples of sft_val", "seed")
    sizes = {"global": 2, "micro": 1}.items()
    sizes = [f"model.data.train_ds.{key}_batch_size={n}" for key, n in sizes]
    must_succeed(job(*sizes, "trainer.sft.max_steps=-1"))
    used = read_metrics(tmp_path / "again", "train/consumed_samples")
    assert used == list(range(10, 26, 2))  # 8 before, 24 in the epoch


@pytest.mark.full
@pytest.mark.parametrize(
    "kind, options",
    [
        ("rm", []),
        ("rm", LORA),
        ("dpo", []),
        ("dpo", LORA),
        ("kto", []),
        ("spin", []),
        ("spin", LORA),
    ],
    ids=lambda value: value if isinstance(value, str) else "lora" if value else "full",
)
def test_two_data_parallel_ranks_learn_and_resume_exactly(data, base, tmp_path, kind, options):
    def job(folder):
        return JOBS[kind](data, base, folder, *options, ranks=2)

    whole = tmp_path / "whole"
    must_succeed(job(whole))
    losses, validation = (read_metrics(whole, f"{part}/loss") for part in ("train", "validation"))
    learned = {"rm": losses, "spin": losses[:3]}.get(kind, validation)
    assert learned[-1] < learned[0] and len(validation) == len(losses) // 2
    assert (whole / "checkpoints" / "megatron_gpt.nemo").is_file()
    must_resume_exactly(job, whole)


@pytest.mark.full
def test_a_reward_model_of_a_language_model_has_no_head_to_load(data, base, tmp_path):
    job = reward_model(data, base, tmp_path / "rm", "model.regression.load_rm_head_weights=True")
    must_fail_with(job, "load_rm_head_weights=True", str(base), "has no head to load")


@pytest.mark.parametrize(
    "kind, loss, zero, compared",
    [
        ("dpo", math.log(2), "margin", ("train_margin", "val_logprobs_chosen_mean")),
        pytest.param(
            *("kto", 0.5, "kl", ("train_kl", "val_rewards_margin")), marks=pytest.mark.full
        ),
        pytest.param(
            *("spin", math.log(2), "margin", ("train_margin", "train_avg_generated_lengths")),
            marks=pytest.mark.full,
        ),
    ],
    ids=["dpo", "kto", "spin"],
)
def test_a_policy_starts_at_its_reference_and_so_does_a_script_of_nemo_aligner(
    data, base, tmp_path, kind, loss, zero, compared
):
    """A script with the calls of NeMo-Aligner's gives the same numbers."""
    drop_last = f"model.data.validation_{'ds.' * (kind == 'spin')}drop_last=True"
    options = ["++model.hidden_dropout=0.0", drop_last]
    own = tmp_path / "own"
    must_succeed(JOBS[kind](data, base, own, *options))
    losses, zeros = (read_metrics(own, f"train/{name}") for name in ("loss", zero))
    for first in (0, 3) if kind == "spin" else (0,):
        assert losses[first] == pytest.approx(loss, abs=1e-5)
        assert zeros[first] == pytest.approx(0, abs=1e-4)
    if kind == "spin":
        assert read_metrics(own, "train/iteration") == [1, 1, 1, 2, 2, 2]
        assert read_metrics(own, "train/ref_policy_kl_penalty") == [0.2] * 3 + [0.4] * 3
        assert len(read_metrics(own, "train/generate")) == 2  # for three steps each
        assert {row["step"] for row in samples_of(own, "train")} == {0, 3}

    must_succeed(JOBS[kind](data, base, tmp_path / "other", *options, script=str(OTHER_SCRIPT)))
    folders = [tmp_path / name / "checkpoints" for name in ("other", "own")]
    found, expected = (complete_checkpoints(each)[-1][1]["metrics"] for each in folders)
    assert found["train_loss"] == pytest.approx(losses[-1], rel=1e-6)
    for name in ("train_grad_norm", "val_loss", *compared):
        assert found[name] == pytest.approx(expected[name], rel=1e-6), name


@some_of("victim", [0, 1])
def test_a_killed_rank_ends_the_job(data, tiny_tokenizer_dir, tmp_path, victim):
    # Minutes, for the case that this test itself is killed.
    long = [f"trainer.sft.{key}=5000" for key in ("max_steps", "max_epochs")]
    long.append("trainer.sft.val_check_interval=-1")
    with sft(data, tiny_tokenizer_dir, tmp_path / "sft", *long, ranks=2) as job:
        wait_for_log(job, "Training steps")
        time.sleep(1.0)
        (second_rank(job) if victim else job.process).kill()
        assert job.wait(30) != 0
        assert not job.leftovers(15)
