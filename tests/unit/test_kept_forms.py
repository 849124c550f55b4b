# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The form of conversations that a job was given is kept by its checkpoints and exports, and is
the default of what starts from them.
"""

import pytest
import transformers
from nemo.utils import logging
from omegaconf import OmegaConf

from nemo_aligner.checkpoint.hugging_face.writing import copy_tokenizer
from nemo_aligner.checkpoint.nemo_archive import write_config
from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.record_encoder import RecordEncoder, chat_form, say_default
from nemo_aligner.launch.model_loading import complete_model_config
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.models.nlp.gpt.tokenizers import build_tokenizer
from tests.cases import some_of
from tests.chat_forms import TEMPLATES
from tests.tiny_models import tiny_config
from tests.unit.test_script_steps import job_configuration

pytestmark = pytest.mark.slow

TALK = {"messages": [{"role": "user", "content": "hello"}]}
PLAIN = "{% for m in messages %}[{{ m.content }}${{ x }}]{{ eos_token }}{% endfor %}"
TOKENS = {"system_turn_start": "<s0>", "turn_start": "<s1>", "label_start": "<s2>"}
TOKENS |= {"end_of_turn": "\n", "end_of_name": "\n"}


@pytest.fixture
def forms(tmp_path):
    """Name to the keys of `model.data` that ask for a form."""
    file = tmp_path / "plain.jinja"
    file.write_text(PLAIN)
    return {
        "file": {"chat_template": str(file), "chat_template_kwargs": {"x": "!"}},
        "nemo": {"chat": True, "chat_prompt_tokens": TOKENS},
    }


def configured(path, tokenizer_dir=None, job="gpt_dpo", **data):
    """The section `model` of a job with these keys of `model.data` that starts from `path`, and
    the tokenizer; None: from random weights.
    """
    cfg = job_configuration(job, path, **{f"model.data.{key}": data[key] for key in data})
    if path is None:
        cfg.model = OmegaConf.merge(tiny_config(tokenizer_dir), {"data": cfg.model.data})
    model = complete_model_config(path, cfg.model, job)
    return model, build_tokenizer(model.tokenizer)


def save(cfg, path):
    if path.suffix:
        MegatronGPTModel(cfg).save_to(str(path))
    else:
        path.mkdir()
        write_config(path, cfg)
    return path


@some_of("suffix", [".nemo", ""])
@some_of("name", ["file", "nemo"])
def test_a_form_is_the_default_of_what_starts_from_its_job(
    tiny_tokenizer_dir, tmp_path, forms, name, suffix, monkeypatch
):
    said, warned = [], []
    monkeypatch.setattr(logging, "info", lambda text, *_a, **_k: said.append(text))
    monkeypatch.setattr(logging, "warning", lambda text, *_a, **_k: warned.append(text))
    first, tokenizer = configured(None, tiny_tokenizer_dir, **forms[name])
    expected = chat_form(forms[name], tokenizer).prompt(TALK)
    kept = save(first, tmp_path / f"first{suffix}")
    configured(kept, **forms[name])
    (tmp_path / "plain.jinja").unlink()
    passed_on = save(configured(kept)[0], tmp_path / f"second{suffix}")
    say_default.cache_clear()
    for path in (kept, passed_on):
        encoder = RecordEncoder(configured(path)[1], {})
        assert encoder.prompt(TALK) == expected
        assert encoder.prompt({"text": "hello"}) == tokenizer.text_to_ids("hello")
    what = {"file": "a chat template", "nemo": "NeMo's chat format"}[name]
    line = f"conversations are written in {what} that the checkpoint keeps, as model.data.chat_tem"
    assert sum(text.startswith(line) for text in said) == 1
    # What is given comes first, and replaces the whole.
    chatml = {"chat_template": str(TEMPLATES / "chatml.jinja")}
    own = chat_form(chatml, tokenizer).prompt(TALK)
    other = save(configured(passed_on, **chatml)[0], tmp_path / "third")
    assert sum("is another than the checkpoint keeps" in text for text in warned) == 1
    assert own != expected and chat_form({}, configured(other)[1]).prompt(TALK) == own
    assert chat_form({}, configured(passed_on, chat_template="tokenizer")[1]) is None


def test_an_export_has_the_template_in_its_tokenizer(tiny_tokenizer_dir, tmp_path, forms):
    for n, change in enumerate((forms["file"], {})):
        cfg, _tokenizer = configured(None, tiny_tokenizer_dir, **change)
        if not change:
            cfg.tokenizer.chat_template = PLAIN.replace("$", "")
        folder = tmp_path / f"{n}"
        folder.mkdir()
        copy_tokenizer(cfg, folder)
        written = transformers.AutoTokenizer.from_pretrained(folder)
        assert written.chat_template == (PLAIN if change else cfg.tokenizer.chat_template)


@some_of("job", ["gpt_dpo", "gpt_ppo_critic", "gpt_sft"])
def test_what_other_checkpoints_say(tiny_tokenizer_dir, tmp_path, forms, job):
    """NeMo-Aligner's models name their format in the section of the data; a file that is no part
    of the checkpoint is not read.
    """
    cfg, _tokenizer = configured(None, tiny_tokenizer_dir)
    cfg.data = {"chat": True, "chat_prompt_tokens": TOKENS, "chat_template": None}
    _cfg, tokenizer = configured(save(cfg, tmp_path / "theirs"), job=job)
    text = tokenizer.ids_to_text(chat_form({}, tokenizer).prompt(TALK))
    assert "<s1>User\nhello\n<s1>Assistant\n" in text
    file = tmp_path / "theirs" / "model_config.yaml"
    config = OmegaConf.load(file)
    config.tokenizer.conversations = {"chat_template": forms["file"]["chat_template"]}
    OmegaConf.save(config, file)
    _cfg, tokenizer = configured(tmp_path / "theirs", job=job)
    with pytest.raises(UserError, match="stands in the checkpoint, but the file is no part of it"):
        chat_form({}, tokenizer)
