# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens with a meaning in Hugging Face folders: those that end a response, the padding of reward
models; and that all keys of a folder that a job does not change come back.
"""

import json
import shutil

import pytest
import torch
import transformers
from nemo.collections.common.tokenizers import AutoTokenizer
from omegaconf import OmegaConf

from nemo_aligner.checkpoint import sources
from nemo_aligner.convert.__main__ import main
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.tensors import lengths_before
from nemo_aligner.core.tokenizer import response_text
from nemo_aligner.generation import GenerationParams, MegatronGenerator
from nemo_aligner.launch.model_loading import load_and_override_model_config
from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from nemo_aligner.models.nlp.gpt.tokenizers import build_tokenizer
from tests import hugging_face
from tests.cases import some_of
from tests.peft_folders import load
from tests.unit.test_hugging_face_folders import EACH

pytestmark = pytest.mark.slow

EOS = 299  # of `tiny_tokenizer_dir`


def convert(*arguments) -> None:
    assert main([str(argument) for argument in arguments] + ["--quiet", "--overwrite"]) == 0


def edit(file, **settings) -> None:
    """Set keys of a JSON file; None removes one."""
    content = json.loads(file.read_text()) | settings
    content = {key: value for key, value in content.items() if value is not None}
    file.write_text(json.dumps(content))


def through_a_job(folder, tmp_path, cls=GPTSFTModel, **keys):
    """The folder that comes back of a model that was converted, loaded by a job with a context of
    its own, saved, and converted; and the model.
    """
    convert("hf-to-nemo", folder, tmp_path / "first.nemo")
    model = load(tmp_path / "first.nemo", cls, **keys)
    model.save_to(str(tmp_path / "second.nemo"))
    convert("nemo-to-hf", tmp_path / "second.nemo", tmp_path / "back", *["--drop-head-bias"])
    return tmp_path / "back", model


# --- keys ---------------------------------------------------------------------------------------

OLDER = {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}


@some_of("name", [*EACH, "Llama 3.1", "Qwen 2, YaRN", "older"], keep=3)
def test_what_a_job_does_not_change_comes_back(write_folder, tmp_path, name):
    older = name == "older"  # as transformers 4 writes it
    model = hugging_face.FOLDERS["Llama 2" if older else name]
    folder = write_folder(hugging_face.randomized(model))
    own = {"torch_dtype": "float32", "our_own": {"a": [1, None]}, "_name_or_path": "meta/llama"}
    own |= OLDER | {"rope_parameters": None} if older else {}
    edit(folder / "config.json", eos_token_id=[7, EOS], pad_token_id=EOS, **own)
    generation = {"temperature": 0.6, "eos_token_id": [EOS, 7], "_from_model_config": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    positions = {} if name == "GPT-2" else {"max_position_embeddings": 64}
    back, model = through_a_job(folder, tmp_path, encoder_seq_length=64, **positions)
    assert model.cfg.encoder_seq_length == 64
    for file in ("config.json", "generation_config.json"):
        before, after = (json.loads((path / file).read_text()) for path in (folder, back))
        assert {key: after.get(key, "missing") for key in before} == before
    assert after == generation


def test_what_a_job_changes_is_written(write_folder, tmp_path):
    """Also where the folder said the same in another form."""
    folder = write_folder(hugging_face.randomized(hugging_face.FOLDERS["Llama 2"]))
    edit(folder / "config.json", **OLDER, rope_parameters=None)
    changed = {"seq_len_interpolation_factor": None, "rotary_base": 5000.0}
    job = {"overwrite_base_config": {key: True for key in changed}, "rotary_base": 5000.0}
    back, _ = through_a_job(folder, tmp_path, **job)
    config = transformers.AutoConfig.from_pretrained(back)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}
    assert config.max_position_embeddings == hugging_face.POSITIONS


# --- ends of responses --------------------------------------------------------------------------


@some_of("where", ["config.json", "generation_config.json"])
def test_all_end_tokens_of_a_folder_end_responses(write_folder, tmp_path, where):
    hf = hugging_face.randomized(hugging_face.FOLDERS["Llama, odd sizes"])
    folder = write_folder(hf)
    edit(folder / "generation_config.json", eos_token_id=None)
    edit(folder / where, eos_token_id=[23, 112, EOS, 350])
    edit(folder / "config.json", eos_token_id=[23, 112, EOS, 350] if where[0] == "c" else 5)
    back, model = through_a_job(folder, tmp_path)
    for path in (folder, tmp_path / "second.nemo"):
        assert sources.read_config(path).tokenizer.end_token_ids == [23, 112, EOS, 350]
    assert "eos_token_id" in json.loads((back / where).read_text())
    # transformers' own generation is the oracle
    theirs = transformers.AutoModelForCausalLM.from_pretrained(back)
    assert theirs.generation_config.eos_token_id == [23, 112, EOS, 350]
    model.set_eval()
    generator = MegatronGenerator(model.model, model.tokenizer, max_sequence_length=80)
    prompts = torch.arange(20, 36)[:, None]
    lengths = torch.ones(16, dtype=torch.long)
    params = GenerationParams(max_length=40, use_greedy=True)
    output = generator.generate(prompts, lengths, torch.arange(16), params)
    ended = set()
    # Ids that the tokenizer does not have get no probability here.
    greedy = {"max_new_tokens": 40, "do_sample": False, "suppress_tokens": [*range(300, 384)]}
    columns = prompts, output.response_lengths, output.response_tokens, output.is_end
    for prompt, length, row, is_end in zip(*columns, strict=True):
        ids = row[:length].tolist()
        assert ids == theirs.generate(prompt[None], **greedy)[0].tolist()
        assert bool(is_end) == (ids[-1] in (23, 112, EOS))
        ended.add(ids[-1])
        if is_end:
            shown = response_text(model.tokenizer, ids[1:])
            assert shown == model.tokenizer.ids_to_text(ids[1:-1])
    assert {23, 112} & ended


def test_end_tokens_belong_to_their_tokenizer(write_folder, tmp_path, reversed_tokenizer_dir):
    folder = write_folder(hugging_face.randomized(hugging_face.FOLDERS["Llama 2"]))
    edit(folder / "generation_config.json", eos_token_id=[11, EOS])
    job = OmegaConf.create({"tokenizer": {"type": str(reversed_tokenizer_dir)}})
    assert "end_token_ids" not in load_and_override_model_config(folder, job).tokenizer
    asked = OmegaConf.create({"tokenizer": {"end_token_ids": [12]}})
    section = load_and_override_model_config(folder, asked).tokenizer
    assert build_tokenizer(section).more_end_ids == [12]
    for ids in ("</s>", [True], [-1]):
        with pytest.raises(ConfigError, match="must be a list of token ids"):
            build_tokenizer(OmegaConf.merge(section, {"end_token_ids": ids}))
    edit(folder / "generation_config.json", eos_token_id=["</s>"])
    with pytest.raises(UserError, match=r"eos_token_id=\['</s>'\] of generation_config.json"):
        sources.read_config(folder)


# --- padding of reward models -------------------------------------------------------------------

SAMPLES = ("the film", "the film</s>", "a dull plot and<s>", "music ☃")
SAMPLES += ("<unk>", "x</s></s>", "a<pad>b")


@pytest.fixture
def token_dir(tiny_tokenizer_dir, tmp_path):
    """A tokenizer of bytes with <unk>, <s>, </s> (ids 300 to 302) and, if asked for, <pad>."""

    def make(pad: str | None, own: bool):
        from tokenizers import Tokenizer

        folder = tmp_path / "tokenizer"
        shutil.copytree(tiny_tokenizer_dir, folder, dirs_exist_ok=True)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", *["<pad>"] * own])
        tokenizer.save(str(folder / "tokenizer.json"))
        names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": pad}
        edit(folder / "tokenizer_config.json", **names)
        return folder

    return make


def rewards_of_transformers(folder, texts, side) -> torch.Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side=side)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(**tokenizer(list(texts), return_tensors="pt", padding=True)).logits[:, 0]


def rewards_of(model, texts) -> torch.Tensor:
    return torch.cat([model.infer([text]).view(-1) for text in texts])


@pytest.mark.parametrize(
    ("ends", "rows"), [(302, None), ([302, 303], 384)], ids=["no row to spare", "rows to spare"]
)
@some_of(
    "pad",
    [None, "</s>", "<s>", "<unk>", "<pad>", "<|endoftext|>"],
    ids=lambda pad: pad or "absent",
)
def test_an_exported_reward_model_gives_our_rewards(
    write_folder, token_dir, tmp_path, pad, ends, rows
):
    """With transformers' own padding and batches, whatever the base's padding is; the samples end
    with each of the special tokens, and without.
    """
    tokenizer = token_dir(pad, own=pad == "<pad>" or isinstance(ends, list))
    size = len(AutoTokenizer(str(tokenizer)).tokenizer)
    build = hugging_face.causal_lm("Llama", vocab_size=rows or size, rms_norm_eps=1e-6)
    folder = write_folder(hugging_face.randomized(build))
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    pad_id = None if pad is None else AutoTokenizer(str(folder)).tokenizer.pad_token_id
    edit(folder / "config.json", eos_token_id=ends, pad_token_id=pad_id, bos_token_id=301)
    edit(folder / "generation_config.json", eos_token_id=ends)
    back, model = through_a_job(folder, tmp_path, MegatronGPTRewardModel)
    model.set_eval()
    ours = rewards_of(model, SAMPLES)
    for side in ("left", "right"):
        theirs = rewards_of_transformers(back, SAMPLES, side)
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)
    if pad == "<|endoftext|>" or (pad == "<pad>" and ends == 302):
        for name, key in (("config.json", "pad_token_id"), ("tokenizer_config.json", "pad_token")):
            before, after = (json.loads((path / name).read_text()) for path in (folder, back))
            assert after[key] == before[key]
    # What was written is read as it was meant.
    torch.testing.assert_close(rewards_of(load(back, MegatronGPTRewardModel), SAMPLES), ours)


@pytest.mark.parametrize("pad", ["</s>", "<|endoftext|>"])
@pytest.mark.parametrize("name", ["Llama 2", "GPT-2"])
def test_a_public_reward_model_is_read_as_meant(write_folder, token_dir, tmp_path, name, pad):
    """Where its padding is its end token, transformers trained and reads it at the token before;
    it goes on so, here and in the folder that is written.
    """
    hf = hugging_face.with_head("SequenceClassification", name)
    folder = write_folder(hf)
    shutil.copytree(token_dir(pad, own=False), folder, dirs_exist_ok=True)
    pad_id = AutoTokenizer(str(folder)).tokenizer.pad_token_id
    edit(folder / "config.json", eos_token_id=302, pad_token_id=pad_id)
    expected = rewards_of_transformers(folder, SAMPLES[:-1], "right")
    back, model = through_a_job(folder, tmp_path, MegatronGPTRewardModel)
    model.set_eval()
    ours = rewards_of(model, SAMPLES[:-1])
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    assert (ours[0] - ours[1]).abs() < 1e-6 if pad == "</s>" else ours[0] != ours[1]
    theirs = rewards_of_transformers(back, SAMPLES[:-1], "right")
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)


def test_lengths_without_padding():
    tokens = torch.tensor([[5, 9, 9, 9], [9, 5, 9, 6], [9, 9, 9, 9], [5, 6, 7, 8]])
    lengths = torch.tensor([4, 3, 2, 2])
    assert lengths_before(9, tokens, lengths).tolist() == [1, 2, 1, 2]
    assert lengths_before(None, tokens, lengths) is lengths
