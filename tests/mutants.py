# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Planted faults, and the tests that must notice them: `python -m tests.mutants [NAME ...]`, or
`make mutants`.

Each fault is planted alone in a copy of the repository, where the tests that should notice it
run. It is caught if one of them fails by an assertion; a fault that merely crashes would be
noticed without a test. The same tests must first pass in the untouched copy. Exit code 1: a fault
was not caught, or its text is no longer in its file.
"""

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("nemo_aligner", "tests", "benchmarks", "conf", "examples", "setup.py", "pyproject.toml")
TIME_LIMIT_S = 3600  # for one run of pytest, which has limits of its own

UNIT, DISTRIBUTED = "tests/unit/", "tests/distributed/"


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        name: of the fault.
        file: that it is planted in, below the package, or `examples/...`.
        old, new: text of the file, and what takes its place; `old` must occur once.
        tests: selections for pytest that must notice it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def path(self) -> str:
        return self.file if self.file.startswith("examples/") else f"nemo_aligner/{self.file}"


def _unit(file: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{UNIT}{file}::{name}" for name in names)


def _two_ranks(split: str) -> tuple[str, ...]:
    return (f"{DISTRIBUTED}test_quick_splits.py::test_two_ranks_update_as_one_does[{split}]",)


# Of the problems with a known optimum, those without a whole training.
_KL_IN_REWARD = _unit(
    "test_kl_optimum.py",
    "test_expected_update_is_the_gradient_of_the_objective",
    "test_without_a_reward_only_k1_leads_back_to_the_reference",
)
_KL_IN_LOSS = _unit(
    "test_kl_optimum.py",
    "test_without_a_reward_only_k1_leads_back_to_the_reference",
    "test_kl_in_the_loss_reaches_the_optimum_of_what_it_penalises",
)

SPIN_ITERATIONS = "test_two_iterations_end_at_the_weights_of_a_loop_with_trl[False]"
PARTS_SUFFICE = "test_trainers_run_with_the_parts_of_nemo_aligner"
SPIN_RESUMES = (
    "test_a_job_resumes_within_an_iteration_and_between_two_as_if_it_had_not_stopped[full]"
)

MUTANTS = [
    # --- tokens with a meaning
    Mutant(
        "a text that begins with bos gets a second one",
        "core/tokenizer.py",
        "or list(ids[:1]) == [bos] else",
        "else",
        _unit("test_data.py", "test_bos_is_where_the_tokenizer_itself_puts_it"),
    ),
    Mutant(
        "only the tokenizer's own end token ends a response",
        "generation/text.py",
        "self.token_ids = end_ids(tokenizer)",
        "self.token_ids = [tokenizer.eos_id]",
        _unit(
            "test_hugging_face_tokens.py",
            "test_all_end_tokens_of_a_folder_end_responses[generation_config.json]",
        ),
    ),
    Mutant(
        "an exported reward model pads with a token that ends samples",
        "checkpoint/hugging_face/writing.py",
        "if number not in ends]",
        "if number is not None]",
        _unit("test_hugging_face_tokens.py", "test_an_exported_reward_model_gives_our_rewards"),
    ),
    # --- generation
    Mutant(
        "Megatron-LM's number of query groups counts without its switch",
        "checkpoint/megatron_keys.py",
        'if args.get("group_query_attention", "num_query_groups" in args):',
        'if "num_query_groups" in args:',
        _unit("test_megatron_folders.py", "test_arguments_of_two_ages"),
    ),
    Mutant(
        "a checkpoint of Megatron-LM may name what runs code",
        "checkpoint/data_only.py",
        "        if unknown:\n            raise UserError(",
        "        if unknown and not names:\n            raise UserError(",
        _unit("test_megatron_folders.py", "test_faults_of_folders_are_named"),
    ),
    Mutant(
        "a response takes the cached keys of another prompt",
        "generation/batch.py",
        "moves.append((sources[sample.prompt], slot))",
        "moves.append((0, slot))",
        _unit("test_generation.py", "test_slots_and_pieces_of_prompts_change_nothing"),
    ),
    Mutant(
        "a sample attends to what an earlier one left in its slot",
        "generation/cache.py",
        "hidden = places > self.positions\n",
        "hidden = places > self.positions.max().expand_as(self.positions)\n",
        _unit("test_generation.py", "test_slots_and_pieces_of_prompts_change_nothing"),
    ),
    Mutant(
        "a sample that moves to another slot leaves its random stream behind",
        "generation/batch.py",
        "fed positions last drawn uniforms seen",
        "fed positions last drawn seen",
        _unit("test_generation.py", "test_samples_that_end_early_leave_the_others_alone"),
    ),
    Mutant(
        "what a slot computed beyond the end of its response is kept",
        "generation/batch.py",
        "ended.append((slot, is_end))\n                    break\n",
        "ended.append((slot, is_end))\n",
        _unit("test_generation.py", "test_steps_do_not_wait"),
    ),
    Mutant(
        "ids beyond the end of a response count as seen in the next turn",
        "generation/batch.py",
        "        if self.seen is not None:\n            lengths = torch.tensor(",
        "        if self.seen is not None and slots[1:]:\n            lengths = torch.tensor(",
        _unit("test_turns.py", "test_conversations_are_those_of_a_naive_loop"),
    ),
    Mutant(
        "a window of attention is forgotten once tokens are generated",
        "generation/cache.py",
        "hidden |= places < self.positions - window",
        "hidden |= places < self.positions - self.width",
        _unit("test_generation.py", "test_every_architecture_decodes_as_it_trains[window_size]"),
    ),
    Mutant(
        "ranks that divide samples put responses in each other's places",
        "generation/split.py",
        "tensor_split(size)[rank]",
        "tensor_split(size)[size - 1 - rank]",
        (
            f"{DISTRIBUTED}test_generation_splits.py::test_texts_are_those_of_the_split_of_training",
        ),
    ),
    Mutant(
        "both halves of a gated layer are moved for generation as if they lay side by side",
        "generation/resharding.py",
        'getattr(tensor, "partition_stride", 1)',
        'getattr(tensor, "parts_side_by_side", 1)',
        (
            f"{DISTRIBUTED}test_generation_splits.py::test_texts_are_those_of_the_split_of_training",
        ),
    ),
    Mutant(
        "weights that arrive damaged for generation are used",
        "generation/resharding.py",
        "if value not in trained[name]:",
        "if name not in trained:",
        (
            f"{DISTRIBUTED}test_generation_splits.py::test_texts_are_those_of_the_split_of_training",
        ),
    ),
    Mutant(
        "data-parallel ranks that generate together get each other's responses",
        "generation/split.py",
        "for _, lengths, *_ in batches[:rank])",
        "for _, lengths, *_ in batches[rank + 1 :])",
        (
            f"{DISTRIBUTED}test_generation_splits.py::test_texts_are_those_of_the_split_of_training",
        ),
    ),
    Mutant(
        "every gloo group opens a device of its own",
        "parallel/rendezvous.py",
        "if key not in _devices:",
        "if rank >= 0:",
        (f"{DISTRIBUTED}test_gloo_devices.py",),
    ),
    Mutant(
        "a packed weight loses its bias",
        "parallel/cpu_operations.py",
        "product(x, packed, bias, *_NO_ACTIVATION)",
        "product(x, packed, None, *_NO_ACTIVATION)",
        _unit("test_cpu_products.py", "test_a_packed_weight_multiplies_as_the_weight"),
    ),
    # --- preference pairs without a reward model
    Mutant(
        "DPO pushes rejected responses up",
        "core/preference.py",
        "        chosen - rejected,\n        beta=beta",
        "        rejected - chosen,\n        beta=beta",
        _unit("test_oracle_losses.py", "test_same_as[DPO and IPO-trl]"),
    ),
    Mutant(
        "label smoothing exchanges the wrong share of the pairs",
        "core/preference.py",
        "- label_smoothing * logsigmoid(-logits)",
        "- label_smoothing * logsigmoid(logits)",
        _unit("test_oracle_losses.py", "test_same_as[DPO and IPO-openrlhf]"),
    ),
    Mutant(
        "IPO aims at twice its target",
        "core/preference.py",
        "1 / (2 * beta)",
        "1 / beta",
        _unit("test_oracle_losses.py", "test_same_as[DPO and IPO-nemo-aligner]"),
    ),
    Mutant(
        "the two KLs of RPO are exchanged",
        "core/preference.py",
        'preference_loss == "rpo_bwd_kl"',
        'preference_loss == "rpo_fwd_kl"',
        _unit("test_oracle_losses.py", "test_same_as[RPO-nemo-aligner]"),
    ),
    Mutant(
        "the likelihood of rejected responses is raised",
        "core/preference.py",
        "pairs(logprobs, sft_average_log_probs)[0]",
        "pairs(logprobs, sft_average_log_probs)[1]",
        _unit(
            "test_oracle_losses.py",
            "test_same_as[likelihood of chosen responses-nemo-aligner]",
        ),
    ),
    Mutant(
        "the masks of DPO are those of the tokens, not of their predictions",
        "models/nlp/gpt/megatron_gpt_dpo_model.py",
        'both["mask"][:, 1:]',
        'both["mask"][:, :-1]',
        _unit("test_dpo_model.py", "test_twenty_steps_end_at_the_weights_of_trl"),
    ),
    Mutant(
        "the reference of DPO learns with the policy",
        "models/nlp/gpt/log_probs.py",
        "return self.swapped_weights(self.init_policy_state_dict)",
        "return self.swapped_weights(self.weights_to_cpu())",
        _unit("test_dpo_model.py", "test_twenty_steps_end_at_the_weights_of_trl"),
    ),
    Mutant(
        "the prompt counts in the loss of DPO",
        "data/nlp/record_encoder.py",
        "[n >= first for",
        "[n >= 0 for",
        _unit(
            "test_dpo_model.py",
            "test_items_are_the_tokens_of_the_texts_with_masks_of_the_responses",
        ),
    ),
    Mutant(
        "earlier responses of a conversation count in the loss of DPO",
        "data/nlp/conversation_form.py",
        "self.encode_messages(chosen, record, first)",
        "self.encode_messages(chosen, record)",
        _unit("test_dpo_model.py", "test_only_the_last_response_of_a_conversation_counts"),
    ),
    Mutant(
        "log-probs of the reference that are kept belong to the next token",
        "algorithms/reference_log_probs.py",
        "row[item[mask][1:] != 0].float()",
        "row[item[mask][:-1] != 0].float()",
        _unit("test_reference_log_probs.py", "test_the_data_have_what_was_computed_once"),
    ),
    Mutant(
        "of two samples of an item the kept log-probs are exchanged",
        "algorithms/reference_log_probs.py",
        "torch.stack(logprobs.chunk(samples), dim=1)",
        "torch.stack(logprobs.chunk(samples)[::-1], dim=1)",
        _unit("test_reference_log_probs.py", "test_the_data_have_what_was_computed_once"),
    ),
    Mutant(
        "kept log-probs of other weights are used",
        "algorithms/reference_log_probs.py",
        "[weights, _fingerprint_of_checkpoint(checkpoint), str",
        "[str",
        _unit(
            "test_reference_log_probs.py",
            "test_of_another_model_or_other_data_they_are_computed_again",
        ),
    ),
    Mutant(
        "kept log-probs of another form of conversations are used",
        "algorithms/reference_log_probs.py",
        "[tokenizer_fingerprint(model.tokenizer), settings_of(model.tokenizer, *how)]",
        "[tokenizer_fingerprint(model.tokenizer)]",
        _unit(
            "test_reference_log_probs.py",
            "test_the_key_sees_lengths_templates_tokenizers_and_checkpoints",
        ),
    ),
    Mutant(
        "damaged files of kept log-probs are read",
        "algorithms/reference_log_probs.py",
        "        check_files_together(folder)\n",
        "",
        _unit(
            "test_reference_log_probs.py", "test_damaged_files_are_computed_again_with_one_line"
        ),
    ),
    Mutant(
        "kept log-probs are those of the policy with its adapters",
        "models/nlp/gpt/log_probs.py",
        "        if self._reference_is_base():\n            return self.adapters_disabled()",
        "        if self._reference_is_base() and not self._is_reference:\n"
        "            return self.adapters_disabled()",
        (
            "tests/distributed/test_reference_log_probs.py"
            "::test_every_split_keeps_the_log_probs_of_one_rank",
        ),
    ),
    Mutant(
        "a rank whose disk is full leaves the others waiting",
        "algorithms/reference_log_probs.py",
        "        with failing_together(folder):\n            if writer is not None:\n"
        "                for",
        "        if True:\n            if writer is not None:\n                for",
        (
            "tests/distributed/test_reference_log_probs.py"
            "::test_a_full_disk_on_one_rank_is_an_error_on_both",
        ),
    ),
    # --- a student that responds itself
    Mutant(
        "labels of a student's own responses are the tokens themselves",
        "algorithms/on_policy_distillation.py",
        "tokens.roll(-1, 1)",
        "tokens",
        _unit("test_on_policy_distillation.py", "test_own_responses_take_the_place_of_the_datas"),
    ),
    Mutant(
        "a student's own responses to empty slots count",
        "algorithms/on_policy_distillation.py",
        '    counts &= batch["loss_mask"].ne(0).any(-1, keepdim=True)\n',
        "",
        _unit("test_on_policy_distillation.py", "test_own_responses_take_the_place_of_the_datas"),
    ),
    Mutant(
        "the prompts of a student's own responses count",
        "algorithms/on_policy_distillation.py",
        "(label >= prompts[:, None]) & ",
        "",
        _unit("test_on_policy_distillation.py", "test_own_responses_take_the_place_of_the_datas"),
    ),
    Mutant(
        "a student repeats its responses in every step",
        "algorithms/on_policy_distillation.py",
        'sample_seeds(self.seed, self.step, batch["idx"])',
        'sample_seeds(self.seed, 0, batch["idx"])',
        _unit(
            "test_on_policy_distillation.py",
            "test_loss_and_gradient_on_own_responses_are_those_of_gkd",
        ),
    ),
    Mutant(
        "every update learns from the student's own responses",
        "algorithms/on_policy_distillation.py",
        "2**63 < self.fraction",
        "2**63 < 1",
        _unit(
            "test_on_policy_distillation.py",
            "test_updates_are_on_policy_with_the_asked_probability",
        ),
    ),
    Mutant(
        "a teacher's logits that are not numbers are learned",
        "servers/validation.py",
        "spec.name, array, ~np.isfinite(array), _NAN",
        "spec.name, array, np.zeros((0, 1)), _NAN",
        _unit("test_on_policy_distillation.py", "test_replies_that_cannot_be_used"),
    ),
    # --- a student and its teacher
    Mutant(
        "a token of the policy is charged with the forward log-ratio of its teacher",
        "algorithms/ppo_data.py",
        'response["logprobs"] - response["teacher_logprobs"]',
        'response["teacher_logprobs"] - response["logprobs"]',
        _unit("test_ppo_data.py", "test_a_policy_that_is_its_teacher_learns_nothing_from_it"),
    ),
    Mutant(
        "a teacher's advantages are left out",
        "algorithms/ppo_data.py",
        "    if of_teacher is not None:\n        advantages = advantages + of_teacher\n",
        "",
        _unit("test_ppo_data.py", "test_a_policy_that_is_its_teacher_learns_nothing_from_it"),
    ),
    Mutant(
        "a teacher's log-prob is that of the token before",
        "models/nlp/gpt/megatron_gpt_knowledge_distillation.py",
        'micro_batch["tokens"].roll(-1, 1)',
        'micro_batch["tokens"]',
        _unit(
            "test_on_policy_distillation.py",
            "test_a_reply_has_the_log_prob_of_the_token_behind_each",
        ),
    ),
    Mutant(
        "forward and backward KL to a teacher are exchanged",
        "core/distillation.py",
        'if kd_loss == "fwd_kl":\n        return _kl(teacher, student)',
        'if kd_loss == "fwd_kl":\n        return _kl(student, teacher)',
        _unit("test_oracle_losses.py", "test_same_as[forward KL to a teacher-verl]"),
    ),
    Mutant(
        "the mixture of student and teacher has their shares exchanged",
        "core/distillation.py",
        "teacher + math.log(jsd_beta), student + math.log1p(-jsd_beta)",
        "student + math.log(jsd_beta), teacher + math.log1p(-jsd_beta)",
        _unit("test_distillation.py", "test_against_a_naive_loop_with_the_full_softmax"),
    ),
    Mutant(
        "the student is not renormalized over the top-k tokens",
        "core/distillation.py",
        "student = student.log_softmax(-1)",
        "student = student.clone()",
        _unit("test_oracle_losses.py", "test_same_as[backward KL to a teacher-nemo-aligner]"),
    ),
    Mutant(
        "the teacher's other tokens have the probability of its top-k tokens",
        "core/distillation.py",
        "rest = torch.log(-torch.expm1(log_mass.clamp(max=-SMALLEST_REST)))",
        "rest = log_mass",
        _unit("test_distillation.py", "test_against_a_naive_loop_with_the_full_softmax"),
    ),
    Mutant(
        "the student's other tokens include the top-k ones",
        "parallel/vocab_parallel.py",
        "zeros = torch.where(here[..., :count], 0.0, torch.inf)",
        "zeros = torch.where(here[..., :count], torch.inf, torch.inf)",
        _unit("test_vocab_candidates.py", "test_logprobs_and_gradient_against_dense_softmax"),
    ),
    Mutant(
        "the largest logits are those of one slice of the vocabulary",
        "parallel/vocab_parallel.py",
        "index + shard.first",
        "index",
        (f"{DISTRIBUTED}test_vocab_parallel.py",),
    ),
    Mutant(
        "logits of another tokenizer are learned",
        "data/nlp/topk_logits.py",
        "theirs != fingerprint:",
        "theirs == '':",
        _unit("test_topk_logits.py", "test_bad_files_end_with_one_line"),
    ),
    Mutant(
        "a file of logits that was cut is read",
        "data/nlp/topk_logits.py",
        "if count < rows:",
        "if count < 0:",
        _unit("test_topk_logits.py", "test_bad_files_end_with_one_line"),
    ),
    Mutant(
        "a damaged line of logits is read",
        "data/nlp/topk_logits.py",
        'record["checksum"] != _checksum(record)',
        'record["checksum"] == ""',
        _unit("test_topk_logits.py", "test_bad_files_end_with_one_line"),
    ),
    Mutant(
        "the teacher's logits belong to the next token",
        "data/nlp/topk_logits.py",
        "spread[counts] = values",
        "spread[np.roll(counts, 1)] = values",
        _unit("test_topk_logits.py", "test_items_are_what_was_written"),
    ),
    Mutant(
        "KTO pushes rejected responses up",
        "core/preference.py",
        "ratios - reference_point, reference_point - ratios",
        "ratios - reference_point, ratios - reference_point",
        _unit("test_oracle_losses.py", "test_same_as[KTO-trl]"),
    ),
    Mutant(
        "the weights of desirable and undesirable responses are exchanged",
        "core/preference.py",
        "torch.where(good, desirable_loss_weight, undesirable_loss_weight)",
        "torch.where(good, undesirable_loss_weight, desirable_loss_weight)",
        _unit("test_oracle_losses.py", "test_same_as[KTO-nemo-aligner]"),
    ),
    Mutant(
        "the reference point of KTO may be below 0",
        "models/nlp/gpt/megatron_gpt_kto_model.py",
        "(weights * ratios).sum()).clamp(min=0)",
        "(weights * ratios).sum())",
        _unit(
            "test_kto_model.py",
            "test_the_reference_point_is_a_mean_over_responses_and_at_least_0",
        ),
    ),
    Mutant(
        "a sample of KTO is compared with its own response",
        "data/nlp/datasets.py",
        "if self.documents[n] != self.documents[place]",
        "if n == place",
        _unit(
            "test_kto_model.py",
            "test_items_are_the_tokens_of_the_texts_with_masks_of_the_responses",
        ),
    ),
    Mutant(
        "earlier responses of a conversation count in the loss of KTO",
        "data/nlp/conversation_form.py",
        "return self.encode_messages(messages, record, first)",
        "return self.encode_messages(messages, record)",
        _unit("test_kto_model.py", "test_only_the_response_to_a_conversation_counts"),
    ),
    Mutant(
        "a response without the thoughts that its template cuts is trained on",
        "data/nlp/chat_template.py",
        "        check_written(number, messages[place], turn)\n",
        "",
        _unit("test_chat_turns.py", "test_a_response_that_the_template_cuts_is_refused"),
    ),
    Mutant(
        "responses to plain prompts end at the end of a turn of a template that nobody asked for",
        "data/nlp/chat.py",
        "        return ()\n    return form.end_strings",
        "        return ('<|im_end|>',)\n    return form.end_strings",
        _unit("test_chat.py", "test_a_policy_of_plain_prompts_ends_them_as_without_a_template"),
    ),
    Mutant(
        "the end-of-turn token behind a mark of a chat template is not trained on",
        "data/nlp/chat_template.py",
        "end = found.end()",
        "end = found.start()",
        _unit("test_chat_turns.py", "test_the_end_of_a_marked_turn_is_trained"),
    ),
    Mutant(
        "SteerLM 2 learns what should be less probable",
        "core/preference.py",
        "torch.where(counts, log_weights.exp() - wanted, 0.0)",
        "torch.where(counts, wanted - log_weights.exp(), 0.0)",
        _unit("test_steerlm2.py", "test_factors_are_the_gradient_by_autograd"),
    ),
    Mutant(
        "the weights of SteerLM 2 forget the earlier policy",
        "core/preference.py",
        "log_policy.double() - log_q.double(), -torch.inf",
        "log_policy.double() - 0 * log_q.double(), -torch.inf",
        _unit("test_steerlm2.py", "test_losses_equal_a_naive_loop"),
    ),
    Mutant(
        "a prompt of SteerLM 2 with more responses counts less",
        "core/preference.py",
        "(tokens.double().sum(1) / counts.sum(1).clamp(min=1))",
        "tokens.double().sum(1)",
        _unit("test_steerlm2.py", "test_factors_are_the_gradient_by_autograd"),
    ),
    Mutant(
        "the target of SteerLM 2 counts the earlier policy twice",
        "core/preference.py",
        "log_p_attributes.double() + log_p_response - log_q",
        "log_p_attributes.double() + log_p_response + log_q",
        _unit("test_steerlm2.py", "test_targets_are_the_normalized_importance_weights"),
    ),
    Mutant(
        "earlier responses of a prompt count in the loss of SteerLM 2",
        "data/nlp/steerlm.py",
        "[place >= start for place in range(len(tokens))]",
        "list(_is_response)",
        _unit("test_steerlm2.py", "test_texts_masks_and_weights_by_hand"),
    ),
    Mutant(
        "the weights of SteerLM 2 are computed with dropout",
        "models/nlp/gpt/gpt_steerlm_model.py",
        "        self.set_eval()\n        return forward_collect(",
        "        self.set_train()\n        return forward_collect(",
        _unit("test_steerlm2.py", "test_weights_of_responses_are_computed_without_dropout"),
    ),
    Mutant(
        "missing responses of SteerLM 2 share the weight of the others",
        "core/preference.py",
        "counts = tokens > 0",
        "counts = tokens >= 0",
        _unit("test_steerlm2.py", "test_losses_equal_a_naive_loop"),
    ),
    Mutant(
        "the attribute model reads the labels that it is asked for",
        "data/nlp/steerlm.py",
        "turn.value), None, NEMO_TOKENS)",
        'turn.value, turn.label), "VALUE_TO_TEXT", NEMO_TOKENS)',
        _unit("test_steerlm.py", "test_the_text_of_a_response_ends_where_its_label_would_begin"),
    ),
    Mutant(
        "attributes leave their range",
        "data/nlp/steerlm.py",
        "round(min(max(float(value), LOWEST), HIGHEST))",
        "round(float(value))",
        _unit("test_steerlm.py", "test_labels_are_texts_and_numbers"),
    ),
    Mutant(
        "comparisons of other responses are taken for those of these",
        "examples/nlp/cai/constitutional.py",
        "judge.fingerprint(constitution, judge_request(found[number]))",
        "judge.fingerprint(constitution)",
        _unit(
            "test_constitutional_ai.py",
            "test_comparisons_are_data_of_a_reward_model_and_of_ppo",
        ),
    ),
    Mutant(
        "a rank draws the share of others from a common queue",
        "models/nlp/gpt/megatron_gpt_policy.py",
        "min(slots, share * size)",
        "slots",
        _unit("test_generation.py", "test_slots_by_memory"),
    ),
    Mutant(
        "Lightning ends a job before its error is printed",
        "launch/endings.py",
        "        processes.clear()\n",
        "        pass\n",
        _unit("test_start_up.py", "test_lightning_no_longer_watches_what_a_job_ends_itself"),
    ),
    Mutant(
        "a server that lost the tensors of an endpoint stays up",
        "servers/triton_host.py",
        "parts.append(child)",
        "pass",
        (
            "tests/functional/test_critic_server.py::"
            "test_a_job_whose_triton_is_killed_ends_with_one_message",
        ),
    ),
    Mutant(
        "what is left of a failed request ends workers that are well",
        "servers/user_code.py",
        "                if task.is_over():  # it",
        "                if False:  # it",
        _unit("test_reward_function.py", "test_what_is_left_of_a_failed_request_ends_no_worker"),
    ),
    Mutant(
        "a worker that was ended is replaced when a sample needs it",
        "servers/user_code.py",
        "self._work_off(worker, task) or self._start_ahead()",
        "self._work_off(worker, task)",
        _unit(
            "test_reward_function.py",
            "test_a_worker_that_was_ended_is_replaced_before_the_next_request",
        ),
    ),
    Mutant(
        "a resumed annotation starts afresh",
        "examples/nlp/data/steerlm/annotation.py",
        "for number in range(first, len(records)):",
        "for number in range(0 * first, len(records)):",
        _unit("test_steerlm.py", "test_a_stopped_annotation_goes_on_where_it_ended"),
    ),
    Mutant(
        "a torn last line stays in a file that grows",
        "data/nlp/growing_files.py",
        "file.truncate(end)",
        "pass",
        _unit("test_steerlm.py", "test_a_stopped_annotation_goes_on_where_it_ended"),
    ),
    Mutant(
        "a client of rewards takes a server of attributes",
        "servers/served_model.py",
        "if served.attributes > 1 and",
        "if False and",
        _unit("test_steerlm.py", "test_a_client_of_rewards_refuses_a_server_of_attributes"),
    ),
    Mutant(
        "a stopped command of constitutional AI asks everything again",
        "examples/nlp/cai/constitutional.py",
        "for number in range(self.count) if number not in self._found]",
        "for number in range(self.count)]",
        _unit("test_constitutional_ai.py", "test_a_stopped_command_asks_for_what_is_missing"),
    ),
    Mutant(
        "all prompts of constitutional AI share a random stream",
        "examples/nlp/cai/constitutional.py",
        'f"{seed} {what} {number}"',
        'f"{seed} {what}"',
        _unit("test_constitutional_ai.py", "test_revisions_of_the_engine_resume_to_the_same"),
    ),
    Mutant(
        "the worse response of a comparison comes first",
        "examples/nlp/cai/constitutional.py",
        'for side in ("chosen", "rejected"):',
        'for side in ("rejected", "chosen"):',
        _unit(
            "test_constitutional_ai.py",
            "test_comparisons_are_data_of_a_reward_model_and_of_ppo",
        ),
    ),
    Mutant(
        "a request to a chat server is sent once",
        "examples/nlp/cai/chat_models.py",
        "if not error.may_pass or number == self.tries:",
        "if number:",
        _unit("test_constitutional_ai.py", "test_an_unusable_reply_is_one_line"),
    ),
    Mutant(
        "a revision does not see what came before",
        "examples/nlp/cai/constitutional.py",
        'work.say("assistant", found[work.result[NUMBER]])',
        "pass",
        _unit("test_constitutional_ai.py", "test_revisions_are_data_of_supervised_fine_tuning"),
    ),
    Mutant(
        "REINFORCE does not compare sampler and trainer",
        "algorithms/reinforce.py",
        "return data, metrics | rollout_health(local, data)",
        "return data, metrics",
        _unit(
            "test_reinforce.py",
            "test_the_sampler_is_compared_where_the_log_probs_are_known",
        ),
    ),
    Mutant(
        "conversations with two prompts are a pair",
        "data/nlp/chat_records.py",
        "same = said[0] == also[0] == one[-1][0]",
        "same = True",
        _unit("test_data.py", "test_neighbouring_conversations_are_pairs_of_one_prompt"),
    ),
    Mutant(
        "the prompt of a pair of whole texts ends with its first mark",
        "data/nlp/record_encoder.py",
        "shared.rfind(self.prompt_end)",
        "shared.find(self.prompt_end)",
        _unit("test_data.py", "test_a_key_says_where_the_prompt_of_whole_texts_ends"),
    ),
    Mutant(
        "a pair of the same tokens is trained on",
        "data/nlp/record_encoder.py",
        "if chosen == rejected:",
        "if False:",
        _unit("test_dpo_model.py", "test_pairs_of_the_same_tokens_are_named"),
    ),
    Mutant(
        "the baseline of REINFORCE counts responses that did not end",
        "algorithms/reinforce.py",
        "valid=is_end & mask.bool().any(1)",
        "valid=mask.bool().any(1)",
        _unit("test_reinforce.py", "test_data_equal_a_naive_loop"),
    ),
    Mutant(
        "the KL of REINFORCE is the sum over the tokens",
        "algorithms/reinforce.py",
        "masked_sum(kl, mask, dim=1) / mask.sum(1).clamp(min=1)",
        "masked_sum(kl, mask, dim=1)",
        _unit("test_reinforce.py", "test_data_equal_a_naive_loop"),
    ),
    Mutant(
        "REINFORCE trains on responses that did not end",
        "models/nlp/gpt/megatron_gpt_reinforce_actor.py",
        'mask = batch["mask"] * batch["is_end"].unsqueeze(-1)',
        'mask = batch["mask"]',
        _unit("test_reinforce_actor.py", "test_loss_is_that_of_a_naive_loop"),
    ),
    Mutant(
        "REINFORCE lowers the likelihood of good responses",
        "core/losses.py",
        "loss = -(weights * kept(advantages, weights) * kept(logprobs, weights)).sum()",
        "loss = (weights * kept(advantages, weights) * kept(logprobs, weights)).sum()",
        _unit("test_reinforce_actor.py", "test_loss_is_that_of_a_naive_loop"),
    ),
    # --- SPIN
    Mutant(
        "the reference of SPIN stays the first policy",
        "algorithms/spin.py",
        "if self.objective_age == 0:\n            self.model.set_reference_policy()",
        "if self.step == 0:\n            self.model.set_reference_policy()",
        _unit("test_spin_model.py", SPIN_ITERATIONS),
    ),
    Mutant(
        "with adapters the reference of SPIN is the bare base",
        "models/nlp/gpt/log_probs.py",
        "        return False\n",
        "        return self.use_peft\n",
        _unit(
            "test_spin_model.py",
            "test_with_adapters_the_reference_is_those_of_the_iteration_before",
        ),
    ),
    Mutant(
        "a checkpoint lacks the reference of the iteration",
        "checkpoint/checkpointing.py",
        "return {**state, REFERENCE: reference} if reference else state",
        "return state",
        _unit("test_spin_model.py", SPIN_RESUMES),
    ),
    Mutant(
        "the reference of SPIN moves within an iteration",
        "algorithms/spin.py",
        "if self.objective_age == 0:\n            self.model.set_reference_policy()",
        "self.model.set_reference_policy()",
        _unit("test_spin_model.py", SPIN_ITERATIONS),
    ),
    Mutant(
        "the policy generates in place of its reference",
        "algorithms/spin.py",
        "with self.model.reference_policy():",
        "with torch.no_grad():",
        _unit("test_spin_model.py", SPIN_ITERATIONS),
    ),
    Mutant(
        "all iterations of SPIN have the beta of the first",
        "models/nlp/gpt/megatron_gpt_spin_model.py",
        "penalty = penalty[iteration]",
        "penalty = penalty[0]",
        _unit("test_spin_model.py", SPIN_ITERATIONS),
    ),
    Mutant(
        "SPIN prefers the policy's own responses",
        "models/nlp/gpt/megatron_gpt_spin_model.py",
        '{"actual": "chosen", "generated": "rejected"}',
        '{"actual": "rejected", "generated": "chosen"}',
        _unit("test_spin_model.py", SPIN_ITERATIONS),
    ),
    Mutant(
        "examples without a response count in the loss of SPIN",
        "algorithms/spin.py",
        '"loss_multiplier": (batch["prompt_lengths"] < lengths).float(),',
        '"loss_multiplier": torch.ones(len(lengths)),',
        _unit("test_spin_model.py", SPIN_ITERATIONS),
    ),
    Mutant(
        "prompts of SPIN get the responses to others",
        "algorithms/spin.py",
        '"sample_key": torch.arange(len(lengths)),',
        '"sample_key": torch.arange(len(lengths)).flip(0),',
        _unit("test_spin_model.py", SPIN_ITERATIONS),
    ),
    Mutant(
        "generation for steps ahead runs into the next pass over the data",
        "algorithms/spin.py",
        "steps_per_pass - self.consumed_samples // self.global_batch_size % steps_per_pass,",
        "steps_per_pass,",
        _unit("test_spin_model.py", SPIN_ITERATIONS),
    ),
    Mutant(
        "responses of SPIN depend on where the generation began",
        "algorithms/spin.py",
        "self._prompts(batch, self.step + i) for",
        "self._prompts(batch, i) for",
        _unit("test_spin_model.py", SPIN_RESUMES),
    ),
    Mutant(
        "each pass of SPIN has the same responses",
        "algorithms/spin.py",
        'sample_seeds(self.model.cfg.seed, step, batch["idx"])',
        'sample_seeds(self.model.cfg.seed, 0, batch["idx"])',
        _unit("test_spin_model.py", "test_samples_of_the_rollouts_are_written"),
    ),
    Mutant(
        "the form of conversations that a checkpoint keeps comes before the job's",
        "launch/model_loading.py",
        'forms = [asked_form(model_cfg.get("data") or {}), given.get',
        'forms = [own.get(KEPT_FORM), asked_form(model_cfg.get("data") or {}), given.get',
        _unit("test_kept_forms.py", "test_a_form_is_the_default_of_what_starts_from_its_job"),
    ),
    Mutant(
        "a dropout that the checkpoint stores acts in DPO",
        "launch/model_loading.py",
        "    merged.update(dict.fromkeys(stored, 0.0))",
        "    pass",
        _unit("test_dpo_model.py", "test_a_stored_dropout_is_off_unless_it_is_asked_for"),
    ),
    Mutant(
        "a dropout of 0 that is asked for is not written",
        "launch/model_loading.py",
        "        if model_cfg_to_overwrite.get(key) is not None:",
        "        if False:",
        _unit("test_dpo_model.py", "test_a_stored_dropout_is_off_unless_it_is_asked_for"),
    ),
    Mutant(
        "the alarms of SPIN judge the first steps of an iteration",
        "algorithms/alarms.py",
        "watched.value(metrics), step if age is None else age",
        "watched.value(metrics), step",
        _unit("test_spin_model.py", "test_the_alarms_know_where_an_iteration_begins"),
    ),
    Mutant(
        "an earlier turn of the assistant is the response of SPIN's data",
        "data/nlp/sft.py",
        "while start and trained[start - 1]:",
        "while start and any(trained[:start]):",
        _unit(
            "test_spin_model.py",
            "test_of_a_conversation_the_last_turn_that_is_whole_or_cut_is_the_response",
        ),
    ),
    # --- several turns
    Mutant(
        "the policy is trained on observations",
        "algorithms/rollouts.py",
        'mask = mask * ~rollout["observed"]',
        'mask = mask * rollout["observed"].new_ones(())',
        _unit("test_turns.py", "test_observations_are_not_in_the_mask"),
    ),
    Mutant(
        "an observation is as many steps as it has tokens",
        "core/advantages.py",
        "skipped = ~keep & (keep.cumsum(1) > 0)",
        "skipped = torch.zeros_like(keep)",
        _unit("test_turns.py", "test_advantages_leave_observations_out"),
    ),
    Mutant(
        "the token before the last of an observation is not read",
        "generation/engine.py",
        "fed.append((slot, start, stop))",
        "fed.append((slot, start, max(start + 1, stop - 1)))",
        _unit("test_turns.py", "test_conversations_are_those_of_a_naive_loop"),
    ),
    Mutant(
        "the random stream of a sample begins anew in each turn",
        "generation/batch.py",
        "len(each.ids) - each.foreign)",
        "len(each.ids) - each.start)",
        _unit("test_turns.py", "test_conversations_are_those_of_a_naive_loop"),
    ),
    Mutant(
        "the reward of a response stands at the token before its last",
        "generation/interface.py",
        "rewards[position - 1] = reward",
        "rewards[position - 2] = reward",
        _unit("test_turns.py", "test_conversations_are_those_of_a_naive_loop"),
    ),
    Mutant(
        "conversations share Python's random numbers",
        "servers/worker.py",
        "            random.setstate(stream)\n",
        "",
        _unit("test_environment.py", "test_a_conversation_keeps_its_state_and_its_random_stream"),
    ),
    Mutant(
        "behind padding between buckets a checkpoint has the optimizer state of other weights",
        "parallel/megatron_switches.py",
        "padding.append(bucket.offset - gathered)",
        "padding.append(0)",
        (f"{DISTRIBUTED}test_optimizer_state.py",),
    ),
    Mutant(
        "a shuffled validation set goes on where the last pass over it ended",
        "algorithms/supervised.py",
        "sampler.consumed_samples = 0",
        "sampler.consumed_samples += 0",
        _unit("test_supervised.py", "test_each_validation_is_of_the_same_samples"),
    ),
    Mutant(
        "a save is ranked by the validation of earlier weights",
        "algorithms/training_loop.py",
        'candidates if run_val else _prefixed("train_", train_metrics)',
        "candidates",
        _unit("test_supervised.py", "test_a_save_without_a_validation_has_no_metric_of_one"),
    ),
    Mutant(
        "after a change of the batch size the rest of a pass is left out",
        "algorithms/supervised.py",
        "used = self.used if self.batches_left else",
        "used = self.used // 4 * 4 if self.batches_left else",
        _unit("test_supervised.py", "test_another_batch_size_goes_on_in_samples"),
    ),
    Mutant(
        "a job with another base resumes",
        "checkpoint/made_from.py",
        'FIXED = ("base", ',
        "FIXED = (",
        _unit("test_made_from.py", "test_what_differs_is_shown_and_refused_or_not"),
    ),
    Mutant(
        "the token between two replies of tools is trained on",
        "data/nlp/nemo_chat.py",
        "number > context and source.trains(source.turns[number - 1])",
        "number > context",
        _unit("test_nemo_chat.py", "test_texts_and_masks_by_hand"),
    ),
    Mutant(
        "a token that ends two steps has the reward of one",
        "servers/reward_function.py",
        "np.add.at(row, where, values)",
        "row[where] = values",
        _unit("test_process_rewards.py", "test_rewards_of_two_steps_that_one_token_ends_add_up"),
    ),
    Mutant(
        "a web server that says no is asked again",
        "servers/web.py",
        "may_pass=error.code in try_again",
        "may_pass=True",
        _unit("test_reward_url.py", "test_what_is_no_score_is_one_error_or_the_fallback"),
    ),
    Mutant(
        "a judge is asked the same twice at once",
        "servers/judge.py",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        _unit("test_judge.py", "test_nothing_is_asked_twice_and_numbers_do_not_depend_on_order"),
    ),
    Mutant(
        "a judge's score outside its scale is a reward",
        "config/judge_rules.py",
        'self.options["least"] <= score <= self.options["most"]',
        'score < float("inf")',
        _unit("test_judge.py", "test_the_score_in_a_reply"),
    ),
    Mutant(
        "a judge is asked although its budget is spent",
        "servers/judge.py",
        "if requests > 0 and budget is not None and count >= budget:",
        "if requests > 0 and budget is not None and count >= 2 * budget:",
        _unit("test_judge.py", "test_a_budget_ends_the_job_and_not_a_reward"),
    ),
    Mutant(
        "half a reply of a web server is taken for all of it",
        "servers/web.py",
        "if not piece and length is not None:",
        "if False:",
        _unit("test_reward_url.py", "test_a_reply_that_is_slow_or_not_whole"),
    ),
    Mutant(
        "the query of an address is logged",
        "config/access.py",
        r'_QUERY_OF_URL.sub(r"\1***", ',
        "str(",
        _unit("test_reward_url.py", "test_configurations_are_shown_without_secrets"),
    ),
    Mutant(
        "a secret within a word of the command line is kept in the folder of the job",
        "config/access.py",
        "shown_config({key: value})[key]",
        "value",
        _unit("test_reward_url.py", "test_configurations_are_shown_without_secrets"),
    ),
    # --- rollouts: masks, rewards, advantages
    Mutant(
        "the first rollout is not compared with the reference",
        "algorithms/ppo.py",
        'return "recompute" if first else self.rollout_logprobs',
        "return self.rollout_logprobs",
        _unit(
            "test_ppo_trainer.py",
            "test_log_probs_of_the_sampler_save_a_pass_after_the_first_rollout",
        ),
    ),
    Mutant(
        "the mask of the response starts one column late",
        "core/masks.py",
        "start = prompt_lengths.to(values.device).reshape(-1, 1) - 1",
        "start = prompt_lengths.to(values.device).reshape(-1, 1)",
        _unit(
            "test_ppo_mathematics.py",
            "test_worked_vector",
            "test_mask_has_as_many_ones_as_response_tokens",
        ),
    ),
    Mutant(
        "the reward sits one column late",
        "core/advantages.py",
        "response_lengths.to(values.device).reshape(-1, 1) - 2)",
        "response_lengths.to(values.device).reshape(-1, 1) - 1).clamp(max=values.shape[1] - 1)",
        _unit(
            "test_ppo_mathematics.py",
            "test_worked_vector",
            "test_reward_sits_at_the_last_response_column",
        ),
    ),
    Mutant(
        "the KL penalty is a bonus",
        "core/advantages.py",
        "per_token - penalty_factor * init_policy_kl",
        "per_token + penalty_factor * init_policy_kl",
        _unit("test_ppo_mathematics.py", "test_worked_vector") + _KL_IN_REWARD,
    ),
    Mutant(
        "the KL is that of the reference to the policy",
        "core/kl.py",
        "k1 = log_probs_a - log_probs_b\n",
        "k1 = log_probs_b - log_probs_a\n",
        _unit("test_oracles.py", "test_same_as[KL estimators-trl]") + _KL_IN_REWARD,
    ),
    Mutant(
        "the KL in the reward is the absolute log-ratio by default",
        "config/jobs/actors.py",
        "use_absolute_kl: bool = key(False)\n    discount_factor",
        "use_absolute_kl: bool = key(True)\n    discount_factor",
        _unit("test_kl_optimum.py", "test_the_default_reaches_the_optimum[gae-one token]"),
    ),
    Mutant(
        "the KL in the reward is that of the reference to the policy",
        "algorithms/ppo_data.py",
        'response["logprobs"],\n            response["init_logprobs"],\n',
        'response["init_logprobs"],\n            response["logprobs"],\n',
        _KL_IN_REWARD,
    ),
    Mutant(
        "the KL penalty counts twice",
        "algorithms/ppo_data.py",
        "penalty_factor=kl_penalty,",
        "penalty_factor=2 * kl_penalty,",
        _KL_IN_REWARD,
    ),
    Mutant(
        "the KL penalty of a response is a mean over its tokens, not their sum",
        "core/advantages.py",
        "per_token - penalty_factor * init_policy_kl",
        "per_token - penalty_factor * init_policy_kl / init_policy_kl.shape[-1]",
        _KL_IN_REWARD,
    ),
    Mutant(
        "responses are compared by their rewards without the KL",
        "algorithms/ppo_data.py",
        "scores = masked_sum(token_rewards, mask, dim=1)",
        'scores = rollout_batch["rewards"].to(token_rewards)',
        _unit(
            "test_kl_optimum.py",
            "test_expected_update_is_the_gradient_of_the_objective",
            "test_the_default_reaches_the_optimum[rloo-one token]",
        ),
    ),
    Mutant(
        "process supervision sums the rewards of earlier steps",
        "core/advantages.py",
        "to_come = normalized.flip(1).cumsum(1).flip(1)",
        "to_come = normalized.cumsum(1)",
        _unit("test_process_rewards.py", "test_process_supervision_by_hand"),
    ),
    Mutant(
        "tokens without a reward count as steps with reward 0",
        "algorithms/ppo_data.py",
        'return (mask != 0) & ~rollout_batch["token_rewards"].isnan()',
        "return mask != 0",
        _unit("test_process_rewards.py", "test_process_supervision_by_hand"),
    ),
    Mutant(
        "a token's reward stands at the transition after it",
        "servers/scoring_clients.py",
        "rewards = _on_device(token_rewards)[:, 1:width]",
        "rewards = _on_device(token_rewards)[:, : width - 1]",
        _unit(
            "test_process_rewards.py",
            "test_an_ensemble_adds_rewards_of_tokens_and_of_responses",
        ),
    ),
    Mutant(
        "a token does not answer for the KL of later ones (REINFORCE++)",
        "core/advantages.py",
        "torch.zeros_like(rewards), rewards, discount_factor, 1.0, mask",
        "torch.zeros_like(rewards), rewards, discount_factor, 0.0, mask",
        _KL_IN_REWARD,
    ),
    Mutant(
        "lambda is .93 for .90",
        "core/advantages.py",
        "delta + discount_factor * gae_lambda * next_advantage",
        "delta + discount_factor * (gae_lambda + 0.03) * next_advantage",
        _unit("test_oracles.py", "test_same_as[GAE-trl]", "test_same_as[GAE-torchrl]"),
    ),
    Mutant(
        "values after the response are bootstrapped: no mask before the recursion",
        "core/advantages.py",
        "values, rewards = torch.where(keep, values, 0), torch.where(keep, rewards, 0)\n"
        "        skipped = ~keep & (keep.cumsum(1) > 0)",
        "values, rewards = values.nan_to_num(), rewards.nan_to_num()\n"
        "        skipped = torch.zeros_like(keep)",
        _unit("test_advantages.py", "test_decoupled_gae_against_naive_sums"),
    ),
    Mutant(
        "a sample is its own baseline (RLOO)",
        "core/advantages.py",
        "dtype=reward.dtype).index_add_(0, group, gained)[group] - gained",
        "dtype=reward.dtype).index_add_(0, group, gained)[group]",
        _unit("test_oracles.py", "test_same_as[RLOO-verl]", "test_same_as[RLOO-openrlhf]"),
    ),
    Mutant(
        "the deviation of a group is not Bessel-corrected (GRPO)",
        "core/advantages.py",
        "/ (count - 1).clamp(min=1)).sqrt()",
        "/ count.clamp(min=1)).sqrt()",
        _unit("test_oracles.py", "test_same_as[GRPO-verl]", "test_same_as[GRPO-torchrl]"),
    ),
    Mutant(
        "advantages are whitened with the statistics of one rank",
        "parallel/collectives.py",
        "return all_reduce(sums.to(get_device()), group).to(sums.device)",
        "return sums",
        (DISTRIBUTED + "test_collectives.py::test_on_two_ranks",),
    ),
    # --- losses
    Mutant(
        "a loss that is one part in ten thousand too large",
        "core/losses.py",
        "    loss = -(weights * kept(logprobs, weights)).sum()\n",
        "    loss = -1.0001 * (weights * kept(logprobs, weights)).sum()\n",
        ("tests/golden/test_golden.py::test_a_job_gives_the_stored_numbers[sft-one]",),
    ),
    Mutant(
        "mean of means: the mean of the samples' means for the mean over tokens",
        "core/losses.py",
        "denominator = sum_over_dp(rows.sum(dtype=torch.float64))",
        "denominator = sum_over_dp(rows.any(1).sum(dtype=torch.float64)) * _count(rows, 1)",
        _unit("test_losses.py", "test_weights_by_hand"),
    ),
    Mutant(
        "tokens are counted on one rank alone",
        "core/losses.py",
        "denominator = sum_over_dp(rows.sum(dtype=torch.float64))",
        "denominator = rows.sum(dtype=torch.float64)",
        _two_ranks("DP2"),
    ),
    Mutant(
        "slots that do not count are multiplied by 0, which NaN survives",
        "core/losses.py",
        "return torch.where(weights != 0, values.float(), 0.0)",
        "return values.float() * (weights != 0)",
        _unit("test_masked_slots.py", "test_garbage_where_nothing_counts_changes_nothing"),
    ),
    Mutant(
        "the ratio is clipped on one side",
        "core/surrogates.py",
        "clipped = -tokens.advantages * ratios.clamp(1.0 - tokens.low, 1.0 + tokens.high)",
        "clipped = -tokens.advantages * ratios.clamp(max=1.0 + tokens.high)",
        _unit("test_oracle_losses.py", "test_same_as[clipped loss-openrlhf]"),
    ),
    Mutant(
        "the ratio of a response has the gradient of its mean too",
        "core/surrogates.py",
        "whole = _mean(tokens.log_ratio.detach(), tokens.mask)",
        "whole = _mean(tokens.log_ratio, tokens.mask)",
        _unit("test_surrogates.py", "test_loss_and_gradient_are_those_of_the_paper[gspo]"),
    ),
    Mutant(
        "weights of CISPO carry a gradient",
        "core/surrogates.py",
        "weights = tokens.rho.detach()",
        "weights = tokens.rho",
        _unit("test_surrogates.py", "test_loss_and_gradient_are_those_of_the_paper[cispo]"),
    ),
    Mutant(
        "SAPO fades alike for good and bad tokens",
        "core/surrogates.py",
        "SAPO_RISING, SAPO_FALLING = 1.0, 1.05",
        "SAPO_RISING, SAPO_FALLING = 1.0, 1.0",
        _unit("test_surrogates.py", "test_loss_and_gradient_are_those_of_the_paper[sapo]"),
    ),
    Mutant(
        "GMPO clips bad tokens on the side of good ones",
        "core/surrogates.py",
        "log_ratio.clamp(min=-tokens.low)",
        "log_ratio.clamp(max=tokens.high)",
        _unit("test_surrogates.py", "test_loss_and_gradient_are_those_of_the_paper[gmpo]"),
    ),
    Mutant(
        "the upper side of the clip range is the lower one",
        "core/losses.py",
        "high = ratio_eps if ratio_eps_high is None else ratio_eps_high",
        "high = ratio_eps",
        _unit("test_surrogates.py", "test_loss_and_gradient_are_those_of_the_paper[clip]"),
    ),
    Mutant(
        "the mean by a constant knows the length",
        "core/losses.py",
        "denominator = sum_over_dp(samples) * longest",
        "denominator = sum_over_dp(samples) * _count(rows, 1)",
        _unit("test_surrogates.py", "test_the_mean_by_a_constant_does_not_know_the_length"),
    ),
    Mutant(
        "Dr. GRPO divides by the deviation",
        "core/advantages.py",
        "partial(calculate_grpo_advantages, normalize_std=False)",
        "calculate_grpo_advantages",
        _unit("test_advantages.py", "test_estimators_by_their_names_leave_the_deviation_out"),
    ),
    Mutant(
        "dynamic sampling trains on a prompt twice",
        "algorithms/dynamic_sampling.py",
        "order[np.isin(order, fresh)]",
        "order",
        _unit(
            "test_dynamic_sampling.py", "test_a_prompt_that_comes_back_within_a_step_counts_once"
        ),
    ),
    Mutant(
        "dynamic sampling keeps what it wanted to replace",
        "algorithms/dynamic_sampling.py",
        "~np.array(self.differ)",
        "np.array(self.differ)",
        _unit("test_dynamic_sampling.py", "test_choice_is_that_of_a_loop_over_the_rounds"),
    ),
    Mutant(
        "weights of single tokens count for those of responses",
        "core/sampler_correction.py",
        'if level != "token":',
        'if level == "geometric":',
        _unit("test_ppo_corrections.py", "test_factors_and_metrics_are_those_of_a_loop"),
    ),
    Mutant(
        "rounding between sampler and trainer is corrected",
        "core/sampler_correction.py",
        "ROUNDING = 1e-4",
        "ROUNDING = 0.0",
        _unit("test_ppo_corrections.py", "test_a_sampler_that_is_the_trainer_changes_no_bit"),
    ),
    Mutant(
        "KL-Cov takes the tokens that vary least",
        "core/covariance.py",
        "argsort(descending=True, stable=True)",
        "argsort(stable=True)",
        _unit("test_ppo_corrections.py", "test_covariant_tokens_are_those_of_a_loop"),
    ),
    Mutant(
        "Clip-Cov draws by the places on the rank",
        "algorithms/ppo_corrections.py",
        'gathered.select(gathered.pop("sample_order").argsort())',
        'gathered.select(gathered.pop("sample_order") * 0 + torch.arange(len(gathered["mask"])))',
        _unit("test_ppo_corrections.py", "test_chosen_tokens_lose_their_gradient_or_get_a_kl"),
    ),
    Mutant(
        "GDPO sums the rewards before it compares them",
        "core/advantages.py",
        "for part in parts.T]",
        "for part in parts.sum(1, keepdim=True).T.expand(parts.shape[1], -1)]",
        _unit("test_advantages.py", "test_gdpo_against_the_statistics_module"),
    ),
    Mutant(
        "running moments forget how far two means are apart",
        "core/advantages.py",
        "self.squares += shift**2 * self.count * len(added) / total",
        "self.squares += 0.0",
        _unit("test_advantages.py", "test_running_moments_are_those_of_all_rewards"),
    ),
    Mutant(
        "the dual clip bounds good tokens too",
        "core/losses.py",
        "bounded = (advantages < 0) & (surrogate > bound)",
        "bounded = surrogate > bound",
        _unit("test_oracle_losses.py", "test_same_as[dual clip-openrlhf]"),
    ),
    Mutant(
        "the entropy is punished",
        "core/losses.py",
        "loss = loss - scaled_entropy",
        "loss = loss + scaled_entropy",
        _unit(
            "test_ppo_variants.py",
            "test_loss_and_gradient_of_any_split_are_those_of_the_loop[actor-microbatch]",
        ),
    ),
    Mutant(
        "the better of two value errors is taken",
        "core/losses.py",
        "error = torch.maximum(clipped_error, error)",
        "error = torch.minimum(clipped_error, error)",
        _unit("test_oracle_losses.py", "test_same_as[value loss-openrlhf]"),
    ),
    Mutant(
        "the KL in the loss is a bonus",
        "core/losses.py",
        "loss = loss + kl_loss_coef * (weights * kl).sum()",
        "loss = loss - kl_loss_coef * (weights * kl).sum()",
        _KL_IN_LOSS,
    ),
    Mutant(
        "the KL in the loss has a value and no gradient",
        "core/losses.py",
        "loss = loss + kl_loss_coef * (weights * kl).sum()",
        "loss = loss + kl_loss_coef * (weights * kl.detach()).sum()",
        _KL_IN_LOSS,
    ),
    Mutant(
        "k2 is twice as large",
        "core/kl.py",
        "return 0.5 * k1.square()",
        "return k1.square()",
        _KL_IN_LOSS,
    ),
    Mutant(
        "k3 is that of the KL to the policy",
        "core/kl.py",
        "return torch.expm1((-k1).clamp(max=_MAX_K3_EXPONENT)) + k1",
        "return torch.expm1(k1.clamp(max=_MAX_K3_EXPONENT)) - k1",
        _KL_IN_LOSS,
    ),
    # --- log-probs
    Mutant(
        "log-probs without the temperature that sampled",
        "models/nlp/gpt/log_probs.py",
        '"temperature": self.temperature,',
        '"temperature": 1.0,',
        _unit("test_ppo_actor.py", "test_logprobs_at_the_sampling_temperature"),
    ),
    Mutant(
        "padding of the vocabulary gets probability",
        "parallel/vocab_parallel.py",
        "self.width = width if vocab_size is None else min(max(vocab_size - self.first, 0), "
        "width)",
        "self.width = width",
        _unit("test_vocab_parallel.py", "test_logprobs_and_gradient_against_dense_softmax"),
    ),
    Mutant(
        "a slice of the vocabulary sums up by itself",
        "parallel/vocab_parallel.py",
        "total, *others = shard.all_reduce(torch.stack(sums) * shift.exp(), dist.ReduceOp.SUM)",
        "total, *others = torch.stack(sums) * shift.exp()",
        _two_ranks("TP2-SP"),
    ),
    # --- several ranks
    Mutant(
        "the gradient is averaged over data-parallel ranks: the loss is not scaled by their "
        "number",
        "training/megatron_steps.py",
        "scale = len(plan) * parallel_state.get_data_parallel_world_size()",
        "scale = len(plan)",
        _two_ranks("DP2"),
    ),
    Mutant(
        "gradients of norms are not summed over the parts of a sequence (sequence parallelism)",
        "models/nlp/gpt/megatron_layers.py",
        'setattr(parameter, "sequence_parallel", config.sequence_parallel)',
        'setattr(parameter, "sequence_parallel", False)',
        _two_ranks("TP2-SP"),
    ),
    Mutant(
        "gathered shares of a sequence are in the wrong order (context parallelism)",
        "parallel/context_parallel.py",
        "return torch.cat([*early, *reversed(late)], dim)",
        "return torch.cat([*early, *late], dim)",
        _two_ranks("CP2"),
    ),
    Mutant(
        "gradients of keys and values stay on the rank of the query (context parallelism)",
        "parallel/context_parallel.py",
        "            if ctx.sum_gradients\n",
        "            if False\n",
        _two_ranks("CP2"),
    ),
    Mutant(
        "what is sampled depends on the rank",
        "algorithms/rollouts.py",
        'first = sample_seeds(seed, step, prompts["idx"])',
        "rank = parallel_state.get_data_parallel_rank()\n        "
        'first = sample_seeds(seed + rank, step, prompts["idx"])',
        (DISTRIBUTED + "test_ppo_trainer.py::test_two_ranks_equal_one",),
    ),
    # --- a job that goes on
    Mutant(
        "the state of the optimizer is not restored",
        "checkpoint/optimizer_forms.py",
        "optimizer.load_state_dict(",
        "(lambda state: None)(",
        _unit("test_megatron_gpt_model.py", "test_resumed_job_continues_to_the_same_bits"),
    ),
    Mutant(
        "the adaptive KL coefficient is not bounded",
        "core/kl.py",
        "error = min(max(kl / self.target - 1.0, -_MAX_RELATIVE_ERROR), _MAX_RELATIVE_ERROR)",
        "error = kl / self.target - 1.0",
        _unit("test_kl.py", "test_adaptive_controller_by_hand"),
    ),
    # --- before the work
    Mutant(
        "pairs of two prompts are told after the imports",
        "launch/inputs.py",
        "if before is not None and not has_label:",
        "if before is None and not has_label:",
        _unit("test_inputs.py", "test_it_is_one_message_before_torch_is_imported"),
    ),
    Mutant(
        "wrong paths and records are told after the imports",
        "launch/job_entry.py",
        "before_notes=lambda: check_inputs(cfg, config_name)",
        "before_notes=lambda: None",
        _unit("test_inputs.py", "test_it_is_one_message_before_torch_is_imported"),
    ),
    Mutant(
        "rollouts are validated on data that are not there",
        "algorithms/rollout_trainer.py",
        "return float(self.has_validation)",
        "return 1.0",
        _unit("test_rs_trainer.py", "test_without_validation_data_nothing_is_validated"),
    ),
    # --- machines with GPUs
    Mutant(
        "a job on the CPU takes the GPUs all the same",
        "launch/command_line.py",
        'if OmegaConf.select(cfg, "trainer.accelerator") == "cpu":',
        "if False:",
        _unit("test_gpus.py", "test_a_script_hides_them_before_anything_else"),
    ),
    Mutant(
        "decoding takes a weight of a norm that counts from 1 as it is",
        "generation/decoding_model.py",
        "weight, bias = weight.float() + 1,",
        "weight, bias = weight.float(),",
        _unit("test_decoding_model.py", "test_a_layer_with_a_norm"),
    ),
    # --- files from elsewhere
    Mutant(
        "a checkpoint is used without a look at its checksums",
        "checkpoint/checksums.py",
        "if found(name) != checksums[name]]",
        "if found(name) is None]",
        _unit(
            "test_checksums.py",
            "test_a_flipped_bit_in_any_file_of_a_nemo_folder_is_found",
            "test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_taken",
        ),
    ),
    Mutant(
        "the mark of a checkpoint outlives its files",
        "checkpoint/folders.py",
        "    (folder / MARKER).unlink(missing_ok=True)\n    sync_folder(folder)\n",
        "    sync_folder(folder)\n",
        _unit("test_checksums.py", "test_the_mark_goes_first"),
    ),
    Mutant(
        "a former checkpoint goes before the new one is marked",
        "checkpoint/checkpointing.py",
        "folder.rename(former)  #",
        "folders.remove_checkpoint(folder)  #",
        _unit("test_checksums.py", "test_death_at_any_point_of_a_save_leaves_a_whole_checkpoint"),
    ),
    Mutant(
        "a pair resumes from the newest checkpoint of each",
        "checkpoint/folders.py",
        "{0, *actor_steps} & set(critic_steps)",
        "{0, *actor_steps}",
        _unit("test_resume_pair.py", "test_a_pair_resumes_from_the_newest_step_of_both"),
    ),
    Mutant(
        "checkpoints of an abandoned line push good ones out",
        "checkpoint/checkpointing.py",
        "                        folders.abandon_after(self.root, self.save_number)\n",
        "                        folders.complete_checkpoints(self.root)\n",
        _unit("test_pair.py", "test_death_again_and_again_with_another_interval"),
    ),
    Mutant(
        "a checkpoint is begun without a look at the free space",
        "checkpoint/dist_ckpt.py",
        "            checksums.check_space(folder, needed)\n",
        "            folder.stat()\n",
        _unit(
            "test_checksums.py",
            "test_a_checkpoint_that_does_not_fit_is_refused",
        ),
    ),
    Mutant(
        "a checkpoint in the background is of the weights that come later",
        "checkpoint/dist_ckpt.py",
        'data.detach().to("cpu", copy=True)',
        'data.detach().to("cpu")',
        _unit("test_background_saves.py", "test_a_save_holds_the_state_of_its_moment"),
    ),
    Mutant(
        "an error of the disk in the background is not noticed",
        "checkpoint/dist_ckpt.py",
        "            if self._error is not None:\n",
        "            if self._error is None:\n",
        _unit("test_full_disk.py", "test_a_full_disk_is_named_and_spoils_nothing"),
    ),
    Mutant(
        "a save begins while another one is still being written",
        "checkpoint/checkpointing.py",
        "        self.finish_save()\n        metrics = ",
        "        metrics = ",
        _unit(
            "test_background_saves.py", "test_one_save_at_a_time_and_the_last_one_is_waited_for"
        ),
    ),
    Mutant(
        "nobody waits for the critic's save beside one in the background",
        "algorithms/ppo.py",
        "            critic_save.result()\n",
        "            pass\n",
        _unit(
            "test_ppo_trainer.py",
            "test_saves_in_the_background_are_waited_for_by_the_next_one",
        ),
    ),
    Mutant(
        "a large scoring request is scored in one go",
        "servers/requests.py",
        "    if own.shape[1] <= size:\n",
        "    if own.shape[1] > 0:\n",
        _unit("test_slices.py", "test_slices_have_the_micro_batches_of_the_whole"),
    ),
    Mutant(
        "slices have other micro-batches than the request",
        "servers/requests.py",
        "np.argsort(-own,",
        "np.argsort(own,",
        _unit("test_slices.py", "test_slices_have_the_micro_batches_of_the_whole"),
    ),
    Mutant(
        "the critic learns between two slices of a request",
        "servers/scoring.py",
        "lambda: not self._scoring)",
        "lambda: self._scoring >= 0)",
        _unit(
            "test_slices.py",
            "test_a_change_waits_for_what_is_scored_and_scoring_for_the_change",
        ),
    ),
    Mutant(
        "small scoring requests stand behind large ones",
        "servers/admission.py",
        "    return rows_of(head) > SMALL_ROWS or length > SMALL_BYTES\n",
        "    return length > SMALL_BYTES\n",
        _unit("test_slices.py", "test_large_requests"),
    ),
    Mutant(
        "the end of a turn does not end what a conversation is answered with",
        "generate/batch.py",
        "        policy = policy.with_end_strings(used.end_strings)\n",
        "        pass\n",
        _unit("test_generate.py", "test_prompts_are_read_as_ppo_reads_them"),
    ),
    Mutant(
        "the overview of a job names what its base was trained on",
        "launch/experiment.py",
        "        own = [key for key in keys if config_name is None or key in LIVE[config_name]]\n",
        "        own = list(keys)\n",
        _unit(
            "test_launch_experiment.py", "test_the_overview_names_the_job_and_no_key_of_its_base"
        ),
    ),
    Mutant(
        "only the metrics of the last run are kept",
        "launch/experiment.py",
        '    return sorted(runs, key=lambda run: int(run.name.removeprefix("run_")))\n',
        '    return sorted(runs, key=lambda run: int(run.name.removeprefix("run_")))[-1:]\n',
        _unit("test_launch_experiment.py", "test_metrics_are_whole_after_any_number_of_resumes"),
    ),
    Mutant(
        "the table of contents of a checkpoint may name anything",
        "checkpoint/data_only.py",
        "        if (module, name) not in _NAMES:\n",
        "        if (module, name) not in _NAMES:\n"
        "            return super().find_class(module, name)\n"
        "        if False:\n",
        _unit("test_hostile_files.py", "test_a_table_of_contents_runs_nothing"),
    ),
    Mutant(
        "a table of contents may ask for any attribute",
        "checkpoint/data_only.py",
        '("builtins", "getattr"): _member,',
        '("builtins", "getattr"): getattr,',
        _unit("test_hostile_files.py", "test_a_plan_runs_nothing"),
    ),
    Mutant(
        "weights that are not numbers are loaded",
        "checkpoint/stored_weights.py",
        "if not bool((ends.abs() <= LARGEST_WEIGHT).all()):",
        "if bool((ends.abs() > LARGEST_WEIGHT).all()):",
        _unit("test_nemo_forms.py", "test_numbers_of_any_type_are_checked"),
    ),
    Mutant(
        "the first rank with a damaged part of a weight fails alone",
        "checkpoint/dist_ckpt.py",
        "    except UserError as error:\n        failure = error\n    except OSError",
        "    except SaveError as error:\n        failure = error\n    except OSError",
        (
            f"{DISTRIBUTED}test_nemo_forms.py::"
            "test_a_weight_beyond_reason_of_one_rank_is_the_same_error_on_all",
        ),
    ),
    Mutant(
        "objects of a checkpoint are unpickled",
        "checkpoint/data_only.py",
        'torch.load(value, map_location="cpu", weights_only=True)',
        'torch.load(value, map_location="cpu", weights_only=False)',
        _unit("test_hostile_files.py", "test_an_object_among_the_tensors_runs_nothing"),
    ),
    # --- Hugging Face
    Mutant(
        "gate and partner are exchanged",
        "checkpoint/hugging_face/architecture.py",
        "[Run(name, 0, share) for name in self.names]",
        "[Run(name, 0, share) for name in reversed(self.names)]",
        _unit("test_hugging_face_folders.py", "test_a_folder_loads_directly[Llama 2]"),
    ),
    Mutant(
        "keys and values of one matrix are exchanged",
        "checkpoint/hugging_face/architecture.py",
        "starts = [0, heads.groups * query, heads.groups * (query + key)]",
        "starts = [0, heads.groups * (query + key), heads.groups * query]",
        _unit("test_hugging_face_folders.py", "test_a_folder_loads_directly[Phi 3]"),
    ),
    Mutant(
        "a window counts one position more",
        "checkpoint/hugging_face/parts.py",
        '"window_size": [int(window) - 1, 0]',
        '"window_size": [int(window), 0]',
        _unit("test_hugging_face_folders.py", "test_a_folder_loads_directly[Mistral]"),
    ),
    Mutant(
        "Llama 3.1 keeps its rotary frequencies",
        "checkpoint/hugging_face/parts.py",
        '{"scale_positional_embedding": True, "scale_factor"',
        '{"scale_positional_embedding": False, "scale_factor"',
        _unit("test_hugging_face_folders.py", "test_a_folder_loads_directly[Llama 3.1]"),
    ),
    Mutant(
        "the padding of the vocabulary is written",
        "checkpoint/hugging_face/writing.py",
        "rest = (vocab_rows, *rest[1:])",
        "rest = (rest[0], *rest[1:])",
        _unit("test_convert.py", "test_a_model_of_this_package_goes_to_hugging_face"),
    ),
    # --- evaluation
    Mutant(
        "length counts in the length-controlled win rate",
        "core/win_rate.py",
        "return torch.sigmoid(theta)\n",
        "return torch.sigmoid(theta + phi * effect.mean(1))\n",
        _unit(
            "test_win_rate.py",
            "test_length_control_finds_what_brute_force_finds",
            "test_length_control_undoes_a_bias_to_length",
        ),
    ),
    # --- LoRA
    Mutant(
        "the scale of the adapters is forgotten",
        "core/lora.py",
        "return scale * (wide_b.to(dtype) @ a.to(dtype))",
        "return wide_b.to(dtype) @ a.to(dtype)",
        _unit("test_lora.py", "test_merged_weights_give_the_same_and_come_back_bit_for_bit"),
    ),
    Mutant(
        "the scale of the adapters is forgotten in the forward pass",
        "models/nlp/gpt/lora_layers.py",
        "b.t(), alpha=self.scale)",
        "b.t())",
        _unit(
            "test_lora.py",
            "test_outputs_and_gradients_are_those_of_the_sum_of_the_weights[llama-canonical]",
        ),
    ),
    Mutant(
        "keys and values change places in an adapter with an A for each",
        "core/lora.py",
        "* queries_per_group + [1, 2])",
        "* queries_per_group + [2, 1])",
        _unit(
            "test_lora.py",
            "test_outputs_and_gradients_are_those_of_the_sum_of_the_weights[llama-canonical]",
        ),
    ),
    Mutant(
        "the reference policy has the adapters on",
        "models/nlp/gpt/log_probs.py",
        "            return self.adapters_disabled()\n",
        "            return self.adapters_merged()\n",
        _unit(
            "test_lora.py", "test_fresh_adapters_change_no_bit_and_the_reference_stays_the_base"
        ),
    ),
    Mutant(
        "every rank of a split layer starts with the same rows of B",
        "models/nlp/gpt/lora_layers.py",
        "torch.cat([part.chunk(self.tp)[rank] for part in parts])",
        "torch.cat([part.chunk(self.tp)[0] for part in parts])",
        _two_ranks("TP2-LoRA"),
    ),
    Mutant(
        "the gradient of an adapter's shared half is not summed over TP ranks",
        "models/nlp/gpt/lora_layers.py",
        "            return copy_to_tensor_model_parallel_region(hidden)\n",
        "            return hidden\n",
        _two_ranks("TP2-LoRA"),
    ),
    Mutant(
        "the gradient of an adapter's shared half is not summed over positions",
        "models/nlp/gpt/lora_layers.py",
        "            whole.sequence_parallel = True",
        "            whole.sequence_parallel = False",
        _two_ranks("TP2-SP-LoRA"),
    ),
    Mutant(
        "the scale of adapters of PEFT is forgotten",
        "checkpoint/hugging_face/peft.py",
        "            alpha=self._alpha,",
        "            alpha=self._rank,",
        _unit("test_peft_folders.py", "test_steps_of_sft_equal_those_of_peft[Llama-modules0]"),
    ),
    Mutant(
        "the A of projections change places in adapters of PEFT",
        "checkpoint/hugging_face/peft.py",
        "layer, index))\n            if adapter is not None:\n                wanted",
        "layer, 1 - index))\n            if adapter is not None:\n                wanted",
        _unit("test_peft_folders.py", "test_adapters_of_peft_give_the_same_logits[Qwen 2]"),
    ),
    Mutant(
        "rows of B are written for PEFT in the order of query groups",
        "checkpoint/hugging_face/architecture.py",
        "[theirs] = values[own]",
        "[theirs] = values[theirs]",
        _unit(
            "test_peft_folders.py",
            "test_trained_adapters_give_the_same_logits_in_peft[Llama, odd sizes-canonical-all]",
        ),
    ),
    # --- ends of jobs
    Mutant(
        "a job that is asked to end does not save",
        "training/schedule.py",
        "save_due or (save_enabled and must_save)",
        "save_due",
        _unit("test_schedule.py", "test_check_progress"),
    ),
    Mutant(
        "prompts without a number of their own have the same on all ranks",
        "algorithms/rollouts.py",
        "            places = torch.arange(size) + first + rank * size\n",
        "            places = torch.arange(size) + first\n",
        (f"{DISTRIBUTED}test_minimal_parts.py::{PARTS_SUFFICE}",),
    ),
    Mutant(
        "a failed save of a user's callback stays with its rank",
        "algorithms/parts.py",
        "        wait_for_all(failed)\n",
        "        wait_for_all([])\n",
        (f"{DISTRIBUTED}test_minimal_parts.py::test_errors_of_one_rank_reach_all",),
    ),
    Mutant(
        "a rank that hangs is not noticed while another one waits for it",
        "launch/watchdog.py",
        "            if has_moved or total != of_all:",
        "            if True:",
        _unit("test_watchdog.py", "test_the_rank_that_hangs_is_named_by_the_one_that_waits"),
    ),
    Mutant(
        "a store over a link that is cut holds the watchdog",
        "servers/control_group.py",
        "                return reply.result(self._reply_s)\n",
        "                return reply.result()\n",
        _unit("test_watchdog.py", "test_a_rank_ends_when_the_machine_of_rank_0_is_lost"),
    ),
    Mutant(
        "a note is gone while another rank reads it",
        "servers/control_group.py",
        '        self.put(key, "")\n',
        "        self._ask(lambda store: store.delete_key(key))\n",
        _unit(
            "test_server_loop.py", "test_a_note_that_is_withdrawn_while_it_is_read_holds_no_rank"
        ),
    ),
    Mutant(
        "a rank that waits for a slow one counts as hung",
        "launch/watchdog.py",
        "            if has_moved or total != of_all:",
        "            if has_moved:",
        _unit("test_watchdog.py", "test_a_rank_may_wait_for_a_slow_one"),
    ),
    Mutant(
        "a process that is stopped for good is left",
        "launch/watchdog_process.py",
        "        silent_s, last = silent_s + min(now - last, 2 * LOOK_S), now",
        "        silent_s, last = 0.0, now",
        _unit("test_watchdog.py", "test_a_process_that_is_stopped_for_good_is_killed"),
    ),
    Mutant(
        "what living processes have is removed as left by killed ones",
        "core/leftovers.py",
        "        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "",
        _unit(
            "test_leftovers.py",
            "test_the_next_process_removes_what_a_killed_one_left_and_nothing_else",
        ),
    ),
    Mutant(
        "a forked process removes what its parent has",
        "core/leftovers.py",
        "    if os.getpid() != owner:\n        return\n",
        "",
        _unit("test_leftovers.py", "test_a_forked_process_keeps_what_its_parent_has"),
    ),
    Mutant(
        "a plan counts the responses of a pair together by tokens too",
        "plan/jobs.py",
        "    unit = 1 if by_tokens else job.unit",
        "    unit = job.unit",
        _unit("test_plan.py", "test_passes_of_dpo_count_pairs_by_number_and_responses_by_tokens"),
    ),
    Mutant(
        "a record of leftovers may name anything",
        "core/leftovers.py",
        "        if not path.is_absolute() or not _OURS.fullmatch(path.name):",
        "        if not path.is_absolute():",
        _unit(
            "test_leftovers.py", "test_records_that_were_tampered_with_remove_nothing_of_others"
        ),
    ),
    Mutant(
        "an error in one line names the first place of its traceback",
        "core/errors.py",
        '    return " ".join([one_line(lines[0]), *places[-1:]])',
        '    return " ".join([one_line(lines[0]), *places[:1]])',
        _unit("test_errors.py", "test_the_cause_and_its_place"),
    ),
    Mutant(
        "the place of an error is in a library",
        "core/errors.py",
        "    own = [frame for frame in frames if _is_own(frame.filename)] or frames",
        "    own = frames",
        _unit("test_errors.py", "test_the_place_is_not_in_a_library"),
    ),
    Mutant(
        "a job at its time limit ends like one that has finished",
        "training/stop_requests.py",
        "return JobStopped(ExitCode.TIME,",
        "return JobStopped(ExitCode.FINISHED,",
        _unit("test_stop_requests.py", "test_the_time_limit_has_a_code_of_its_own"),
    ),
    Mutant(
        "a second Ctrl-C waits for the end of the step",
        "training/stop_requests.py",
        "and number != signal.SIGUSR1:",
        "and number == signal.SIGTERM:",
        _unit(
            "test_stop_requests.py",
            "test_before_the_first_step_and_asked_twice_a_job_ends_at_once[loop-2-Ctrl-C-76]",
        ),
    ),
    Mutant(
        "a job takes the Ctrl-C that a shell keeps from its background",
        "core/signals.py",
        "if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN",
        "if True",
        _unit(
            "test_stop_requests.py",
            "test_a_ctrl_c_that_a_shell_keeps_from_its_background_jobs_asks_nothing",
        ),
    ),
    Mutant(
        "a signal to a child that has just been forked is one to the job",
        "core/signals.py",
        "_forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _caught)",
        "pass",
        _unit("test_stop_requests.py", "test_children_do_not_take_the_signals_of_the_job"),
    ),
    Mutant(
        "frozen layers count as if their weights had gradients",
        "training/token_counts.py",
        "(2 if frozen else 3)",
        "3",
        _unit("test_model_flops.py", "test_frozen_layers_have_no_gradient_of_weights"),
    ),
    Mutant(
        "what a reward function has started outlives its worker",
        "servers/worker_keeper.py",
        "prctl(PR_SET_CHILD_SUBREAPER, 1)",
        "prctl(PR_SET_CHILD_SUBREAPER, 0)",
        _unit(
            "test_reward_function.py",
            "test_processes_in_sessions_of_their_own_end_with_the_worker[stay]",
        ),
    ),
    # --- servers
    Mutant(
        "a server lets every path through",
        "servers/admission.py",
        "if name not in self.endpoints and not general:",
        "if False:",
        _unit("test_front.py", "test_what_must_not_enter_is_refused"),
    ),
    Mutant(
        "agents may change what was said",
        "servers/agents.py",
        "if one != other:",
        "if False:",
        _unit("test_agents.py", "test_a_history_that_differs_is_refused"),
    ),
    Mutant(
        "a session of a silent agent is lost",
        "servers/agents.py",
        "if session.tries < TRIES:",
        "if False:",
        _unit("test_agents.py", "test_the_session_of_a_silent_agent_is_played_again_by_another"),
    ),
    Mutant(
        "a session that could not go on counts as ended by itself",
        "servers/agents.py",
        "Reply(session.unread, reward, not session.unread)",
        "Reply((), reward, True)",
        _unit("test_agents.py", "test_agents_get_the_samples_that_a_class_gets"),
    ),
    Mutant(
        "the token that ended a response is read twice",
        "data/nlp/chat_template.py",
        "return ids[1:] if ids[:1] == list(response[-1:]) else ids",
        "return ids",
        _unit("test_agents.py", "test_the_tokens_after_a_response_are_those_of_the_template"),
    ),
    Mutant(
        "a server lets requests without the token through",
        "servers/admission.py",
        "if wanted and not hmac.compare_digest(given.encode(), wanted.encode()):",
        "if False:",
        _unit("test_front.py", "test_requests_bring_the_token"),
    ),
    Mutant(
        "a server listens on all interfaces without a token",
        "config/access.py",
        "if token is None and not is_loopback(host):",
        "if False:",
        _unit("test_access.py", "test_other_addresses_need_a_token"),
    ),
    Mutant(
        "strangers may take the lease of an actor that works",
        "servers/admission.py",
        "if self._holder not in (None, lease) and (self._working or silent < LEASE_S):",
        "if False:",
        _unit("test_front.py", "test_only_the_holder_of_the_lease_changes_the_server"),
    ),
    Mutant(
        "a server takes bodies of any size",
        "servers/admission.py",
        "if length > largest:",
        "if False:",
        _unit("test_front.py", "test_what_must_not_enter_is_refused"),
    ),
    Mutant(
        "bytes that belong to no tensor are ignored",
        "servers/kserve.py",
        "if at != len(data):",
        "if False:",
        _unit("test_kserve.py", "test_what_is_no_request_is_refused"),
    ),
    Mutant(
        "a client takes any certificate",
        "servers/exchange.py",
        "timeout=timeout_s, context=self.tls",
        "timeout=timeout_s, context=ssl._create_unverified_context()",
        _unit("test_asgi_host.py", "test_another_server_is_refused_in_one_line"),
    ),
    Mutant(
        "the critic trains on any finite number",
        "servers/validation.py",
        "LARGEST_NUMBER = 1e6",
        'LARGEST_NUMBER = float("inf")',
        _unit("test_server_schema.py", "test_content_of_a_training_request"),
    ),
    Mutant(
        "a checkpoint's configuration may call resolvers",
        "checkpoint/file_references.py",
        'if "${" in _REFERENCE.sub("", text):',
        "if False:",
        _unit("test_hostile_files.py", "test_a_configuration_calls_no_resolver"),
    ),
    Mutant(
        "files outside a checkpoint are copied into the next",
        "checkpoint/file_references.py",
        "OmegaConf.update(config, key, OUTSIDE + value)",
        "pass",
        _unit("test_hostile_files.py", "test_a_file_outside_is_not_copied"),
    ),
]


def occurrences(mutant: Mutant, root: Path = ROOT) -> int:
    return (root / mutant.path).read_text().count(mutant.old)


def copy_repository(folder: Path) -> Path:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "runs", "results", "*.pyc")
            shutil.copytree(source, folder / name, symlinks=True, ignore=ignored)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / name)
    return folder


def run_tests(copy: Path, tests: tuple[str, ...]) -> tuple[dict[str, str], str]:
    """Run a selection in a copy: ({test: "passed", "assertion" or "error"}, output).

    The package is installed in place: the copy is imported only because its folder comes first on
    the path, and the report says which one was.

    Raises:
        RuntimeError: the tests imported another package than the copy.
    """
    report = copy / "mutant_report.json"
    report.unlink(missing_ok=True)
    environment = os.environ | {
        "PYTHONPATH": str(copy),
        # a file that changes twice in a second may have stale byte code
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "MUTANT_REPORT": str(report),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-W",
        "ignore",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.mutant_report",
    ]
    command += ["--rootdir", str(copy), "--tb=short", *tests]
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIME_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return {}, f"no end after {TIME_LIMIT_S} s"
    if not report.exists():
        return {}, done.stdout
    result = json.loads(report.read_text())
    if result["package"] is not None and not Path(result["package"]).resolve().is_relative_to(
        copy.resolve()
    ):
        raise RuntimeError(f"the tests in {copy} imported {result['package']}")
    return result["tests"], done.stdout


def judge(mutant: Mutant, copy: Path) -> tuple[bool, str]:
    """Return (whether the fault is caught, what was seen)."""
    if occurrences(mutant, copy) != 1:
        return False, f"its text occurs {occurrences(mutant, copy)} times in {mutant.path}"
    path = copy / mutant.path
    original = path.read_text()
    path.write_text(original.replace(mutant.old, mutant.new))
    try:
        outcomes, output = run_tests(copy, mutant.tests)
    finally:
        path.write_text(original)
    noticed = [test for test, outcome in outcomes.items() if outcome == "assertion"]
    if noticed:
        return (
            True,
            f"{len(noticed)} of {len(outcomes)} tests fail, e.g. {noticed[0].rpartition('/')[2]}",
        )
    if any(outcome == "error" for outcome in outcomes.values()) or not outcomes:
        return False, f"no test fails by an assertion, but something breaks:\n{output[-3000:]}"
    return False, f"SURVIVES {len(outcomes)} tests"


def check_untouched(copy: Path, mutants: list[Mutant]) -> str | None:
    """Return what is wrong with the selected tests in a copy without a fault, or None."""
    tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    outcomes, output = run_tests(copy, tests)
    failed = [test for test, outcome in outcomes.items() if outcome != "passed"]
    empty = [test for test in tests if not any(name.startswith(test) for name in outcomes)]
    if failed or empty or not outcomes:
        return (
            f"without a fault these fail: {failed}, and these ran nothing: {empty}\n"
            f"{output[-5000:]}"
        )
    print(f"{len(outcomes)} tests pass without a fault", flush=True)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="only faults whose name holds one of these")
    parser.add_argument(
        "--jobs", type=int, default=2, help="faults at a time, each in a copy of its own"
    )
    arguments = parser.parse_args()
    wanted = arguments.names
    mutants = [
        mutant for mutant in MUTANTS if not wanted or any(name in mutant.name for name in wanted)
    ]
    if not mutants:
        print(
            f"no fault is named like {wanted}; there are: "
            + "; ".join(mutant.name for mutant in MUTANTS)
        )
        return 1
    start = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        ThreadPoolExecutor(arguments.jobs) as pool,
    ):
        copies = queue.SimpleQueue()
        for job in range(arguments.jobs):
            copies.put(copy_repository(Path(folder) / str(job)))
        copy = copies.get()
        problem = check_untouched(copy, mutants)
        copies.put(copy)
        if problem:
            print(problem)
            return 1

        def one(mutant: Mutant):
            copy, began = copies.get(), time.monotonic()
            try:
                return mutant, *judge(mutant, copy), time.monotonic() - began
            finally:
                copies.put(copy)

        survivors = 0
        for mutant, caught, seen, seconds in pool.map(one, mutants):
            survivors += not caught
            print(
                f"{'caught' if caught else 'MISSED'} {seconds:5.0f} s  "
                f"{mutant.name}\n{'':14}{seen}",
                flush=True,
            )
    print(
        f"{len(mutants) - survivors} of {len(mutants)} faults are caught, in "
        f"{time.monotonic() - start:.0f} s"
    )
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
