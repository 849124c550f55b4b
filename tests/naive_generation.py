# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Text generation as an oracle: one sample at a time, with a full forward pass for each token.

It shares only the definition of the random stream with `nemo_aligner.generation`, and computes it
itself.
"""

import math

import torch

MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    """Output of SplitMix64 at `state`, in Python's integers (constants of Steele, Lea and Flood,
    2014).
    """
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def naive_uniform(seed: int, step: int) -> float:
    """The random number of the stream `seed` at `step`."""
    return (splitmix64((splitmix64(seed & MASK) + step * 0x9E3779B97F4A7C15) & MASK) >> 11) / 2**53


def naive_probabilities(
    logits, ids, temperature=1.0, top_k=0, top_p=1.0, penalty=1.0, forbidden=()
) -> list[float]:
    """Probabilities of the id that follows `ids`."""
    logits = list(logits)
    for token in set(ids):
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in forbidden:
        logits[token] = -math.inf
    logits = [x / temperature for x in logits]
    if top_k:
        smallest = sorted(logits, reverse=True)[min(top_k, len(logits)) - 1]
        logits = [x if x >= smallest else -math.inf for x in logits]
    most = max(logits)
    weights = [math.exp(x - most) for x in logits]
    probabilities = [w / sum(weights) for w in weights]
    kept, total = set(), 0.0
    for token in sorted(range(len(logits)), key=lambda t: (-probabilities[t], t)):
        if total >= top_p:
            break
        kept.add(token)
        total += probabilities[token]
    return [p / total if token in kept else 0.0 for token, p in enumerate(probabilities)]


def naive_draw(probabilities, uniform: float) -> int:
    """First id whose cumulative probability exceeds `uniform`."""
    total, token = 0.0, 0
    for token, probability in enumerate(probabilities):
        total += probability
        if total > uniform:
            return token
    return max(t for t, p in enumerate(probabilities) if p > 0)


@torch.no_grad()
def naive_generate(
    model, prompt: list[int], seed: int, params, limit: int = 10**9, drawn: int = 0
) -> tuple[list[int], bool]:
    """The ids of prompt and response, and whether the response ended by itself.

    Args:
        model: `MegatronGPTModel` of one rank.
        params: `GenerationParams`. An end string of one token means that token; others are
            searched for in the decoded sample.
        limit: longest sample.
        drawn: random numbers of the stream that earlier responses have used.
    """
    eos, vocab = model.tokenizer.eos_id, model.tokenizer.vocab_size
    ids = list(prompt)
    encoded = {end: model.tokenizer.text_to_ids(end) for end in params.end_strings}
    end_ids = [eos] + [end[0] for end in encoded.values() if len(end) == 1]
    end_texts = tuple(end for end, tokens in encoded.items() if len(tokens) > 1)
    model.set_eval()
    for step in range(params.max_length):
        if len(ids) >= limit:
            break
        positions = torch.arange(len(ids)).unsqueeze(0)
        logits = model.model[0](torch.tensor([ids]), positions, None)[0, -1]
        logits = logits.float().tolist()[:vocab]
        early = drawn + step < params.min_length
        shape = dict(penalty=params.repetition_penalty, forbidden=end_ids if early else [])
        if params.use_greedy:
            probabilities = naive_probabilities(logits, ids, **shape)
            token = probabilities.index(max(probabilities))
        else:
            shape |= dict(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p)
            token = naive_draw(
                naive_probabilities(logits, ids, **shape), naive_uniform(seed, drawn + step)
            )
        ids.append(token)
        decoded = model.tokenizer.ids_to_text(ids)
        if drawn + step >= params.min_length and (token in end_ids or decoded.endswith(end_texts)):
            return ids, True
    return ids, False


def naive_conversation(model, prompt: list[int], seed: int, params, reply, max_turns, limit):
    """A sample of several turns: its ids, `[(first, beyond the last)]` of the responses, their
    rewards, and whether it ended by itself.

    Args:
        reply: (prompt, responses so far), ids, to (observation, reward, done).
        limit: longest sample.
    """
    ids, responses, spans, rewards, drawn = list(prompt), [], [], [], 0
    while True:
        start = len(ids)
        ids, is_end = naive_generate(model, ids, seed, params, limit, drawn)
        drawn += len(ids) - start
        responses.append(ids[start:])
        spans.append((start, len(ids)))
        observation, reward, done = reply(prompt, responses)
        rewards.append(reward)
        no_room = len(ids) + len(observation) >= limit
        if done or not is_end or len(responses) == max_turns or no_room:
            return ids, spans, rewards, done and is_end
        ids += observation
