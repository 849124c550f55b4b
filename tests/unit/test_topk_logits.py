# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Files of a teacher's logits: what is written is read, in batches; other files are refused; and
a student of all forms learns from them. test_distillation_scripts.py has the commands.
"""

import copy
import json

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.algorithms.topk_logits import write_topk_logits
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.tokenizer import tokenizer_fingerprint
from nemo_aligner.data.nlp import builders
from nemo_aligner.data.nlp.topk_logits import KnowledgeDistillationDataset, TopKExample, to_line
from nemo_aligner.models.nlp.gpt.megatron_gpt_knowledge_distillation import (
    GPTKnowledgeDistillationModel,
    TopKTeacherModel,
)
from tests.cases import rows
from tests.data_sets import sft
from tests.tiny_models import tiny_config
from tests.unit.test_config_checks import check

pytestmark = pytest.mark.slow

K, LENGTH, COUNT = 3, 24, 5


def example(number: int, top_k: int = K) -> TopKExample:
    """One of any length, of which a part counts."""
    random = np.random.default_rng(number)
    width = 6 + 3 * number
    mask = np.zeros(width, dtype=np.float32)
    mask[2 + number % 3 : width - number % 2] = 1
    counted = int(mask.sum())
    logits = -np.sort(random.random((counted, top_k), dtype=np.float32), axis=1)
    return TopKExample(
        tokens=random.integers(0, 290, width),
        labels=random.integers(0, 290, width),
        loss_mask=mask,
        topk_logits=logits - logits[:, :1],
        topk_token_ids=random.integers(0, 290, (counted, top_k)),
        log_sum_exp_logits=1 + random.random(counted, dtype=np.float32),
    )


def text(tokenizer, top_k: int = K) -> str:
    fingerprint = tokenizer_fingerprint(tokenizer)
    return "".join(to_line(example(n, top_k), n, COUNT, fingerprint, "0") for n in range(COUNT))


def old_text() -> str:
    """As NeMo-Aligner writes it: nested lists with numbers at all positions."""
    lines = []
    for number in range(COUNT):
        each = example(number)
        record = {key: getattr(each, key).tolist() for key in ("tokens", "labels", "loss_mask")}
        counts = each.loss_mask != 0
        for key in ("topk_logits", "topk_token_ids", "log_sum_exp_logits"):
            values = getattr(each, key)
            spread = np.full((len(counts), *values.shape[1:]), 7, dtype=values.dtype)
            spread[counts] = values
            record[key] = spread.tolist()
        lines.append(json.dumps({**record, "index": number}) + "\n")
    return "".join(lines)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "logits.jsonl"


@pytest.mark.parametrize("old", [False, True], ids=["ours", "NeMo-Aligner's"])
@pytest.mark.parametrize("top_k", [None, 2])
def test_items_are_what_was_written(tiny_tokenizer, file, old, top_k):
    file.write_text(old_text() if old else text(tiny_tokenizer))
    data = KnowledgeDistillationDataset([file], tiny_tokenizer, LENGTH, {"top_k": top_k})
    assert len(data) == COUNT
    for number, item in enumerate(data[n] for n in range(COUNT)):
        each = example(number)
        counts = torch.from_numpy(each.loss_mask != 0)
        for key in ("tokens", "labels", "loss_mask"):
            assert item[key].tolist() == getattr(each, key).tolist()
        for key in ("topk_logits", "topk_token_ids"):
            expected = torch.from_numpy(getattr(each, key))[:, :top_k]
            assert torch.equal(item[key][counts], expected)
            assert not item[key][~counts].any()
        expected = torch.from_numpy(each.log_sum_exp_logits)
        assert torch.equal(item["log_sum_exp_logits"][counts], expected)

    batch = data.collate_fn([data[0], data[4], data[-1]])
    assert batch["tokens"].shape == (3, LENGTH)
    assert batch["topk_logits"].shape == (3, LENGTH, top_k or K)
    assert batch["loss_mask"].sum(1).tolist() == [example(0).loss_mask.sum(), 15.0, 0.0]
    assert batch["tokens"][0, 6:].tolist() == [tiny_tokenizer.eos_id] * (LENGTH - 6)
    assert data.collate_fn([data[0]])["tokens"].shape == (1, 16)


def test_bad_files_end_with_one_line(tiny_tokenizer, file):
    lines = text(tiny_tokenizer).splitlines()
    fingerprint = tokenizer_fingerprint(tiny_tokenizer)
    each, record = example(2), json.loads(lines[2])
    line = lambda each, tokens=fingerprint: to_line(each, 2, COUNT, tokens, "0").rstrip()
    ids = np.zeros_like(each.topk_token_ids)
    ids[0, 0] = tiny_tokenizer.vocab_size
    first = {key: getattr(each, key)[:1] for key in TopKExample._fields[3:]}
    unchecked = {key: value for key, value in record.items() if key != "checksum"}
    for third, message in (
        (
            line(each, "5 tokens, end 0, 01"),
            "line 3: .*of another tokenizer .5 tokens, end 0",
        ),
        (json.dumps({**record, "tokens": record["labels"]}), "line 3: .*not what was .*checksum"),
        ('{"input": "a"}', "line 3: .*holds no logits of a teacher: tokens, labels, loss_mask"),
        (line(each._replace(topk_token_ids=ids)), "line 3: token ids from 0 to 300, but the tok"),
        (line(each._replace(**first)), "line 3: 1 positions have logits and 8 count in the loss"),
        (json.dumps({**unchecked, "topk_logits": "?"}), "line 3: its arrays do not belong toget"),
        (None, "holds 4 of 5 lines: compute_topk_logits.py was stopped"),
        (line(example(2, 2)), "lines have 2, 3 logits of each position; set model.data.top_k=2"),
        (lines[2], "has the 3 largest logits, fewer than model.data.top_k"),
    ):
        kept = [*lines[:2], third, *lines[3:]] if third else lines[:-1]
        file.write_text("".join(f"{each}\n" for each in kept))
        settings = {"top_k": 4} if third == lines[2] else None
        with pytest.raises(UserError, match=message) as caught:
            KnowledgeDistillationDataset([file], tiny_tokenizer, LENGTH, settings)
        said = str(caught.value)
        assert "\n" not in said and (str(file) in said or "lines have" in said), message


def test_a_name_with_a_number_in_it_stands_for_several_files(tiny_tokenizer, tmp_path):
    for number in range(2):
        (tmp_path / f"logits_{number}.jsonl").write_text(text(tiny_tokenizer))
    names = {part: [f"{tmp_path}/logits_CHUNK_ID.jsonl"] for part in ("train", "validation")}

    def build(n_chunks):
        cfg = OmegaConf.create({"data": {"top_k": None}})
        given = (cfg, names, "chunked_jsonl", None, [-1] * 3, LENGTH, 1, tiny_tokenizer)
        make = builders.build_train_valid_test_knowledge_distillation_datasets
        return make(*given, n_chunks=n_chunks)

    assert [len(each) for each in build(2)[:2]] == [2 * COUNT, 2 * COUNT]
    assert [len(each) for each in build({"train": 2, "validation": 1})[:2]] == [2 * COUNT, COUNT]
    with pytest.raises(ConfigError, match="data_prefix.train has names with CHUNK_ID, but"):
        build(None)


# --- a teacher and its student


def job(tokenizer_dir, **distillation):
    model = {"micro_batch_size": 2, "global_batch_size": 4, "precision": 32, "seed": 1}
    model |= {"knowledge_distillation": distillation, "init_method_std": 0.3}
    return OmegaConf.merge(tiny_config(tokenizer_dir), model)


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def check_that_lines_belong_to_their_job(teacher, examples, file):
    """The same command keeps the lines; another teacher, or other examples, are an error."""
    content = file.read_bytes()
    write_topk_logits(teacher, examples, file, top_k=6)
    assert file.read_bytes() == content
    cut = copy.copy(examples)
    cut.collate_fn = lambda items: {
        key: value[:, :5] if torch.is_tensor(value) and value.dim() == 2 else value
        for key, value in examples.collate_fn(items).items()
    }
    with pytest.raises(UserError, match="command .other tokens, other labels, other loss_mask"):
        write_topk_logits(teacher, cut, file, top_k=6)
    weight = teacher.unwrapped()[0].decoder.layers[0].mlp.linear_fc1.weight
    weight.data[0, 0] += 1
    with pytest.raises(UserError, match="of another teacher, data set or command"):
        write_topk_logits(teacher, examples, file, top_k=6)
    weight.data[0, 0] -= 1


@pytest.mark.parametrize("chat", [False, True], ids=["texts", "conversations"])
def test_a_student_with_its_teachers_weights_has_nothing_to_learn(
    tiny_tokenizer_dir, tiny_tokenizer, tmp_path, file, write, chat
):
    """Of texts and of conversations, whose responses count alone."""
    texts = [f"the film {i}" for i in range(COUNT)]
    if chat:
        (tmp_path / "template.jinja").write_text(TEMPLATE)
        roles = ("user", "assistant") * 2
        said = [zip(roles, (each, "a joy", "so?", "dull")) for each in texts]
        records = [{"messages": [{"role": r, "content": c} for r, c in turns]} for turns in said]
    else:
        records = [{"input": each, "output": "was a joy"} for each in texts]
    template = str(tmp_path / "template.jinja") if chat else None
    examples = sft(write(*records), tiny_tokenizer, chat_template=template)
    teacher = TopKTeacherModel(job(tiny_tokenizer_dir))
    write_topk_logits(teacher, examples, file, top_k=6)
    check_that_lines_belong_to_their_job(teacher, examples, file)
    data = KnowledgeDistillationDataset([file], tiny_tokenizer, 64)
    batch = data.collate_fn([data[n] for n in range(4)])
    whole = examples.collate_fn([examples[n] for n in range(4)])
    mask = whole["loss_mask"][:, : batch["loss_mask"].size(1)]
    assert torch.equal(batch["loss_mask"][:, : mask.size(1)], mask) and mask.sum() > 4

    how = {"outside_top_k": "bucket", "kd_loss": "jsd"}
    student = GPTKnowledgeDistillationModel(job(tiny_tokenizer_dir, **how))
    weights = [list(model.unwrapped()[0].parameters()) for model in (student, teacher)]
    assert len(weights[0]) > 10
    for ours, theirs in zip(*weights, strict=True):
        ours.data.copy_(theirs.data)
    loss, metrics = student.get_loss_and_metrics(batch, forward_only=True)
    assert abs(loss) < 1e-6 and 0.02 < metrics["teacher_mass"] < 1
    assert metrics["weights"] == float(mask.sum())
    lists = {**batch, "log_sum_exp_logits": list(batch["log_sum_exp_logits"])}
    assert student.get_loss_and_metrics(lists, forward_only=True)[0] == loss
    for ours in weights[0]:
        ours.data += 0.1 * torch.randn_like(ours)
    assert student.get_loss_and_metrics(batch, forward_only=True)[0] > 1e-3


def test_all_logits_are_the_whole_distribution(tiny_tokenizer_dir, tiny_tokenizer, file):
    """With k the size of the vocabulary nothing is outside, whatever `outside_top_k` says."""
    file.write_text(text(tiny_tokenizer, top_k=tiny_tokenizer.vocab_size))
    data = KnowledgeDistillationDataset([file], tiny_tokenizer, LENGTH)
    ids = torch.arange(tiny_tokenizer.vocab_size)
    batch = data.collate_fn([data[n] for n in range(4)])
    batch["topk_token_ids"] = ids.expand_as(batch["topk_token_ids"]).contiguous()
    losses = []
    for outside in ("renormalize", "bucket"):
        model = GPTKnowledgeDistillationModel(job(tiny_tokenizer_dir, outside_top_k=outside))
        losses.append(model.get_loss_and_metrics(batch, forward_only=True)[0])
    assert losses[0] == losses[1] > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    rows("""
KD.kd_loss_weight=0 -> are both 0: nothing would be learned
KD.jsd_beta=1.0 -> jsd_beta=1.0 must be above 0 and below 1
KD.outside_top_k=bucket KD.target_logits_scale=0.5 -> bucket needs
KD.cross_tokenizer=True -> is not supported yet: logits of another vocabulary
data.top_k=1 -> one logit of each token
data.data_impl=mmap -> data_impl=mmap holds tokens only
"""),
)
def test_settings_that_cannot_work(tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        check_keys(tmp_path, overrides)


def check_keys(tmp_path, overrides):
    own = overrides.replace("KD.", "knowledge_distillation.").split()
    check("gpt_knowledge_distillation", tmp_path, *(f"model.{text}" for text in own))


def test_one_candidate_teaches_with_the_rest_or_the_labels(tmp_path):
    for other in ("KD.outside_top_k=bucket", "KD.sft_loss_weight=0.1"):
        check_keys(tmp_path, f"data.top_k=1 {other}")
