# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Knowledge distillation as a user does it: a teacher's logits, stopped and continued; a student
on two ranks, resumed; one that learns from a served teacher and its own responses; and bad input.
"""

from pathlib import Path

import pytest

from nemo_aligner.data.nlp.topk_logits import from_record
from nemo_aligner.servers.ports import find_free_port
from tests.data_sets import read
from tests.functional.jobs import (
    CPU,
    ScriptJob,
    must_fail_with,
    must_succeed,
    read_metrics,
    write_lines,
)
from tests.functional.test_sft_rm_scripts import (
    BATCHES,
    DROPOUT,
    LORA,
    must_resume_exactly,
    prefix,
    sft,
    training,
)

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
COMPUTE = str(ROOT / "examples/nlp/synthetic_data_gen/compute_topk_logits.py")
RESPONSES = ["was a joy", "was dull", "was so, so long", "is bad"]
EXAMPLES = {"train": 18, "validation": 6}
ONE_STEP = ["model.num_layers=1", "trainer.sft.max_steps=1", "trainer.sft.val_check_interval=1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, count in EXAMPLES.items():
        lines = [{"input": f"the film {i}", "output": RESPONSES[i % 4]} for i in range(count)]
        write_lines(folder / f"sft_{name}.jsonl", lines)
    return folder


def tuned(data, tokenizer, name, *overrides):
    """The `.nemo` of an SFT job."""
    must_succeed(sft(data, tokenizer, data / name, *overrides))
    return data / name / "checkpoints" / "megatron_gpt_sft.nemo"


@pytest.fixture(scope="module")
def teacher(data, tiny_tokenizer_dir):
    """A model that is surer of its tokens than one from random weights."""
    longer = ["max_epochs=9", "max_steps=30", "val_check_interval=30"]
    return tuned(data, tiny_tokenizer_dir, "teacher", *(f"trainer.sft.{key}" for key in longer))


@pytest.fixture(scope="module")
def student(data, tiny_tokenizer_dir):
    """A smaller model."""
    small = ["model.hidden_size=16", "model.num_attention_heads=2"]
    return tuned(data, tiny_tokenizer_dir, "student", *ONE_STEP, *small)


@pytest.fixture(scope="module")
def other(data, reversed_tokenizer_dir):
    """One of another tokenizer."""
    return tuned(data, reversed_tokenizer_dir, "other", *ONE_STEP)


def compute(data, teacher, out, *overrides, name="train", **kwargs) -> ScriptJob:
    return ScriptJob(
        COMPUTE,
        out.with_suffix(".log"),
        [
            *CPU,
            f"pretrained_checkpoint.restore_from_path={teacher}",
            f"data.data.file_path={data}/sft_{name}.jsonl",
            f"output_path={out}",
            "top_k=5",
            *BATCHES,
            *overrides,
        ],
        **kwargs,
    )


@pytest.fixture(scope="module")
def logits(data, teacher):
    """The files of both data sets, the first written by two data-parallel ranks."""
    files = {name: data / f"logits_{name}.jsonl" for name in EXAMPLES}
    must_succeed(compute(data, teacher, files["train"], ranks=2))
    must_succeed(compute(data, teacher, files["validation"], name="validation"))
    return files


def distil(files, student, log_dir, *overrides, **kwargs) -> ScriptJob:
    own = "trainer.knowledge_distillation"
    return training(
        "train_gpt_knowledge_distillation.py",
        log_dir,
        f"pretrained_checkpoint.restore_from_path={student}",
        *prefix(files["train"], files["validation"]),
        *BATCHES,
        DROPOUT,
        f"{own}.max_steps=4",
        f"{own}.val_check_interval=2",
        *overrides,
        **kwargs,
    )


def test_a_stopped_job_goes_on_and_the_split_does_not_matter(data, teacher, logits, tmp_path):
    """A file that was cut within a line, continued on one rank, equals that of two ranks."""
    whole = logits["train"].read_bytes()
    assert [line["index"] for line in read(logits["train"])] == list(range(EXAMPLES["train"]))
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(whole[: len(whole) // 2])
    must_succeed(compute(data, teacher, cut, "model.global_batch_size=3"))
    for mine, theirs in zip(read(cut), read(logits["train"]), strict=True):
        for a, b in zip(from_record(mine), from_record(theirs), strict=True):
            assert a.shape == b.shape and abs(a - b).max() < 1e-5

    part = tmp_path / "part.jsonl"
    must_succeed(compute(data, teacher, part, "start_from_idx=5", "end_at_idx=8"))
    assert [(line["index"], line["rows"]) for line in read(part)] == [(n, 4) for n in range(5, 9)]


@pytest.mark.parametrize("options", [[], LORA], ids=["full", "lora"])
def test_a_student_on_two_data_parallel_ranks_learns_and_resumes_exactly(
    logits, student, tmp_path, options
):
    def job(folder):
        own = [*options, "model.knowledge_distillation.sft_loss_weight=0.1"]
        return distil(logits, student, folder, *own, ranks=2)

    whole = tmp_path / "whole"
    must_succeed(job(whole))
    validation = read_metrics(whole, "validation/kd_loss")
    assert 0 < validation[1] < validation[0]
    assert 0 < read_metrics(whole, "train/teacher_mass")[0] <= 1
    assert (whole / "checkpoints/megatron_gpt_knowledge_distillation.nemo").is_file()
    must_resume_exactly(job, whole)


def test_logits_that_do_not_fit(data, teacher, logits, other, tmp_path):
    words = "the logits are those of another tokenizer"
    must_fail_with(compute(data, other, logits["train"]), words)
    job = compute(data, teacher, tmp_path / "out.jsonl", "top_k=301")
    must_fail_with(job, "top_k=301 is above the 300 tokens of the vocabulary")


# --- on-policy


def served(teacher, log, port, *overrides, **kwargs) -> ScriptJob:
    return ScriptJob(
        "serve_teacher.py",
        log,
        [
            *CPU,
            f"pretrained_checkpoint.restore_from_path={teacher}",
            f"inference.port={port}",
            "inference.top_k=300",
            "server.frontend=asgi",
            *overrides,
        ],
        **kwargs,
    )


def on_policy(data, student, log_dir, port, *overrides, **kwargs) -> ScriptJob:
    return distil(
        {name: data / f"sft_{name}.jsonl" for name in EXAMPLES},
        student,
        log_dir,
        "model.knowledge_distillation.on_policy.fraction=0.5",
        "model.knowledge_distillation.on_policy.length_params.max_length=8",
        "model.knowledge_distillation.outside_top_k=bucket",
        "model.data.columns={prompt: input, response: output}",
        f"remote_teacher.port={port}",
        "remote_teacher.init_timeout_s=60",
        *overrides,
        **kwargs,
    )


@pytest.fixture(scope="module")
def port(data, teacher):
    """Of a server of the teacher on two tensor-parallel ranks."""
    port = find_free_port()
    split = ["model.tensor_model_parallel_size=2", "model.sequence_parallel=True"]
    with served(teacher, data / "served.log", port, *split, ranks=2):
        yield port


@pytest.mark.parametrize("options", [[], LORA], ids=["weights", "adapters"])
def test_a_student_learns_from_its_own_responses_and_resumes_exactly(
    data, student, port, tmp_path, options
):
    def job(folder):
        return on_policy(data, student, folder, port, *options, ranks=2)

    whole = tmp_path / "whole"
    must_succeed(job(whole))
    assert sorted(read_metrics(whole, "train/on_policy")) == [0, 0, 1, 1]
    validation = read_metrics(whole, "validation/kd_loss")
    assert options or 0 < validation[1] < validation[0]  # four steps are few for adapters
    assert read_metrics(whole, "train/teacher_mass")[0] == pytest.approx(1)
    must_resume_exactly(job, whole)


def test_a_teacher_with_another_tokenizer_or_none_at_all(data, port, other, tmp_path):
    with on_policy(data, other, tmp_path / "kd", port) as job:
        assert job.wait() == 1 and "tokenizer" in job.log.splitlines()[-1]
    nobody, soon = find_free_port(), "remote_teacher.init_timeout_s=1"
    with on_policy(data, other, tmp_path / "no", nobody, soon) as job:
        assert job.wait() and "start the server job first" in job.log.lower()
