# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Fixtures that many tests share (tiny tokenizers, trained in milliseconds), and the time limit of
a test.
"""

import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several small tests share the machine
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402  (the environment comes first)

from nemo_aligner.parallel.environment import hide_gpus  # noqa: E402
from tests import durations, imports_done  # noqa: E402
from tests.patience import patience  # noqa: E402
from tests.traces import Traces  # noqa: E402

# The limit of a test ends the whole run, so it strikes after those of the ranks and jobs in it.
LAST = 4

GPU_TESTS = Path(__file__).resolve().parent / "gpu"
END_OF_TEXT = "<|endoftext|>"
CORPUS = [
    "the film was a joy from the first scene to the last",
    "a dull plot, a flat cast and a very long evening",
    "I loved the music; the story is warm and bright.",
    "Review: the film was bad. Answer: a sad film.",
]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Hide GPUs from all tests but those of `tests/gpu`. And what tests left is removed, by the
    process that reads the command line, not by those that run a part of the tests for it; and not
    with planted faults, which may be in what removes.
    """
    # A shell that starts the tests in the background has it ignored, and so in the jobs of tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = config.invocation_params.dir
    paths = [(folder / argument.split("::")[0]).resolve() for argument in config.args]
    if not any(path.is_relative_to(GPU_TESTS) for path in paths):
        hide_gpus()  # the other tests compare with numbers of a CPU
    if not hasattr(config, "workerinput") and "MUTANT_REPORT" not in os.environ:
        config.add_cleanup(Traces().remove)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files go first: short ones keep the workers busy to the end."""
    seconds = durations.read()
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0.0))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    imports_done()  # here: the process that hands out the tests collects none


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Stretch the time limit of a test for a machine that is as busy as this one is now."""
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0] if marker else item.config.getini("timeout"))
    item.add_marker(pytest.mark.timeout(LAST * patience(limit_s)), append=False)
    return (yield)


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left_behind():
    """Building a model creates a process group of one rank; the next module starts without."""
    yield
    if "nemo_aligner.parallel.parallel_state" in sys.modules:
        sys.modules["nemo_aligner.parallel.parallel_state"].destroy()


def logged(monkeypatch, *levels: str) -> list[str]:
    from nemo.utils import logging

    messages: list[str] = []
    for level in levels:
        monkeypatch.setattr(logging, level, lambda message, *_, **__: messages.append(message))
    return messages


@pytest.fixture
def warnings(monkeypatch):
    """The warnings so far."""
    return logged(monkeypatch, "warning")


@pytest.fixture
def lines(monkeypatch):
    """What was logged so far and is no error."""
    return logged(monkeypatch, "info", "warning")


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tmp_path_factory) -> str:
    """Folder with a Hugging Face fast tokenizer: byte-level BPE of 300 ids, any text round-trips,
    eos is the last id.

    Load it with `nemo.collections.common.tokenizers.AutoTokenizer(pretrained_model_name=...)`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=299, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([END_OF_TEXT])
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    config["model_max_length"] = 1024
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_tokenizer_dir):
    """The tokenizer of `tiny_tokenizer_dir`, as the library uses it."""
    from nemo.collections.common.tokenizers import AutoTokenizer

    return AutoTokenizer(pretrained_model_name=tiny_tokenizer_dir)


@pytest.fixture(scope="session")
def bos_tokenizer_dir(tiny_tokenizer_dir, tmp_path_factory) -> str:
    """`tiny_tokenizer_dir` with a bos token, which its own post-processor puts before a text, as
    those of Llama and Gemma do.
    """
    from tokenizers import Tokenizer, processors

    folder = tmp_path_factory.mktemp("bos") / "tokenizer"
    shutil.copytree(tiny_tokenizer_dir, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>"])
    begin = {"single": "<s> $A", "pair": "<s> $A <s> $B"}
    special = [("<s>", tokenizer.token_to_id("<s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(**begin, special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<s>"}))
    return str(folder)


@pytest.fixture(scope="session")
def reversed_tokenizer_dir(tiny_tokenizer_dir, tmp_path_factory) -> str:
    """`tiny_tokenizer_dir` with all ids in reverse order except eos: same size, other decoding."""
    folder = tmp_path_factory.mktemp("reversed") / "tokenizer"
    shutil.copytree(tiny_tokenizer_dir, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    ids = content["model"]["vocab"]
    content["model"]["vocab"] = {token: len(ids) - 1 - id_ for token, id_ in ids.items()}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return str(folder)


@pytest.fixture(scope="session")
def tiny_sentencepiece_model(tmp_path_factory) -> str:
    """Path of a SentencePiece model (BPE with byte fallback, 330 ids, eos 2), for NeMo's
    `SentencePieceTokenizer`.
    """
    import sentencepiece

    path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model"
    model = io.BytesIO()
    options = {"model_type": "bpe", "byte_fallback": True, "hard_vocab_limit": False}
    options |= {"minloglevel": 2}
    train = sentencepiece.SentencePieceTrainer.train
    train(sentence_iterator=iter(CORPUS), model_writer=model, vocab_size=330, **options)
    path.write_bytes(model.getvalue())
    return str(path)


@pytest.fixture
def write_folder(tiny_tokenizer_dir, tmp_path):
    """`write_folder(model, name="model", **settings) -> folder`: a model of transformers as
    `save_pretrained` writes it, with the tokenizer of `tiny_tokenizer_dir`.
    """

    def write(model, name: str = "model", **settings) -> Path:
        folder = tmp_path / name
        model.save_pretrained(folder, **settings)
        for file in Path(tiny_tokenizer_dir).iterdir():
            shutil.copy(file, folder / file.name)
        return folder

    return write


@pytest.fixture(scope="module")
def models(tiny_tokenizer_dir, tmp_path_factory) -> Path:
    """Folder of the weights that the models of tests/distributed/matrix.py start from."""
    from tests.distributed import matrix

    folder = tmp_path_factory.mktemp("models")
    matrix.write_models(tiny_tokenizer_dir, folder)
    return folder


PROMPTS = ["the film", "a dull plot and", "I loved the music", "Review: the story is"]
PROMPTS += ["the first scene", "a long evening"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, tiny_tokenizer_dir):
    """For jobs of PPO and its like: a policy and a reward model (random weights) as .nemo files,
    and prompts.
    """
    from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
    from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
    from tests.tiny_models import tiny_config

    folder = tmp_path_factory.mktemp("ppo")
    policy = tiny_config(tiny_tokenizer_dir, seed=3)
    MegatronGPTModel(policy).save_to(str(folder / "policy.nemo"))
    own = {"seed": 4, "output_sequence": False, "force_head_dtype": "float32"}
    reward = tiny_config(tiny_tokenizer_dir, **own)
    MegatronGPTRewardModel(reward).save_to(str(folder / "rm.nemo"))
    lines = [json.dumps({"text": f"{PROMPTS[i % len(PROMPTS)]} {i}"}) for i in range(48)]
    (folder / "prompts.jsonl").write_text("\n".join([*lines, ""]))
    return folder
