# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probs of the reference policy that are kept in files: what is read is what was computed, for
DPO and KTO; of another model or other data they are computed again, and so are damaged ones.
"""

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import default_collate

from nemo_aligner.algorithms import reference_log_probs
from nemo_aligner.algorithms.dpo import DPOTrainer
from nemo_aligner.algorithms.reference_log_probs import (
    ShardWriter,
    WithReferenceLogProbs,
    with_reference_log_probs,
)
from nemo_aligner.core.errors import SaveError, UserError
from nemo_aligner.data.nlp.datasets import DPOModelDataset
from nemo_aligner.launch.supervised_job import build_preference_dataloaders
from nemo_aligner.models.nlp.gpt.megatron_gpt_dpo_model import (
    MegatronGPTDPOModel,
    MegatronGPTKTOModel,
)
from tests.cases import some_of
from tests.tiny_models import tiny_config

WIDTH, ITEMS = 40, 39
TEXTS = ["was a joy", " is dull, and far too long", " bad", "ly made, but well played; warm"]


def pairs(count=ITEMS, word="film"):
    for i in range(count):
        texts = {"chosen": TEXTS[i % 4], "rejected": TEXTS[(i + 1 + i % 3) % 4]}
        yield {"prompt": f"the {word} {i}", **texts}


def labelled():
    for i in range(ITEMS):
        yield {"prompt": f"the film {i}", "response": TEXTS[i % 4], "preference": i % 2 == 0}


class Reference:
    """A model whose log-probs are numbers of the tokens; it counts its passes."""

    REFERENCE_COLUMNS = MegatronGPTDPOModel.REFERENCE_COLUMNS
    forward_micro_batch_size = 4
    passes = 0

    def __init__(self, tokenizer, weights="0", **cfg):
        self.tokenizer, self.weights = tokenizer, weights
        self.cfg = OmegaConf.create({"precision": 32, "rotary_base": 10000, **cfg})
        self.is_reference = False

    @contextlib.contextmanager
    def as_reference_policy(self):
        self.is_reference = True
        yield
        self.is_reference = False

    def checksum_of_base(self):
        return self.weights

    def get_ref_policy_logprobs(self, batch):
        assert self.is_reference
        self.passes += 1
        return self.values(batch)

    def values(self, batch):
        tokens = torch.cat([batch["chosen"], batch["rejected"]])
        return -torch.sqrt(tokens[:, 1:].float() + 0.1 * torch.arange(WIDTH - 1))


@pytest.fixture
def case(tiny_tokenizer, tmp_path, write):
    """Data, a model and a function that gives the data with log-probs and the number of passes."""
    (tmp_path / "weights").write_bytes(b"weights")

    def build(name="other.jsonl", settings=None, **options):
        path = write(*pairs(**options), name=name)
        return DPOModelDataset([path], tiny_tokenizer, WIDTH, settings)

    data = build("pairs.jsonl")

    def kept(model=None, data=data, name="train"):
        model = model or Reference(tiny_tokenizer)
        root = tmp_path / "kept"
        found = with_reference_log_probs(model, data, root, tmp_path / "weights", name)
        return found, model.passes

    parts = {"data": data, "build": build, "model": Reference(tiny_tokenizer)}
    return SimpleNamespace(**parts, kept=kept, root=tmp_path)


def rows(data):
    """All log-probs of a dataset."""
    items = [data[i] for i in range(len(data))]
    return torch.stack([item[name] for item in items for name in Reference.REFERENCE_COLUMNS])


def equal(left, right):
    return torch.equal(rows(left), rows(right))


def test_the_data_have_what_was_computed_once(case):
    kept, passes = case.kept()
    assert len(kept) == ITEMS and passes == 2  # sixteen times two pairs, and the rest
    for index in range(ITEMS):
        item = kept[index]
        whole = case.model.values(default_collate([case.data[index]]))
        for row, (name, mask) in zip(whole, Reference.REFERENCE_COLUMNS.items(), strict=True):
            counts = item[mask][1:] != 0
            assert counts.any() and torch.equal(item[name], torch.where(counts, row, 0))
    empty = kept[-1]
    assert not any(empty[name].any() for name in Reference.REFERENCE_COLUMNS)
    assert default_collate([empty, kept[0]])["ref_policy_log_probs_chosen"].shape == (2, WIDTH - 1)

    again, passes = case.kept()
    assert not passes and equal(again, kept)
    assert not list(case.root.glob("kept/partial*"))


def test_of_another_model_or_other_data_they_are_computed_again(case, tiny_tokenizer):
    case.kept()
    split = {"tensor_model_parallel_size": 2, "hidden_dropout": 0.1}
    assert case.kept(Reference(tiny_tokenizer, **split))[1] == 0
    changes = {"weights": {"weights": "1"}, "precision": {"precision": "bf16"}}
    changes["network"] = {"rotary_base": 5000}
    models = {name: Reference(tiny_tokenizer, **change) for name, change in changes.items()}
    for what, model in models.items():
        assert case.kept(model)[1] == 2, what
    data = {"text": {"word": "play"}, "number": {"count": ITEMS - 1}}
    data["end token"] = {"settings": {"append_eod": True}}
    for what, changed in data.items():
        assert case.kept(data=case.build(**changed))[1] == 2, what
    assert case.kept(data=case.data.select(case.data.documents[::-1].copy()))[1] == 2


def test_the_key_sees_lengths_templates_tokenizers_and_checkpoints(case, tiny_tokenizer, write):
    checkpoint, template = case.root / "weights", case.root / "template"
    ask = {"role": "user", "content": "film"}
    turns = [[ask, {"role": "assistant", "content": text}] for text in TEXTS]
    chat = {"prompt": turns[0][:1], "chosen": turns[0][1:], "rejected": turns[2][1:]}
    chats = write(chat, name="chat.jsonl")

    def key(data=case.data, tokenizer=tiny_tokenizer):
        return reference_log_probs._key(Reference(tokenizer), data, checkpoint)

    def of_template(text):
        template.write_text("{% for m in messages %}" + text + "{{ eos_token }}{% endfor %}")
        settings = {"chat_template": str(template)}
        return key(DPOModelDataset([chats], tiny_tokenizer, WIDTH, settings))

    other = copy.copy(tiny_tokenizer)
    other.tokenizer = copy.deepcopy(tiny_tokenizer.tokenizer)
    other.tokenizer.add_tokens(["film"])
    path = str(case.root / "pairs.jsonl")
    keys = [key(), key(DPOModelDataset([path], tiny_tokenizer, WIDTH - 1)), key(tokenizer=other)]
    keys += [of_template("{{ m.content }}"), of_template("{{ m.role }} {{ m.content }}")]
    assert key() == keys[0]
    checkpoint.write_bytes(b"Weights")
    assert len({*keys, key()}) == 6
    folder = case.root / "folder"
    folder.mkdir()
    checkpoint.rename(folder / "a")
    checkpoint = folder
    first = key()
    (folder / "a").rename(folder / "b")
    assert len({*keys, first, key()}) == 7


@pytest.mark.parametrize("name", ["0.values", "0.items", "meta.json", "CHECKSUMS.xxh128", None])
def test_damaged_files_are_computed_again_with_one_line(case, name, caplog):
    before = rows(case.kept()[0])
    (folder,) = (case.root / "kept").iterdir()
    if name is None:
        content = (folder / "0.values").read_bytes()
        (folder / "0.values").write_bytes(content[:-4] + b"\0\0\0\1")
    else:
        (folder / name).unlink()
    with caplog.at_level("WARNING"):
        again, passes = case.kept()
    assert passes == 2 and torch.equal(rows(again), before)
    (line,) = [r.message for r in caplog.records if "computed again" in r.message]
    assert str(folder) in line and "is damaged or incomplete" in line and "\n" not in line
    assert case.kept()[1] == 0


def test_files_of_other_items_are_refused_when_they_are_read(case):
    case.kept()
    (folder,) = (case.root / "kept").iterdir()
    columns = Reference.REFERENCE_COLUMNS
    with pytest.raises(UserError, match="it has 39 items, the data 38. Remove that folder"):
        WithReferenceLogProbs(case.build(count=38), folder, columns)
    other = WithReferenceLogProbs(case.build(word="play"), folder, columns)
    with pytest.raises(UserError, match=r"item 0 is another. Remove that folder"):
        other[0]


def test_the_second_of_two_jobs_at_once_leaves_the_files_of_the_first(case, tiny_tokenizer):
    class Slow(Reference):
        def get_ref_policy_logprobs(self, batch):
            if not self.passes:
                found.append(case.kept())  # another job does it all meanwhile
            return super().get_ref_policy_logprobs(batch)

    found = []
    kept, passes = case.kept(Slow(tiny_tokenizer))
    assert passes == found[0][1] == 2 and equal(kept, found[0][0])
    assert len(list((case.root / "kept").iterdir())) == 1


def test_a_full_disk_is_one_line_and_leaves_nothing(case, tiny_tokenizer, monkeypatch):
    add = ShardWriter.add

    def full(self, *args):
        if len(self._items) == 35:
            self._values.close()
            self._values = open("/dev/full", "wb", buffering=0)
        add(self, *args)

    monkeypatch.setattr(ShardWriter, "add", full)
    with pytest.raises(SaveError, match="no space left .* for .*/train-"):
        case.kept()
    assert not list((case.root / "kept").iterdir())


KINDS = {"dpo": (MegatronGPTDPOModel, pairs), "kto": (MegatronGPTKTOModel, labelled)}


@pytest.mark.slow
@some_of("peft", ["none", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_copy_is_kept_and_the_loss_is_that_of_log_probs_of_the_batch(
    tiny_tokenizer_dir, tmp_path, write, kind, peft
):
    """Of real models, which are not their references any more."""
    torch.manual_seed(0)
    cls, records = KINDS[kind]
    (tmp_path / "weights").write_bytes(b"weights")
    path = write(*records())
    data = {"data_prefix": {"train": [path], "validation": [path]}, "seq_length": WIDTH}
    model = cls(tiny_config(tiny_tokenizer_dir, micro_batch_size=2, data=data))
    model.init_peft({"peft_scheme": peft})
    start = {"restore_from_path": str(tmp_path / "weights")}
    limits = {"trainer": {kind: {"max_steps": 1, "max_epochs": 1}}}
    cfg = OmegaConf.create({"model": model.cfg, "pretrained_checkpoint": start, **limits})
    cfg.model[kind].ref_log_probs_dir = str(tmp_path / "kept")
    kept = build_preference_dataloaders(cfg, kind, model)
    assert model.init_policy_state_dict is None and model._swap_buffer is None
    assert len(list((tmp_path / "kept").iterdir())) == 2  # of training and validation data

    cfg.model[kind].ref_log_probs_dir = None
    fresh = build_preference_dataloaders(cfg, kind, model)
    assert (model.init_policy_state_dict is None) == (peft == "lora")
    with torch.no_grad():
        for chunk in model.model:
            for parameter in chunk.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn_like(parameter))
    trainer = DPOTrainer.__new__(DPOTrainer)
    trainer.model, trainer.collate_fn = model, None
    both = [trainer.with_reference(next(iter(loaders.train))) for loaders in (fresh, kept)]
    for name, mask in cls.REFERENCE_COLUMNS.items():
        counts = both[0][mask][:, 1:] != 0
        found, wanted = both[1][name][counts], both[0][name].cpu()[counts]
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)
    losses = [model.get_loss_and_metrics(batch, forward_only=True) for batch in both]
    for key, value in losses[0][1].items():
        assert losses[1][1][key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
