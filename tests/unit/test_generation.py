# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The engine against generation of one sample at a time, without a cache; ends; parameters."""

import pytest
import torch
from omegaconf import OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.generation import GenerationParams, MegatronGenerator, engine
from nemo_aligner.generation.batch import DecodingBatch
from nemo_aligner.generation.cache import FeedingPass
from nemo_aligner.generation.decoding_model import DecodingModel
from nemo_aligner.generation.interface import (
    EndConditions,
    tokenize_batch,
    verify_is_valid_and_clamp_range_,
)
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_ppo_actor import MegatronGPTActorModel
from tests.cases import says, some_of
from tests.naive_generation import naive_generate
from tests.tiny_models import PPO, tiny_config

pytestmark = pytest.mark.slow

ROWS = 12
LIMIT = 48  # positions of the tiny models
NARROW = {"top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2, "min_length": 3}


def large(tokenizer_dir, architecture="llama", **overrides):
    """A tiny model with large weights, so that its responses vary; most of the vocabulary table
    is padding.
    """
    return MegatronGPTModel(
        tiny_config(tokenizer_dir, architecture, init_method_std=0.4, **overrides)
    )


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model(request, tiny_tokenizer_dir):
    return large(tiny_tokenizer_dir, request.param)


@pytest.fixture(scope="module")
def llama(tiny_tokenizer_dir):
    return large(tiny_tokenizer_dir)


@pytest.fixture(scope="module")
def prompts(tiny_tokenizer):
    """Ragged prompts of 1 to 9 tokens, with rubbish in the padding; lengths; seeds."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([3, 1, 9, 4, 4, 7, 2, 9, 1, 5, 8, 6])
    tokens = torch.randint(0, tiny_tokenizer.vocab_size - 1, (ROWS, 9), generator=generator)
    tokens[torch.arange(9) >= lengths.unsqueeze(1)] = 10**6
    return tokens, lengths, torch.arange(100, 100 + ROWS)


def generator_of(model):
    return MegatronGenerator(
        model.model, model.tokenizer, max_sequence_length=model.cfg.encoder_seq_length
    )


def generated(model, prompts, params, **own):
    return generator_of(model).generate(*prompts, params, **own)


def samples_of(output):
    """Ids of each sample, without padding."""
    pairs = zip(output.response_tokens.tolist(), output.response_lengths.tolist(), strict=True)
    return [row[:length] for row, length in pairs]


def naive_samples(model, prompts, params):
    """Ids of each sample, and whether it ended by itself."""
    rows = zip(*(column.tolist() for column in prompts), strict=True)
    return [naive_generate(model, row[:length], seed, params, LIMIT) for row, length, seed in rows]


def check_against_naive(model, prompts, params):
    output, naive = generated(model, prompts, params), naive_samples(model, prompts, params)
    assert samples_of(output) == [sample for sample, _ in naive]
    assert output.is_end.tolist() == [ended for _, ended in naive]
    assert output.response_tokens.size(1) == output.response_lengths.max()
    padding = torch.arange(output.response_tokens.size(1)) >= output.response_lengths.unsqueeze(1)
    assert (output.response_tokens[padding] == model.tokenizer.eos_id).all()
    return output


@pytest.mark.parametrize(
    "options",
    [
        dict(use_greedy=True),
        dict(temperature=1.5),
        dict(use_greedy=True, repetition_penalty=1.8),
        {"temperature": 0.8, "end_strings": ("e", " the"), **NARROW},
    ],
)
def test_decoding_equals_full_forward_passes(model, prompts, options):
    check_against_naive(model, prompts, GenerationParams(max_length=16, **options))


def test_samples_that_end_early_leave_the_others_alone(llama, prompts):
    # So many characters end a response that half of the batch is done again and again.
    ends = tuple("abcdefghijklmnopqrstuvwxyz .,:;") + ("th", "he", "in")
    output = check_against_naive(
        llama, prompts, GenerationParams(max_length=30, temperature=3.0, end_strings=ends)
    )
    assert ROWS / 2 < output.is_end.sum()
    assert (output.response_lengths - prompts[1]).unique().numel() > 4


def test_a_response_ends_with_a_string_of_several_tokens(llama, prompts):
    freely = {"max_length": 24, "temperature": 1.5}
    free = samples_of(generated(llama, prompts, GenerationParams(**freely)))
    # Three tokens in the middle of some response that decode to plain text.
    decode, starts = llama.tokenizer.ids_to_text, prompts[1].add(4).tolist()
    starts = [(i, row) for row in range(ROWS) for i in range(starts[row], len(free[row]) - 5)]
    plain = lambda text: "\ufffd" not in text and text.strip()
    start, row = next((i, row) for i, row in starts if plain(decode(free[row][i : i + 3])))
    end = decode(free[row][start : start + 3])
    params = GenerationParams(**freely, end_strings=(end, "<never>"))
    output = check_against_naive(llama, prompts, params)
    assert output.is_end[row] and output.response_lengths[row] <= start + 3
    assert decode(samples_of(output)[row]).endswith(end)


def test_learned_positions_limit_the_response(tiny_tokenizer_dir, prompts):
    model = MegatronGPTModel(tiny_config(tiny_tokenizer_dir, "gpt2", max_position_embeddings=20))
    output = generated(model, prompts, GenerationParams(max_length=40, use_greedy=True))
    assert output.response_lengths.max() == 20


@pytest.mark.parametrize(
    "tokens, length, message",
    [
        ([[1, 2, 3]], 0, "prompt 0 of the batch is empty"),
        ([[1, 2, 3]], 4, "length of 4 exceeds the width"),
        ([[1] * 50], 48, "prompt 0 of the batch has 48 tokens: no room for a response within 48"),
        ([[1, 300, 3]], 2, "holds the id 300, outside the tokenizer's"),
    ],
)
def test_prompts_without_a_possible_response(llama, tokens, length, message):
    with says(UserError, message):
        batch = torch.tensor(tokens), torch.tensor([length]), torch.tensor([0])
        generated(llama, batch, GenerationParams(max_length=4))


def test_graphs_are_refused_where_they_cannot_be(llama, prompts):
    generator = MegatronGenerator(llama.model, llama.tokenizer, LIMIT, cuda_graphs=True)
    with pytest.raises(UserError, match="cuda_graphs=True cannot be: there is no GPU. Set it to"):
        generator.generate(*prompts, GenerationParams(max_length=4))


def test_weights_that_are_not_finite_are_reported(tiny_tokenizer_dir, prompts):
    model = large(tiny_tokenizer_dir)
    next(model.model[0].parameters()).data.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="logits at position 0 are not finite"):
        generated(model, prompts, GenerationParams(max_length=4))


# --- end conditions ----------------------------------------------------------------------------


def test_end_strings_are_found_at_the_end_only(tiny_tokenizer):
    end = EndConditions(tiny_tokenizer, ["Human:", "\n\n", "é!"])
    at_end = "the film Human:", "bright\n\n", "a café!"
    others = "the film Human: ", "Human: the film", "bright\n", "a caf!"
    for text, expected in (dict.fromkeys(at_end, True) | dict.fromkeys(others, False)).items():
        assert end.at_end(tiny_tokenizer.text_to_ids(text)) is expected, text


def test_special_tokens_end_a_response_as_one_token(tiny_tokenizer):
    end = EndConditions(tiny_tokenizer, ["<|endoftext|>"])
    assert end.token_ids == [tiny_tokenizer.eos_id] and end.strings == ()
    assert not end.at_end([tiny_tokenizer.text_to_ids(c)[0] for c in "<|endoftext|>"])


def test_end_strings_with_sentencepiece(tiny_sentencepiece_model, tmp_path):
    import sentencepiece
    from nemo.collections.common.tokenizers import SentencePieceTokenizer

    tokenizer = SentencePieceTokenizer(tiny_sentencepiece_model)
    end = EndConditions(tokenizer, ["<extra_id_1>", "Answer:", "."])
    assert end.token_ids[0] == tokenizer.eos_id
    at_end = "a sad film <extra_id_1>", "the film. Answer:", "the film."
    others = dict.fromkeys(("a film", "Answer: a"), False)
    for text, expected in (dict.fromkeys(at_end, True) | others).items():
        assert end.at_end(tokenizer.text_to_ids(text)) is expected, text
    # Of single characters alone, without bytes for others.
    options = {"vocab_size": 30, "model_type": "char", "minloglevel": 2}
    texts, prefix = ["the film was a joy", "a dull plot"] * 20, str(tmp_path / "no_bytes")
    train = sentencepiece.SentencePieceTrainer.train
    train(sentence_iterator=iter(texts), model_prefix=prefix, **options)
    tokenizer = SentencePieceTokenizer(f"{prefix}.model")
    assert tokenizer.tokenizer.unk_id() not in EndConditions(tokenizer, ["§"]).token_ids


def test_the_end_of_a_prompt_ends_nothing(tiny_tokenizer):
    end = EndConditions(tiny_tokenizer, ["!!!?"])
    assert end.strings  # found by its text, not as one token
    ids = tiny_tokenizer.text_to_ids("!!!?")
    assert end.at_end(ids) and not end.at_end(ids, first=1)  # a part of it belongs to the prompt


def test_valid_responses(tiny_tokenizer):
    eos, vocab = tiny_tokenizer.eos_id, tiny_tokenizer.vocab_size
    rows = [[5, 6, eos, eos], [5, 6, 7, 8], [5, vocab, eos, eos], [-42, 6, eos, eos]]
    tokens = torch.tensor(rows)
    lengths = torch.tensor([3, 4, 3, 3])
    valid = verify_is_valid_and_clamp_range_(tokens, lengths, None, tiny_tokenizer)
    assert valid.tolist() == [True, False, False, False]
    assert tokens.tolist()[2:] == [[5, vocab - 1, eos, eos], [0, 6, eos, eos]]


def test_tokenize_batch(tiny_tokenizer):
    eos = tiny_tokenizer.eos_id
    short, long = tiny_tokenizer.text_to_ids("ab"), tiny_tokenizer.text_to_ids("xyz" * 9)
    tokens, lengths = tokenize_batch(["ab", "xyz" * 9, ""], tiny_tokenizer, 6, add_EOS=True)
    assert tokens[0].tolist() == short + [eos] * (6 - len(short))
    assert tokens[1].tolist() == long[:6]
    assert tokens[2].tolist() == [eos] * 6 and lengths.tolist() == [len(short) + 1, 6, 1]
    with pytest.raises(UserError, match="no bos token"):
        tokenize_batch(["ab"], tiny_tokenizer, 6, add_BOS=True)


# --- parameters --------------------------------------------------------------------------------


def test_parameters_from_the_configuration():
    lengths = {"max_length": 20, "min_length": 1}
    sampling = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "repetition_penalty": 1.2}
    ends, inert = ["<|endoftext|>", "x"], dict.fromkeys(("add_BOS", "all_probs"), False)
    written = {"use_greedy": False, "compute_logprob": False, "end_strings": ends, **inert}
    found = GenerationParams.from_config(
        OmegaConf.create(lengths), OmegaConf.create(sampling | written)
    )
    assert found == GenerationParams(**lengths, **sampling, end_strings=tuple(ends))
    assert GenerationParams.from_config({"max_length": 5}, {}) == GenerationParams(max_length=5)


@pytest.mark.parametrize(
    "length, sampling, message",
    [
        ({}, {}, "length_params.max_length is missing"),
        ({"max_length": 5, "min_length": 6}, {}, "min_length=6 is above length_params.max_length"),
        ({"max_length": 5}, {"end_strings": "stop"}, "end_strings='stop' must be a list"),
        ({"max_length": 5}, {"end_strings": [""]}, "end_strings=[''] must be a list of non-empty"),
    ],
)
def test_parameters_that_cannot_work(length, sampling, message):
    with says(ConfigError, message):
        GenerationParams.from_config(length, sampling)


# ------------------------------------------------------------------------------ one queue of slots

FREELY = {"max_length": 20, "temperature": 3.0, "repetition_penalty": 1.1}
FREELY["end_strings"] = tuple("abcdefghijklmnopqrstuvwxyz .,")
ENDS_OFTEN = GenerationParams(**FREELY, return_logprobs=True)


@some_of("slots", [1, 2, 5], keep=[1, 5])
@pytest.mark.parametrize("piece", [4096, 3])
def test_slots_and_pieces_of_prompts_change_nothing(model, prompts, slots, piece, monkeypatch):
    """Each prompt comes twice, so that one of them shares the other's pass."""
    tokens, lengths, _ = (x.repeat_interleave(2, 0) for x in prompts)
    seeds = torch.arange(len(lengths))
    generator = generator_of(model)
    together = generator.generate(tokens, lengths, seeds, ENDS_OFTEN)
    assert (together.response_lengths - lengths).unique().numel() > 4
    monkeypatch.setattr(engine, "PREFILL_TOKENS", piece)
    in_turns = generator.generate(tokens, lengths, seeds, ENDS_OFTEN, slots=slots)
    assert samples_of(in_turns) == samples_of(together)
    assert torch.equal(in_turns.is_end, together.is_end)
    torch.testing.assert_close(in_turns.logprobs, together.logprobs, atol=1e-5, rtol=1e-5)


def test_equal_prompts_share_one_pass(llama, prompts, monkeypatch):
    """Also where a sibling enters later, even into the slot of the one that has ended."""
    fed = []
    forward = DecodingModel.forward

    def count(self, tokens, which):
        if isinstance(which, FeedingPass):
            fed.append(tuple(tokens.shape))
        return forward(self, tokens, which)

    monkeypatch.setattr(DecodingModel, "forward", count)
    tokens, lengths, _ = (x[[7, 3]].repeat_interleave(4, 0) for x in prompts)
    generator = generator_of(llama)
    output = generator.generate(tokens, lengths, torch.arange(8), ENDS_OFTEN, slots=3)
    assert len({tuple(sample) for sample in samples_of(output)}) == 8
    assert fed == [(1, int(lengths[0]) - 1), (1, int(lengths[-1]) - 1)]


class Waits(TorchDispatchMode):
    """Counts what waits for a GPU, or has a size that only the GPU knows: where a graph of the
    step could not be captured.
    """

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        masks, values = [], torch.ones(1)
        if name in ("index", "index_put", "index_put_"):
            masks, values = [x for x in args[1] if x is not None], (*args, values)[2]
        if (
            name in ("_local_scalar_dense", "nonzero", "_unique2", "masked_select", "equal")
            or any(x.dtype == torch.bool for x in masks)
            or not values.dim()  # a number that is copied from the host
        ):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options",
    [
        dict(use_greedy=True, return_logprobs=True),
        dict(temperature=3.0, end_strings=("e", " the"), return_logprobs=True),
        dict(**NARROW, end_strings=("e",)),
    ],
)
def test_steps_do_not_wait(model, prompts, options, monkeypatch):
    """As on a GPU: the host looks at every fourth step, the cache is read in few widths, and as
    many rows are computed as there are slots. No sample changes.
    """
    params = GenerationParams(max_length=24, **options)
    tokens, lengths, seeds = (x.repeat_interleave(2, 0) for x in prompts)
    generator = generator_of(model)
    expected = generator.generate(tokens, lengths, seeds, params)
    steps, looks, waits = [], [], Waits()
    look, step = DecodingBatch.look, engine._Decoding._step

    def counted(*args):
        steps.append(0)
        with waits:
            step(*args)

    monkeypatch.setattr(engine._Decoding, "_step", counted)
    monkeypatch.setattr(DecodingBatch, "look", lambda self: looks.append(0) or look(self))
    monkeypatch.setattr(DecodingBatch, "shape", lambda self: (self.slots, LIMIT))
    monkeypatch.setitem(engine.LOOK_EVERY, "cpu", 4)
    for slots in (5, len(tokens)):
        output = generator.generate(tokens, lengths, seeds, params, slots=slots)
        assert samples_of(output) == samples_of(expected)
        assert torch.equal(output.is_end, expected.is_end)
        if params.return_logprobs:
            torch.testing.assert_close(output.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)
    assert not waits.found and len(looks) <= 0.25 * len(steps) + 1


def test_a_stream_asks_for_prompts_when_there_is_room_and_gives_what_has_ended(llama, prompts):
    asked = []

    def batches():
        for start in range(0, ROWS, 3):
            asked.append(start)
            yield tuple(column[start : start + 3] for column in prompts)

    whole = samples_of(generated(llama, prompts, ENDS_OFTEN))
    stream = generator_of(llama).stream(batches(), ENDS_OFTEN, slots=4)
    places, output = next(stream)
    assert len(places) == 4 and asked[-1] < ROWS - 3
    groups = [(places, output), *stream]
    assert asked == [0, 3, 6, 9] and sorted(sum((p for p, _ in groups), [])) == list(range(ROWS))
    for places, output in groups:
        assert samples_of(output) == [whole[place] for place in places]
        assert output.response_tokens.size(1) == output.response_lengths.max()


def test_slots_by_memory(tiny_tokenizer_dir, prompts):
    """A sample of 48 positions: 2 layers, 2 groups of 8 channels, keys and values in fp32."""
    ppo = {**PPO, "generation": {"kv_cache_gb": 3.5 * 2 * 2 * 8 * 2 * 4 * 48 / 1e9}}
    actor = MegatronGPTActorModel(tiny_config(tiny_tokenizer_dir, ppo=ppo))
    assert actor.generator.slots_within(3.5 * 2 * 2 * 8 * 2 * 4 * 48) == 3
    assert actor.generator.slots_within(1) == 1
    names = "text", "length", "sample_seeds"
    rows = zip(*(x.split(2) for x in prompts), strict=True)
    batches = [dict(zip(names, columns, strict=True)) for columns in rows]
    groups = [len(group["length"]) for group, _rollout in actor.infer_all(batches)]
    assert sum(groups) == ROWS and max(groups) == 2 and groups[:2] == [2, 1]
    batches[0]["rank_batches"] = 1
    groups = [len(group["length"]) for group, _rollout in actor.infer_all(batches)]
    assert sum(groups) == ROWS and set(groups) == {2}


def test_a_stream_that_is_left_gives_the_model_back(llama, prompts):
    llama.set_train()
    stream = generator_of(llama).stream(iter([prompts]), ENDS_OFTEN, slots=2)
    next(stream)
    assert not llama.model[0].training
    stream.close()
    assert llama.model[0].training
    with pytest.raises(UserError, match="prompt 0 of the batch is empty"):
        bad = prompts[0], torch.zeros_like(prompts[1]), prompts[2]
        list(generator_of(llama).stream(iter([prompts, bad]), ENDS_OFTEN, slots=2))
    assert llama.model[0].training


YARN = {"position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 4.0}
ARCHITECTURES = [
    dict(window_size=[3, 0], window_attn_skip_freq=2),
    dict(**YARN, yarn_original_max_position_embeddings=12),
    dict(num_moe_experts=4, moe_ffn_hidden_size=24, moe_router_topk=2),
    dict(qk_layernorm=True, add_qkv_bias=True),
    dict(rotary_percentage=0.5),
    dict(rotary_interleaved=True),
    dict(no_rope_freq=2),
    dict(query_pre_attn_scalar=3),
    dict(num_query_groups=4, activation="squared-relu", bias=True),
    dict(layernorm_zero_centered_gamma=True, activation="geglu", openai_gelu=True),
    dict(apply_embedding_scaling=True, share_embeddings_and_output_weights=True),
]


@some_of("overrides", ARCHITECTURES, keep=3, ids=lambda overrides: next(iter(overrides)))
def test_every_architecture_decodes_as_it_trains(
    tiny_tokenizer_dir, prompts, overrides, monkeypatch
):
    """In slots and pieces, so that each kind of pass through the model takes part."""
    model = large(tiny_tokenizer_dir, **overrides)
    params = GenerationParams(max_length=14, temperature=1.2)
    monkeypatch.setattr(engine, "PREFILL_TOKENS", 3)
    output = generated(model, prompts, params, slots=5)
    assert samples_of(output) == [ids for ids, _ in naive_samples(model, prompts, params)]


def test_adapters_count_whether_merged_or_not(tiny_tokenizer_dir, prompts):
    model = MegatronGPTActorModel(tiny_config(tiny_tokenizer_dir, init_method_std=0.4, ppo=PPO))
    given = *prompts, GenerationParams(max_length=14, temperature=1.2)
    base = samples_of(model.generator.generate(*given))
    tuning = {"adapter_dim": 4, "alpha": 8, "column_init_method": "normal"}
    model.init_peft({"peft_scheme": "lora", "lora_tuning": tuning})
    with torch.no_grad():
        for _, adapter in model._adapters:
            adapter.b.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    apart = samples_of(model.generator.generate(*given))
    with model.adapters_merged():
        merged = samples_of(model.generator.generate(*given))
    naive = [ids for ids, _ in naive_samples(model, prompts, given[-1])]
    assert apart == merged == naive != base
