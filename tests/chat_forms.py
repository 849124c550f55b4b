# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Chat templates and their tokenizers for tests, and what each template writes, piece by piece and
without Jinja: the oracle of the masks.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TEMPLATES = Path(__file__).parent / "chat_templates"
CORPUS = [
    "the film was a joy from the first scene to the last\n\n",
    "a dull plot, a flat cast and a very long evening\n\nuser\nassistant\nsystem\n",
    "What is 2 + 2? It is 4.\n\n\nHello there, hello, World! [INST] model",
]

# How newer byte-level tokenizers cut words: newlines stay together.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

Piece = tuple[str, bool]  # text, and whether it is trained on
Conversation = list[tuple[str, str]]  # role and content


@dataclass(frozen=True)
class Family:
    """A template and the special tokens of its tokenizer; `write` makes the pieces."""

    name: str
    bos: str
    eos: str
    special: tuple[str, ...]
    end_of_turn: str
    write: Callable[[Conversation], list[Piece]]
    generation_prompt: str
    takes_system: bool = True

    @property
    def file(self) -> Path:
        return TEMPLATES / f"{self.name}.jinja"

    @property
    def template(self) -> str:
        return self.file.read_text(encoding="utf-8")


def _chatml(conversation: Conversation) -> list[Piece]:
    pieces = []
    for role, content in conversation:
        pieces.append((f"<|im_start|>{role}\n", False))
        pieces += [(f"{content}<|im_end|>", role == "assistant"), ("\n", False)]
    return pieces


def _qwen(conversation: Conversation) -> list[Piece]:
    if conversation[0][0] != "system":
        conversation = [("system", "You are a helpful model."), *conversation]
    return _chatml(conversation)


def _llama3(conversation: Conversation) -> list[Piece]:
    pieces = [("<|begin_of_text|>", False)]
    for role, content in conversation:
        pieces.append((f"<|start_header_id|>{role}<|end_header_id|>\n\n", False))
        pieces.append((f"{content.strip()}<|eot_id|>", role == "assistant"))
    return pieces


def _mistral(conversation: Conversation) -> list[Piece]:
    pieces, system = [("<s>", False)], ""
    for role, content in conversation:
        if role == "system":
            system = f"{content}\n\n"
        elif role == "user":
            pieces.append((f"[INST] {system}{content}[/INST]", False))
            system = ""
        else:
            pieces.append((f" {content}</s>", True))
    return pieces


def _gemma(conversation: Conversation) -> list[Piece]:
    pieces = [("<bos>", False)]
    for role, content in conversation:
        name = "model" if role == "assistant" else role
        pieces.append((f"<start_of_turn>{name}\n", False))
        pieces.append((f"{content.strip()}<end_of_turn>", role == "assistant"))
        pieces.append(("\n", False))
    return pieces


def _tulu(conversation: Conversation) -> list[Piece]:
    pieces, last = [], len(conversation) - 1
    for number, (role, content) in enumerate(conversation):
        end = "</s>" if number == last and role == "assistant" else "\n"
        pieces += [(f"<|{role}|>\n", False), (content + end, number == last)]
    return pieces


def _qwen3(conversation: Conversation) -> list[Piece]:
    """The last turn has its thoughts, the others lack them."""
    pieces = _chatml([(role, text.split("</think>\n\n")[-1]) for role, text in conversation[:-1]])
    pieces = [(text, False) for text, _trained in pieces]
    return [*pieces, (_ASSISTANT, False), (f"{conversation[-1][1]}<|im_end|>", True)]


def _r1(conversation: Conversation) -> list[Piece]:
    pieces = [("<s>", False)]
    for role, content in conversation:
        pieces.append((f"<|{role.capitalize()}|>", False))
        trained = role == "assistant"
        pieces.append((content.split("</think>")[-1] + ("</s>" if trained else ""), trained))
    return pieces


_IM = ("<|im_start|>", "<|im_end|>")
_ASSISTANT = "<|im_start|>assistant\n"
_HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_TEXT = ("<|begin_of_text|>", "<|end_of_text|>")
_GEMMA = ("<start_of_turn>", "<end_of_turn>")
_TAGS = ("<|Assistant|>", "<|User|>")


def _by_name(*families: Family) -> dict[str, Family]:
    return {family.name: family for family in families}


FAMILIES = _by_name(
    Family("chatml", "<s>", "</s>", _IM, "<|im_end|>", _chatml, _ASSISTANT),
    Family("qwen2_5", "", "<|im_end|>", _IM, "<|im_end|>", _qwen, _ASSISTANT),
    Family("llama3", *_TEXT, _HEADERS, "<|eot_id|>", _llama3, _HEADER),
    Family("mistral", "<s>", "</s>", ("[INST]", "[/INST]"), "</s>", _mistral, ""),
    Family("gemma", "<bos>", "<eos>", _GEMMA, _GEMMA[1], _gemma, f"{_GEMMA[0]}model\n", False),
)
# Templates that write an earlier turn otherwise than the last one.
OTHERS = _by_name(
    Family("r1", "<s>", "</s>", _TAGS, "</s>", _r1, _TAGS[0]),
    Family("qwen3", "", "<|im_end|>", _IM, "<|im_end|>", _qwen3, _ASSISTANT),
    Family("tulu", "<s>", "</s>", (), "</s>", _tulu, "<|assistant|>\n"),
    Family("marked", "<s>", "</s>", _IM, "<|im_end|>", _chatml, _ASSISTANT),
)


def write_tokenizer(
    folder: Path,
    family: Family,
    template: str | None = None,
    metaspace: bool = False,
    gpt2_words: bool = False,
) -> str:
    """Write the tokenizer of a family with its chat template, or another one; returns the folder.

    Args:
        metaspace: mark spaces as SentencePiece does, with one before the text, and join characters
            across words; else byte-level.
        gpt2_words: cut words as GPT-2 does, which splits newlines before a word.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    alphabet = []
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
        alphabet = [chr(number) for number in range(32, 127)] + ["\n"]
    else:
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2_words)
        if not gpt2_words:
            split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
            words = pre_tokenizers.Sequence([split, words])
        tokenizer.pre_tokenizer = words
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(CORPUS * 2, trainer)
    special = [token for token in (family.bos, family.eos, *family.special) if token]
    tokenizer.add_special_tokens(list(dict.fromkeys(special)))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.eos}
    config |= {"model_max_length": 4096, "chat_template": template or family.template}
    config |= {"bos_token": family.bos} if family.bos else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def slow_encoding(folder: str, pieces: list[Piece]) -> tuple[list[int], list[bool]]:
    """The tokens of the pieces' text and their mask, from the characters that the tokenizer says
    each token covers; up to the last piece that is trained on.
    """
    from tokenizers import Tokenizer

    last = max(number for number, (_, trained) in enumerate(pieces) if trained)
    pieces = pieces[: last + 1]
    flags = [trained for text, trained in pieces for _ in text]
    encoding = Tokenizer.from_file(str(Path(folder) / "tokenizer.json")).encode(
        "".join(text for text, _ in pieces), add_special_tokens=False
    )
    mask = []
    for start, end in encoding.offsets:
        covered = set(flags[start:end])
        assert len(covered) == 1, "a token covers the border of a turn"
        mask.append(covered.pop())
    return encoding.ids, mask
