# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The model of the benchmarks, here and as a peer's, and prompts whose responses have a length
that is known beforehand.

The shape is that of a Llama of 10.1 million weights. Its weights are random but for the rows of
its tables for the first tokens: token n makes token n - 1 all but certain, and token 1 the end. So
a prompt whose last token is n is given a response of exactly n tokens by any engine, sampled or
greedy, while all its matrices are multiplied as ever. Two engines then do the same work, token
for token.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_costs import Shape
from omegaconf import OmegaConf
from torch import Tensor

VOCABULARY, HIDDEN, FFN, LAYERS, HEADS, GROUPS = 8192, 256, 704, 8, 8, 4
LONGEST = 128  # response; tokens up to it count down, 0 is the end
END = 0
POSITIONS = 1024
SCALE = 48.0  # logit of the token that comes next


SMALL = Shape(LAYERS, HIDDEN, FFN, VOCABULARY, HEADS, GROUPS)
TINY_LLAMA = Shape(22, 2048, 5632, 32000, 32, 4)  # 1.1 billion weights


@dataclass
class Folders:
    """The same model in two forms.

    Attributes:
        hugging_face: folder with weights and tokenizer.
        nemo: folder of the form `.nemo`.
    """

    hugging_face: Path
    nemo: Path


def write_tokenizer(folder: Path, vocabulary: int = VOCABULARY) -> None:
    """A Hugging Face tokenizer of so many words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": END, "<pad>": vocabulary - 1}
    words |= {f"w{i}": i for i in range(1, vocabulary - 1)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"
    )
    fast.save_pretrained(folder)


def build_peer(shape: Shape = SMALL) -> Any:
    """The Hugging Face model, fp32, wider than `LONGEST` and with at least `VOCABULARY` tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    hidden = shape.hidden
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        max_position_embeddings=POSITIONS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        eos_token_id=END,
        bos_token_id=None,
        pad_token_id=shape.vocabulary - 1,
        initializer_range=0.02 * (HIDDEN / hidden) ** 0.5,
    )
    model = LlamaForCausalLM(config)
    directions = torch.linalg.qr(torch.randn(hidden, LONGEST + 1))[0].T
    with torch.no_grad():
        # Far longer than what the layers add to it, so the last norm gives sqrt(hidden) times the
        # direction.
        model.model.embed_tokens.weight[: LONGEST + 1] = directions * hidden**0.5
        model.lm_head.weight[:LONGEST] = directions[1:] * SCALE / hidden**0.5
    return model.eval()


@contextmanager
def folders(shape: Shape = SMALL) -> Iterator[Folders]:
    """The model on disk, in both forms."""
    from nemo_aligner.convert import conversions as convert

    with tempfile.TemporaryDirectory() as name:
        found = Folders(Path(name, "hugging_face"), Path(name, "nemo"))
        build_peer(shape).save_pretrained(found.hugging_face)
        write_tokenizer(found.hugging_face, shape.vocabulary)
        convert.to_nemo(
            found.hugging_face, found.nemo, convert.Options(dtype="float32", progress=False)
        )
        yield found


def load_peer(at: Folders, precision: str = "32") -> Any:
    """The Hugging Face model from disk, on the GPU if there is one."""
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(at.hugging_face, dtype=dtype)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def load_actor(at: Folders, precision: str = "32", **keys: Any) -> Any:
    """Our policy from disk.

    Args:
        keys: of section `model`, over the defaults and the file's own.
    """
    from nemo_aligner.launch.model_loading import load_from_nemo
    from nemo_aligner.models.nlp.gpt.megatron_gpt_ppo_actor import MegatronGPTActorModel

    return load_from_nemo(
        MegatronGPTActorModel, model_keys(precision, **keys), None, restore_path=at.nemo
    )


def model_keys(precision: str = "32", **keys: Any) -> Any:
    """Section `model` of an actor, less the architecture."""
    ppo = {
        "length_params": {"max_length": LONGEST},
        "forward_micro_batch_size": 16,
        "sampling_params": {"end_strings": []},
    }
    base = {
        "precision": precision,
        "encoder_seq_length": POSITIONS,
        "max_position_embeddings": POSITIONS,
        "micro_batch_size": 4,
        "global_batch_size": 16,
        "optim": {"name": "distributed_fused_adam", "lr": 1e-6, "sched": {"name": "constant"}},
        "ppo": ppo,
    }
    return OmegaConf.merge(OmegaConf.create(base), OmegaConf.create(keys))


def prompts(lengths: Tensor, width: int = 32) -> Tensor:
    """int64 `[B, width]`: random prompts that are given responses of `lengths` `[B]` tokens."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(LONGEST + 1, VOCABULARY - 1, (len(lengths), width), generator=generator)
    tokens[:, -1] = lengths
    return tokens


def skewed_lengths(samples: int, mean: float = 32.0) -> Tensor:
    """int64 `[samples]`: geometric, at most `LONGEST`."""
    generator = torch.Generator().manual_seed(2)
    drawn = torch.empty(samples).geometric_(1 / mean, generator=generator)
    return drawn.clamp(max=LONGEST).long()


def fixed_lengths(samples: int) -> Tensor:
    """int64 `[samples]`, all `LONGEST`."""
    return torch.full((samples,), LONGEST)
