# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The SFT, reward-model, DPO, KTO and SPIN scripts as a user starts them: on one rank and two,
resumed, and with bad input.
"""

import functools
import json
import math
import shutil
import time
from pathlib import Path

import psutil
import pytest

from nemo_aligner.checkpoint.folders import complete_checkpoints
from tests.cases import some_of
from tests.chat_forms import OTHERS, write_tokenizer
from tests.functional.jobs import (
    ScriptJob,
    must_fail_with,
    must_succeed,
    read_metrics,
    wait_for_log,
)

pytestmark = pytest.mark.timeout(300)

RESPONSES = ["was a joy", "is dull", "bad", "a sad and very long evening"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Small jsonl files for both scripts."""
    folder = tmp_path_factory.mktemp("data")
    for name, count in (("train", 24), ("validation", 6)):
        with (
            (folder / f"sft_{name}.jsonl").open("w") as sft,
            (folder / f"pairs_{name}.jsonl").open("w") as pairs,
            (folder / f"dpo_{name}.jsonl").open("w") as dpo,
            (folder / f"kto_{name}.jsonl").open("w") as kto,
        ):
            for i in range(count):
                prompt = f"the film {i}"
                sft.write(json.dumps({"input": prompt, "output": RESPONSES[i % 4]}) + "\n")
                for response in ("was a joy", RESPONSES[1 + i % 3]):
                    pairs.write(json.dumps({"text": f"{prompt} {response}"}) + "\n")
                texts = {"chosen": " was a joy", "rejected": f" {RESPONSES[1 + i % 3]}"}
                dpo.write(json.dumps({"prompt": prompt, **texts}) + "\n")
                for preference, response in texts.items():
                    sample = {"prompt": prompt, "response": response, "preference": preference}
                    kto.write(json.dumps(sample) + "\n")
    return folder


def common(log_dir) -> list[str]:
    return [
        f"exp_manager.explicit_log_dir={log_dir}",
        "exp_manager.create_checkpoint_callback=True",
        "exp_manager.checkpoint_callback_params.save_top_k=-1",
        "exp_manager.checkpoint_callback_params.save_nemo_on_train_end=True",
        "exp_manager.checkpoint_callback_params.filename='step-{step}'",
        "trainer.accelerator=cpu",
        "model.encoder_seq_length=48",
        "model.optim.lr=1e-2",
        "model.optim.sched.warmup_steps=1",
        "model.optim.sched.constant_steps=0",
    ]


def sft(data, tokenizer, log_dir, *overrides, script="train_gpt_sft.py", **kwargs) -> ScriptJob:
    """Four updates of a tiny model from random weights."""
    log_dir.mkdir(exist_ok=True)
    architecture = (
        "num_layers=2 hidden_size=32 num_attention_heads=4 position_embedding_type=rope bias=False"
    )
    return ScriptJob(
        script,
        log_dir.with_suffix(".log"),
        [
            *common(log_dir),
            *(f"model.{setting}" for setting in architecture.split()),
            "model.tokenizer.library=huggingface",
            f"model.tokenizer.type={tokenizer}",
            f"model.data.train_ds.file_path={data}/sft_train.jsonl",
            f"model.data.validation_ds.file_path={data}/sft_validation.jsonl",
            "model.data.train_ds.global_batch_size=4",
            "model.data.train_ds.micro_batch_size=2",
            "trainer.sft.max_steps=4",
            "trainer.sft.val_check_interval=2",
            "trainer.precision=32",
            *overrides,
        ],
        **kwargs,
    )


def reward_model(data, base, log_dir, *overrides, **kwargs) -> ScriptJob:
    log_dir.mkdir(exist_ok=True)
    pairs = data / "pairs"
    return ScriptJob(
        "train_reward_model.py",
        log_dir.with_suffix(".log"),
        [
            *common(log_dir),
            f"pretrained_checkpoint.restore_from_path={base}",
            f"model.data.data_prefix={{train: [{pairs}_train.jsonl], "
            f"validation: [{pairs}_validation.jsonl]}}",
            "model.data.validation_drop_last=False",
            "model.global_batch_size=4",
            "model.micro_batch_size=1",
            "model.force_head_dtype=float32",
            "trainer.precision=bf16",
            "model.hidden_dropout=0.1",  # a resumed job must draw the same numbers
            "trainer.rm.max_steps=4",
            "trainer.rm.val_check_interval=2",
            "trainer.rm.save_interval=2",
            *overrides,
        ],
        **kwargs,
    )


def dpo(data, base, log_dir, *overrides, script="train_gpt_dpo.py", **kwargs) -> ScriptJob:
    return preferences("dpo", data, base, log_dir, *overrides, script=script, **kwargs)


def kto(data, base, log_dir, *overrides, script="train_gpt_kto.py", **kwargs) -> ScriptJob:
    return preferences("kto", data, base, log_dir, *overrides, script=script, **kwargs)


def preferences(kind, data, base, log_dir, *overrides, script, **kwargs) -> ScriptJob:
    """A job of DPO or KTO."""
    log_dir.mkdir(exist_ok=True)
    files = data / kind
    return ScriptJob(
        script,
        log_dir.with_suffix(".log"),
        [
            *common(log_dir),
            f"pretrained_checkpoint.restore_from_path={base}",
            f"model.data.data_prefix={{train: [{files}_train.jsonl], "
            f"validation: [{files}_validation.jsonl]}}",
            "model.data.validation_drop_last=False",
            "+model.data.append_eod=True",
            "model.global_batch_size=4",
            "model.micro_batch_size=1",
            "trainer.precision=32",
            "model.optim.lr=1e-3",
            "++model.hidden_dropout=0.1",  # a resumed job must draw the same numbers
            f"trainer.{kind}.max_steps=4",
            f"trainer.{kind}.val_check_interval=2",
            f"trainer.{kind}.save_interval=2",
            *overrides,
        ],
        **kwargs,
    )


def spin(data, base, log_dir, *overrides, script="train_gpt_spin.py", **kwargs) -> ScriptJob:
    """Two iterations of three steps, for which the responses are generated together."""
    log_dir.mkdir(exist_ok=True)
    return ScriptJob(
        script,
        log_dir.with_suffix(".log"),
        [
            *common(log_dir),
            f"pretrained_checkpoint.restore_from_path={base}",
            "model.data.chat=False",
            f"model.data.train_ds.file_path={data}/sft_train.jsonl",
            f"model.data.validation_ds.file_path={data}/sft_validation.jsonl",
            "model.global_batch_size=4",
            "model.micro_batch_size=1",
            "model.spin.rollout_micro_batch_size=9",
            "model.spin.length_params.max_length=12",
            "model.spin.ref_policy_kl_penalty=[0.2,0.4]",
            "trainer.precision=32",
            "model.optim.lr=3e-3",
            "++model.hidden_dropout=0.1",  # a resumed job must draw the same numbers
            "trainer.spin.limit_train_batches=3",
            "trainer.spin.max_iterations=2",
            "trainer.spin.val_check_interval=2",
            "trainer.spin.save_interval=2",
            *overrides,
        ],
        **kwargs,
    )


def must_equal_own(job, script, folder, options, names):
    """A script with the calls of NeMo-Aligner's gives the numbers of the job in `folder`/own."""
    other = Path(__file__).parent / "other_scripts" / script
    must_succeed(job(folder / "other", *options, script=str(other)))
    found, expected = (
        complete_checkpoints(folder / name / "checkpoints")[-1][1]["metrics"]
        for name in ("other", "own")
    )
    losses = read_metrics(folder / "own", "train/loss")
    assert found["train_loss"] == pytest.approx(losses[-1], rel=1e-6)
    for name in names:
        assert found[name] == pytest.approx(expected[name], rel=1e-6), name


def must_resume_exactly(job, folder, options, keys):
    """The job in `folder`/whole on two ranks, killed before its last checkpoint and resumed."""
    whole, again = folder / "whole", folder / "again"
    assert (whole / "checkpoints" / "megatron_gpt.nemo").is_file()
    resume_from(whole, again, lost_step=4)
    must_succeed(job(again, *options, ranks=2))
    for key in keys:
        assert read_metrics(again, key) == read_metrics(whole, key)[2:], key
    validation = read_metrics(whole, "validation/loss")
    assert read_metrics(again, "validation/loss") == validation[1:]


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


@pytest.mark.full
def test_each_turn_trains_with_the_date_of_the_run(tmp_path):
    """On two ranks, and a resumed job takes the date from the run's folder."""
    family = OTHERS["qwen3"]
    template = "{{ strftime_now('%d %b %Y') }}" + family.template
    tokenizer = write_tokenizer(tmp_path / "tokenizer", family, template)
    for name in ("train", "validation"):
        turns = [("user", "assistant")[n % 2] for n in range(4)]
        with (tmp_path / f"sft_{name}.jsonl").open("w") as file:
            for n in range(8 if name == "train" else 4):
                messages = [{"role": role, "content": f"{role} {n}"} for role in turns]
                file.write(json.dumps({"messages": messages}) + "\n")
    options = ["model.data.one_turn_per_sample=True"]
    options += [f"model.data.{part}_ds.max_seq_length=256" for part in ("train", "validation")]
    options += ["model.encoder_seq_length=256"]
    whole, again = tmp_path / "whole", tmp_path / "again"
    must_succeed(
        sft(tmp_path, tokenizer, whole, *options, "model.data.chat_date=2024-02-05", ranks=2)
    )
    losses = read_metrics(whole, "train/loss")
    assert len(losses) == 4  # of 16 samples, 4 in a batch
    resume_from(whole, again, lost_step=4)
    must_succeed(sft(tmp_path, tokenizer, again, *options, ranks=2))
    assert read_metrics(again, "train/loss") == losses[2:]
    assert read_metrics(again, "validation/loss") == read_metrics(whole, "validation/loss")[1:]
    assert "written in the tokenizer's chat template" in again.with_suffix(".log").read_text()


def test_sft_learns_and_resumes_exactly(data, tiny_tokenizer_dir, sft_run, tmp_path):
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

    resume_from(sft_run, tmp_path / "again", lost_step=4)
    must_succeed(sft(data, tiny_tokenizer_dir, tmp_path / "again"))
    assert read_metrics(tmp_path / "again", "train/loss") == losses[2:]
    assert (
        read_metrics(tmp_path / "again", "train/grad_norm")
        == read_metrics(sft_run, "train/grad_norm")[2:]
    )
    assert read_metrics(tmp_path / "again", "validation/loss") == validation[1:]


@pytest.mark.full
def test_a_folder_of_other_data_is_refused_and_another_batch_size_goes_on_in_samples(
    data, tiny_tokenizer_dir, sft_run, tmp_path
):
    resume_from(sft_run, tmp_path / "again", lost_step=4)
    job = functools.partial(sft, data, tiny_tokenizer_dir, tmp_path / "again", "model.seed=5")
    other = f"model.data.train_ds.file_path={data}/sft_validation.jsonl"
    must_fail_with(job(other, ranks=2), "24 samples of sft_train", "6 samples of sft_val", "seed")
    sizes = [
        f"model.data.train_ds.{key}_batch_size={n}" for key, n in (("global", 2), ("micro", 1))
    ]
    sizes.append("trainer.sft.max_steps=-1")
    must_succeed(sft(data, tiny_tokenizer_dir, tmp_path / "again", *sizes, ranks=2))
    used = read_metrics(tmp_path / "again", "train/consumed_samples")
    assert used == list(range(10, 26, 2))  # 8 before, 24 in the epoch


@pytest.mark.full
def test_reward_model_in_bf16_on_two_data_parallel_ranks_learns_and_resumes_exactly(
    data, sft_run, tmp_path
):
    base = sft_run / "checkpoints" / "megatron_gpt_sft.nemo"
    must_succeed(reward_model(data, base, tmp_path / "whole", ranks=2))
    losses = read_metrics(tmp_path / "whole", "train/loss")
    assert len(losses) == 4 and losses[3] < losses[0]
    assert len(read_metrics(tmp_path / "whole", "validation/acc")) == 2
    must_resume_exactly(functools.partial(reward_model, data, base), tmp_path, [], ["train/loss"])


LORA = ["model.peft.peft_scheme=lora", "model.peft.lora_tuning.target_modules=[all]"]


@pytest.mark.full
@pytest.mark.parametrize("options", [[], LORA], ids=["full", "lora"])
def test_dpo_on_two_data_parallel_ranks_learns_and_resumes_exactly(
    data, sft_run, tmp_path, options
):
    base = sft_run / "checkpoints" / "megatron_gpt_sft.nemo"
    must_succeed(dpo(data, base, tmp_path / "whole", *options, ranks=2))
    assert len(read_metrics(tmp_path / "whole", "train/loss")) == 4
    validation = read_metrics(tmp_path / "whole", "validation/loss")
    assert validation[1] < validation[0] < math.log(2)
    keys = ("train/loss", "train/margin", "train/grad_norm")
    must_resume_exactly(functools.partial(dpo, data, base), tmp_path, options, keys)


@pytest.mark.full
def test_dpo_with_log_probs_of_the_reference_that_are_kept(data, sft_run, tmp_path):
    """The same training on one rank; a job of two ranks finds them when it resumes."""
    base = sft_run / "checkpoints" / "megatron_gpt_sft.nemo"
    without = "++model.hidden_dropout=0.0"  # two ranks draw other numbers than one
    without = [without, "model.dpo.preference_loss=ipo", "model.dpo.ref_policy_kl_penalty=1.0"]
    keep = [*without, f"model.dpo.ref_log_probs_dir={tmp_path / 'kept'}"]
    must_succeed(dpo(data, base, tmp_path / "fresh", *without))
    losses = read_metrics(tmp_path / "fresh", "train/loss")
    assert losses[0] == pytest.approx(0.25, abs=1e-4)  # that of IPO at the reference
    must_succeed(dpo(data, base, tmp_path / "keeps", *keep))
    assert len(list((tmp_path / "kept").iterdir())) == 2  # training and validation data
    for key in ("train/loss", "train/margin", "train/grad_norm", "validation/loss"):
        fresh, keeps = (read_metrics(tmp_path / name, key) for name in ("fresh", "keeps"))
        assert keeps == pytest.approx(fresh, rel=1e-4, abs=1e-5), key
    resume_from(tmp_path / "keeps", tmp_path / "again", lost_step=4)
    job = dpo(data, base, tmp_path / "again", *keep, ranks=2)
    must_succeed(job)
    assert "log-probs of" not in job.log
    again, keeps = (read_metrics(tmp_path / name, "train/loss") for name in ("again", "keeps"))
    assert again == pytest.approx(keeps[2:], rel=1e-4)


def test_dpo_starts_at_its_reference_and_so_does_a_script_of_nemo_aligner(data, sft_run, tmp_path):
    """A script with the calls of NeMo-Aligner's gives the same numbers."""
    base = sft_run / "checkpoints" / "megatron_gpt_sft.nemo"
    options = ["++model.hidden_dropout=0.0", "model.data.validation_drop_last=True"]
    must_succeed(dpo(data, base, tmp_path / "own", *options))
    losses = read_metrics(tmp_path / "own", "train/loss")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert read_metrics(tmp_path / "own", "train/margin")[0] == pytest.approx(0, abs=1e-5)

    names = ("train_margin", "train_grad_norm", "val_loss", "val_logprobs_chosen_mean")
    must_equal_own(functools.partial(dpo, data, base), "dpo.py", tmp_path, options, names)


@pytest.mark.full
def test_kto_on_two_data_parallel_ranks_learns_and_resumes_exactly(data, sft_run, tmp_path):
    base = sft_run / "checkpoints" / "megatron_gpt_sft.nemo"
    must_succeed(kto(data, base, tmp_path / "whole", ranks=2))
    validation = read_metrics(tmp_path / "whole", "validation/loss")
    assert validation[1] < validation[0] < 0.5  # that of the reference
    keys = ("train/loss", "train/kl", "train/grad_norm")
    must_resume_exactly(functools.partial(kto, data, base), tmp_path, [], keys)


@pytest.mark.full
def test_kto_starts_at_its_reference_and_so_does_a_script_of_nemo_aligner(data, sft_run, tmp_path):
    """A script with the calls of NeMo-Aligner's gives the same numbers."""
    base = sft_run / "checkpoints" / "megatron_gpt_sft.nemo"
    options = ["++model.hidden_dropout=0.0", "model.data.validation_drop_last=True"]
    must_succeed(kto(data, base, tmp_path / "own", *options))
    losses = read_metrics(tmp_path / "own", "train/loss")
    assert losses[0] == pytest.approx(0.5, abs=1e-5)
    assert read_metrics(tmp_path / "own", "train/kl")[0] == pytest.approx(0, abs=1e-5)

    names = ("train_kl", "train_grad_norm", "val_loss", "val_rewards_margin")
    must_equal_own(functools.partial(kto, data, base), "kto.py", tmp_path, options, names)


@some_of("victim", [0, 1])
def test_a_killed_rank_ends_the_job(data, tiny_tokenizer_dir, tmp_path, victim):
    # Minutes, for the case that this test itself is killed.
    long = [
        "trainer.sft.max_steps=5000",
        "trainer.sft.max_epochs=5000",
        "trainer.sft.val_check_interval=-1",
    ]
    with sft(data, tiny_tokenizer_dir, tmp_path / "sft", *long, ranks=2) as job:
        wait_for_log(job, "Training steps")
        time.sleep(1.0)
        zero = psutil.Process(job.process.pid)
        one = min(zero.children(), key=lambda child: (child.create_time(), child.pid))
        (zero, one)[victim].kill()
        assert job.wait(30) != 0
        assert not job.leftovers(15)


@pytest.mark.full
@pytest.mark.parametrize("options", [[], LORA], ids=["full", "lora"])
def test_spin_on_two_data_parallel_ranks_learns_and_resumes_exactly(
    data, sft_run, tmp_path, options
):
    base = sft_run / "checkpoints" / "megatron_gpt_sft.nemo"
    must_succeed(spin(data, base, tmp_path / "whole", *options, ranks=2))
    whole = tmp_path / "whole"
    assert read_metrics(whole, "train/iteration") == [1, 1, 1, 2, 2, 2]
    assert read_metrics(whole, "train/ref_policy_kl_penalty") == [0.2] * 3 + [0.4] * 3
    losses = read_metrics(whole, "train/loss")
    assert losses[2] < losses[0] and losses[5] < losses[3]
    validation = read_metrics(whole, "validation/loss")
    assert len(validation) == 3
    assert len(read_metrics(whole, "train/generate")) == 2  # for three steps each
    assert (whole / "checkpoints" / "megatron_gpt.nemo").is_file()
    samples = [json.loads(line) for line in (whole / "train_samples.jsonl").open()]
    assert {row["step"] for row in samples} == {0, 3}

    resume_from(whole, tmp_path / "again", lost_step=6)  # goes on within the second iteration
    must_succeed(spin(data, base, tmp_path / "again", *options, ranks=2))
    for key in ("loss", "margin", "grad_norm", "avg_generated_lengths"):
        again = read_metrics(tmp_path / "again", f"train/{key}")
        assert again == read_metrics(whole, f"train/{key}")[4:], key
    assert read_metrics(tmp_path / "again", "validation/loss") == validation[2:]


@pytest.mark.full
def test_spin_starts_at_its_reference_and_so_does_a_script_of_nemo_aligner(
    data, sft_run, tmp_path
):
    """A script with the calls of NeMo-Aligner's gives the same numbers."""
    base = sft_run / "checkpoints" / "megatron_gpt_sft.nemo"
    options = ["++model.hidden_dropout=0.0", "model.data.validation_ds.drop_last=True"]
    must_succeed(spin(data, base, tmp_path / "own", *options))
    losses = read_metrics(tmp_path / "own", "train/loss")
    for first in (0, 3):
        assert losses[first] == pytest.approx(math.log(2), abs=1e-5)
        margin = read_metrics(tmp_path / "own", "train/margin")[first]
        assert margin == pytest.approx(0, abs=1e-4)

    names = ("train_margin", "train_grad_norm", "val_loss", "train_avg_generated_lengths")
    must_equal_own(functools.partial(spin, data, base), "spin.py", tmp_path, options, names)
