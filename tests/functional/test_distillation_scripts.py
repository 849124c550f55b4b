# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Knowledge distillation as a user does it: a teacher's logits, stopped and continued; a student
on two ranks, resumed; one that learns from a served teacher and its own responses; and bad input.
"""

import json
from pathlib import Path

import pytest

from nemo_aligner.data.nlp.topk_logits import from_record
from nemo_aligner.servers.ports import find_free_port
from tests.functional.jobs import ScriptJob, must_fail_with, must_succeed, read_metrics
from tests.functional.test_sft_rm_scripts import common, resume_from, sft

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COMPUTE = str(ROOT / "examples/nlp/synthetic_data_gen/compute_topk_logits.py")
RESPONSES = ["was a joy", "was dull", "was so, so long", "is bad"]
EXAMPLES = {"train": 18, "validation": 6}
LORA = ["model.peft.peft_scheme=lora", "model.peft.lora_tuning.target_modules=[all]"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, count in EXAMPLES.items():
        records = (
            {"input": f"the film {i}", "output": RESPONSES[i % len(RESPONSES)]}
            for i in range(count)
        )
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"sft_{name}.jsonl").write_text(text)
    return folder


@pytest.fixture(scope="module")
def teacher(data, tiny_tokenizer_dir):
    """A model that is surer of its tokens than one from random weights."""
    longer = ["trainer.sft.max_epochs=9", "trainer.sft.max_steps=30"]
    longer.append("trainer.sft.val_check_interval=30")
    must_succeed(sft(data, tiny_tokenizer_dir, data / "teacher", *longer))
    return data / "teacher" / "checkpoints" / "megatron_gpt_sft.nemo"


@pytest.fixture(scope="module")
def student(data, tiny_tokenizer_dir):
    """A smaller model."""
    small = ["model.num_layers=1", "model.hidden_size=16", "model.num_attention_heads=2"]
    small += ["trainer.sft.max_steps=1", "trainer.sft.val_check_interval=1"]
    must_succeed(sft(data, tiny_tokenizer_dir, data / "student", *small))
    return data / "student" / "checkpoints" / "megatron_gpt_sft.nemo"


def compute(data, teacher, out, *overrides, name="train", **kwargs) -> ScriptJob:
    return ScriptJob(
        COMPUTE,
        out.with_suffix(".log"),
        [
            "trainer.accelerator=cpu",
            "trainer.precision=32",
            f"pretrained_checkpoint.restore_from_path={teacher}",
            f"data.data.file_path={data}/sft_{name}.jsonl",
            f"output_path={out}",
            "top_k=5",
            "model.global_batch_size=4",
            "model.micro_batch_size=1",
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
    log_dir.mkdir(exist_ok=True)
    own = "trainer.knowledge_distillation"
    return ScriptJob(
        "train_gpt_knowledge_distillation.py",
        log_dir.with_suffix(".log"),
        [
            *common(log_dir),
            f"pretrained_checkpoint.restore_from_path={student}",
            f"model.data.data_prefix={{train: [{files['train']}], "
            f"validation: [{files['validation']}]}}",
            "model.data.validation_drop_last=False",
            "model.global_batch_size=4",
            "model.micro_batch_size=1",
            "trainer.precision=32",
            "++model.hidden_dropout=0.1",  # a resumed job must draw the same numbers
            f"{own}.max_steps=4",
            f"{own}.val_check_interval=2",
            *overrides,
        ],
        **kwargs,
    )


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.full
def test_a_stopped_job_goes_on_and_the_split_does_not_matter(data, teacher, logits, tmp_path):
    """A file that was cut within a line, continued on one rank, equals that of two ranks."""
    whole = logits["train"].read_bytes()
    assert [line["index"] for line in lines(logits["train"])] == list(range(EXAMPLES["train"]))
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(whole[: len(whole) // 2])
    must_succeed(compute(data, teacher, cut, "model.global_batch_size=3"))
    for mine, theirs in zip(lines(cut), lines(logits["train"]), strict=True):
        for a, b in zip(from_record(mine), from_record(theirs), strict=True):
            assert a.shape == b.shape and abs(a - b).max() < 1e-5

    part = tmp_path / "part.jsonl"
    must_succeed(compute(data, teacher, part, "start_from_idx=5", "end_at_idx=8"))
    assert [(line["index"], line["rows"]) for line in lines(part)] == [
        (index, 4) for index in range(5, 9)
    ]


@pytest.mark.full
@pytest.mark.parametrize("options", [[], LORA], ids=["full", "lora"])
def test_a_student_on_two_data_parallel_ranks_learns_and_resumes_exactly(
    logits, student, tmp_path, options
):
    options = [*options, "model.knowledge_distillation.sft_loss_weight=0.1"]
    must_succeed(distil(logits, student, tmp_path / "whole", *options, ranks=2))
    assert len(read_metrics(tmp_path / "whole", "train/loss")) == 4
    validation = read_metrics(tmp_path / "whole", "validation/kd_loss")
    assert 0 < validation[1] < validation[0]
    assert 0 < read_metrics(tmp_path / "whole", "train/teacher_mass")[0] <= 1
    name = "megatron_gpt_knowledge_distillation.nemo"
    assert (tmp_path / "whole" / "checkpoints" / name).is_file()

    resume_from(tmp_path / "whole", tmp_path / "again", lost_step=4)
    must_succeed(distil(logits, student, tmp_path / "again", *options, ranks=2))
    for key in ("train/loss", "train/kd_loss", "train/grad_norm"):
        again, whole = (read_metrics(tmp_path / name, key) for name in ("again", "whole"))
        assert again == whole[2:]
    assert (
        read_metrics(tmp_path / "again", "validation/loss")
        == read_metrics(tmp_path / "whole", "validation/loss")[1:]
    )


@pytest.mark.full
def test_logits_of_another_tokenizer(data, logits, reversed_tokenizer_dir, tmp_path):
    small = ["model.num_layers=1", "trainer.sft.max_steps=1", "trainer.sft.val_check_interval=1"]
    must_succeed(sft(data, reversed_tokenizer_dir, tmp_path / "other", *small))
    other = tmp_path / "other" / "checkpoints" / "megatron_gpt_sft.nemo"
    must_fail_with(
        distil(logits, other, tmp_path / "kd"),
        f"{logits['train']}, line 1: the logits are those of another tokenizer",
    )
    must_fail_with(
        compute(data, other, logits["train"]),
        "the logits are those of another tokenizer",
    )


@pytest.mark.full
def test_more_logits_than_the_vocabulary_has(data, teacher, tmp_path):
    must_fail_with(
        compute(data, teacher, tmp_path / "out.jsonl", "top_k=301"),
        "top_k=301 is above the 300 tokens of the vocabulary",
    )


@pytest.mark.full
def test_a_file_of_another_data_set_is_not_continued(data, teacher, logits):
    before = logits["validation"].read_bytes()
    must_fail_with(
        compute(data, teacher, logits["validation"]),
        "it holds the logits of another teacher, data set or command (rows=6)",
    )
    assert logits["validation"].read_bytes() == before


# --- on-policy


def served(teacher, log, port, *overrides, **kwargs) -> ScriptJob:
    return ScriptJob(
        "serve_teacher.py",
        log,
        [
            "trainer.accelerator=cpu",
            "trainer.precision=32",
            f"pretrained_checkpoint.restore_from_path={teacher}",
            f"inference.port={port}",
            "inference.top_k=300",
            "server.frontend=asgi",
            *overrides,
        ],
        **kwargs,
    )


def on_policy(data, student, log_dir, port, *overrides, **kwargs) -> ScriptJob:
    files = {name: data / f"sft_{name}.jsonl" for name in EXAMPLES}
    return distil(
        files,
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


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [[], LORA],
    ids=["weights", "adapters"],
)
def test_a_student_learns_from_its_own_responses_and_resumes_exactly(
    data, student, port, tmp_path, options
):
    must_succeed(on_policy(data, student, tmp_path / "whole", port, *options, ranks=2))
    assert sorted(read_metrics(tmp_path / "whole", "train/on_policy")) == [0, 0, 1, 1]
    validation = read_metrics(tmp_path / "whole", "validation/kd_loss")
    assert options or 0 < validation[1] < validation[0]  # four steps are few for adapters
    assert read_metrics(tmp_path / "whole", "train/teacher_mass")[0] == pytest.approx(1)

    resume_from(tmp_path / "whole", tmp_path / "again", lost_step=4)
    must_succeed(on_policy(data, student, tmp_path / "again", port, *options, ranks=2))
    for key in ("train/loss", "train/response_length", "train/grad_norm"):
        again, whole = (read_metrics(tmp_path / name, key) for name in ("again", "whole"))
        assert again == whole[2:]


@pytest.mark.full
def test_a_teacher_with_another_tokenizer_or_none_at_all(
    data, port, reversed_tokenizer_dir, tmp_path
):
    small = ["model.num_layers=1", "trainer.sft.max_steps=1", "trainer.sft.val_check_interval=1"]
    must_succeed(sft(data, reversed_tokenizer_dir, tmp_path / "other", *small))
    other = tmp_path / "other" / "checkpoints" / "megatron_gpt_sft.nemo"
    job = on_policy(data, other, tmp_path / "kd", port)
    with job:
        assert job.wait() == 1 and "tokenizer" in job.log.splitlines()[-1]
    nobody = find_free_port()
    job = on_policy(data, other, tmp_path / "no", nobody, "remote_teacher.init_timeout_s=1")
    with job:
        assert job.wait() and "start the server job first" in job.log.lower()
