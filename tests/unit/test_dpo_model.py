# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""DPO as a whole: the data set, and updates of data set, trainer and model against trl's formulas
on the same model of transformers. test_preference.py has the losses.
"""

import copy
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from omegaconf import OmegaConf

from nemo_aligner.algorithms.dpo import DPOTrainer, dpo_custom_collate
from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.datasets import DPOModelDataset, KTOModelDataset
from nemo_aligner.launch.model_loading import load_and_override_model_config, load_from_nemo
from nemo_aligner.models.nlp.gpt.megatron_gpt_dpo_model import MegatronGPTDPOModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from tests import preference_jobs as jobs
from tests.cases import some_of
from tests.chat_forms import TEMPLATES
from tests.oracles import trl_dpo
from tests.tiny_models import tiny_config
from tests.trl_dpo_steps import PEERS
from tests.unit.test_script_steps import job_configuration

pytestmark = pytest.mark.slow

STEPS, PAIRS, LENGTH = 20, jobs.BATCH, 44


def records(count):
    """Pairs of ragged lengths with rewards."""
    for i in range(count):
        pair = {"prompt": "the film" + " so" * (i % 5) + f" {i}", "chosen": jobs.RESPONSES[i % 4]}
        pair["rejected"] = jobs.RESPONSES[(i + 1 + i // 4 % 3) % 4]
        yield {**pair, "chosen_reward": 0.5 * (i % 3)}


def data_of(tokenizer, folder, given, settings=None, length=LENGTH):
    path = jobs.write(folder / "pairs.jsonl", given)
    return DPOModelDataset([path], tokenizer, length, settings)


# --- the data set


def test_items_are_the_tokens_of_the_texts_with_masks_of_the_responses(tiny_tokenizer, tmp_path):
    given = list(records(6))
    given[1]["chosen_response"] = given[1].pop("chosen")  # NeMo-Aligner's names
    given[1]["rejected_response"] = given[1].pop("rejected")
    del given[2]["chosen_reward"]
    settings = {"append_eod": True, "default_chosen_reward": 3.0}
    data = data_of(tiny_tokenizer, tmp_path, given, settings)
    for item, record in zip(data, records(6), strict=True):
        for name in ("chosen", "rejected"):
            # The tokenizer makes no token of two words.
            prompt = tiny_tokenizer.text_to_ids(record["prompt"])
            response = tiny_tokenizer.text_to_ids(record["prompt"] + record[name])[len(prompt) :]
            tokens = [*prompt, *response, tiny_tokenizer.eos_id]
            assert item[name].tolist()[: len(tokens)] == tokens
            assert item[f"{name}_length"] == len(tokens)
            mask = [0] * len(prompt) + [1] * (len(response) + 1)
            assert item[f"{name}_mask"].tolist() == mask + [0] * (LENGTH - len(mask))
        assert item["rejected_reward"] == 0
    assert [float(data[i]["chosen_reward"]) for i in range(6)] == [0, 0.5, 3, 0, 0.5, 1]
    empty = data[-1]
    assert not empty["chosen_mask"].any() and not empty["loss_mask"].any()


def test_only_the_last_response_of_a_conversation_counts(tiny_tokenizer, tmp_path):
    first = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a joy"}]
    prompt = [*first, {"role": "user", "content": "and this?"}]
    said = {"chosen": "a dull one", "rejected": "a warm one"}
    pair = {side: [{"role": "assistant", "content": text}] for side, text in said.items()}
    template = tmp_path / "template.jinja"
    template.write_text(jobs.CHAT)
    chat = {"chat_template": str(template)}
    item = data_of(tiny_tokenizer, tmp_path, [{"prompt": prompt, **pair}], chat, 90)[0]
    for name, response in said.items():
        counted = item[name][item[f"{name}_mask"].bool()].tolist()
        assert tiny_tokenizer.ids_to_text(counted[:-1]).strip() == response
        assert counted[-1] == tiny_tokenizer.eos_id


PAIR = {"prompt": "a", "chosen": " b", "rejected": " c"}
LABELLED = {"prompt": "a", "response": " b", "preference": "chosen"}
CONVERSATION = [{"role": "user", "content": "a"}]
NO_TEMPLATE = "the tokenizer has no chat template"
BAD_LINES = [
    (DPOModelDataset, PAIR, {"rejected": " b"}, "nothing to prefer"),
    (DPOModelDataset, {"text": "a b"}, {}, "'chosen' and 'rejected' are missing"),
    (DPOModelDataset, PAIR, {"prompt": None}, "field 'prompt' is missing"),
    (DPOModelDataset, PAIR, {"rejected": None}, "field 'rejected' is missing"),
    (DPOModelDataset, PAIR, {"chosen_reward": "much"}, "'chosen_reward' is 'much', not a number"),
    (DPOModelDataset, PAIR, {"prompt": CONVERSATION}, NO_TEMPLATE),
    (KTOModelDataset, LABELLED, {"preference": "good"}, '"good"; it must be "chosen" or "reject'),
    (KTOModelDataset, LABELLED, {"preference": 1}, "'preference' is 1;"),
    (KTOModelDataset, LABELLED, {"preference": None}, "field 'preference' is missing"),
    (KTOModelDataset, LABELLED, {"response": None}, "field 'response' is missing"),
    (KTOModelDataset, LABELLED, {"prompt": None}, "field 'prompt' is missing"),
    (KTOModelDataset, LABELLED, {"prompt": CONVERSATION}, NO_TEMPLATE),
]


@pytest.mark.parametrize(("kind", "whole", "changes", "message"), BAD_LINES)
def test_lines_without_items_are_named(tiny_tokenizer, tmp_path, kind, whole, changes, message):
    line = {key: value for key, value in {**whole, **changes}.items() if value is not None}
    path = jobs.write(tmp_path / "items.jsonl", [whole if changes else PAIR, line])
    with pytest.raises(UserError, match=f"(?s)line 2.*{message}"):
        kind([path], tiny_tokenizer, LENGTH)


def test_pairs_of_the_same_tokens_are_named(tiny_tokenizer, tmp_path):
    """As those of Llama 3 and Gemma, the template leaves out the spaces around a message."""
    template = tmp_path / "trims.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    record = {"prompt": "a", "chosen": "Yes", "rejected": "Yes "}
    given = tiny_tokenizer, tmp_path, [{**record, "rejected": "No"}, record]
    with pytest.raises(UserError, match="(?s)line 2.*have the same tokens .* nothing to prefer"):
        data_of(*given, {"chat_template": str(template)})
    assert len(data_of(*given)) == 2  # as texts they differ


def test_a_conversation_that_begins_with_the_other_is_no_pair(tiny_tokenizer, tmp_path):
    chosen = [{"role": "assistant", "content": "a joy"}]
    longer = [*chosen, {"role": "user", "content": "why?"}, {**chosen[0], "content": "dull"}]
    chat = {"chat_template": str(TEMPLATES / "chatml.jinja")}
    for sides, words in (
        ({"chosen": chosen, "rejected": longer}, "'chosen' is the beginning of 'rejected'"),
        ({"chosen": longer, "rejected": "a joy"}, "'rejected' is the beginning of 'chosen'"),
    ):
        with pytest.raises(UserError, match=f"(?s)line 1.*{words}"):
            data_of(tiny_tokenizer, tmp_path, [{"prompt": "a", **sides}], chat)


# --- training


def job(**dpo):
    return jobs.job_of("dpo", **{"ref_policy_kl_penalty": 0.3, **dpo})


def tiny_policy(tokenizer_dir, **dpo):
    """A policy that is its reference."""
    model = MegatronGPTDPOModel(OmegaConf.merge(tiny_config(tokenizer_dir), job(**dpo)))
    model.set_reference_policy()
    return model


def trainer_of(model, data, **settings):
    return jobs.trainer_of(DPOTrainer, model, data, STEPS, **settings)


def steps_of_trl(hf, given, tokenizer, loss_type, average, sft_weight):
    """Losses and margins of a loop over the texts: a model of transformers, trl's log-probs and
    loss, PyTorch's optimizer.
    """
    trl = trl_dpo(beta=0.3, label_smoothing=0.0, loss_type=loss_type)
    reference, optimizer = copy.deepcopy(hf), jobs.adamw(hf)
    losses, margins = [], []
    for step in range(STEPS):
        batch = given[step * PAIRS : (step + 1) * PAIRS]
        rows, labels = [], []
        for name in ("chosen", "rejected"):
            for record in batch:
                prompt = tokenizer.text_to_ids(record["prompt"])
                rows.append(tokenizer.text_to_ids(record["prompt"] + record[name]))
                labels.append([-100] * len(prompt) + rows[-1][len(prompt) :])
        tokens, labels = jobs.padded(rows, labels)

        def logps(model, tokens=tokens, labels=labels):
            sums, counts = trl.get_batch_logps(model(tokens).logits, labels)
            return (sums / counts if average else sums).chunk(2)

        with torch.no_grad():
            before = logps(reference)
        policy = logps(hf)
        terms, chosen, rejected = trl.dpo_loss(*policy, *before)
        loss = terms.mean() - sft_weight * policy[0].mean()
        jobs.update(hf, optimizer, loss)
        losses.append(loss.item())
        margins.append((chosen - rejected).mean().item() / 0.3)
    return losses, margins


def check_against(losses, margins, weights, hf_folder, data, tmp_path, **dpo):
    """`STEPS` updates of the model in `hf_folder` have the losses and margins, and end at the
    weights, as transformers reads them. Returns their metrics.
    """
    cfg = job(**dpo, log_prob_forward_micro_batch_size=1)
    model = load_from_nemo(MegatronGPTDPOModel, cfg, None, restore_path=hf_folder)
    model.set_reference_policy()
    trainer, log = trainer_of(model, data)
    trainer.fit()
    assert [metrics["loss"] for metrics in log] == pytest.approx(losses, abs=1e-4)
    assert [metrics["margin"] for metrics in log] == pytest.approx(margins, abs=1e-3)
    assert max(map(abs, margins)) > 0.2  # the policy has left its reference
    jobs.assert_same_weights(jobs.exported(trainer, tmp_path / "run", "dpo"), dict(weights))
    return log


@some_of(
    ("preference_loss", "loss_type", "average", "sft_weight"),
    [("dpo", "sigmoid", False, 0.0), ("ipo", "ipo", True, 0.2)],
)
def test_twenty_steps_end_at_the_weights_of_trl(
    write_folder, tiny_tokenizer, tmp_path, preference_loss, loss_type, average, sft_weight
):
    hf, given = jobs.random_llama(), list(records(STEPS * PAIRS))
    folder, data = write_folder(hf), data_of(tiny_tokenizer, tmp_path, given)
    dpo = {"preference_loss": preference_loss, "preference_average_log_probs": average}
    dpo["sft_loss_weight"] = sft_weight
    numbers = steps_of_trl(hf, given, tiny_tokenizer, loss_type, average, sft_weight)
    log = check_against(*numbers, hf.named_parameters(), folder, data, tmp_path, **dpo)
    if preference_loss == "dpo":
        assert log[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("asked", ["", "dropout", "none", "adapters"])
def test_a_stored_dropout_is_off_unless_it_is_asked_for(
    tiny_tokenizer_dir, tiny_tokenizer, tmp_path, lines, asked
):
    base = tmp_path / "base"
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.2}
    zero = dict.fromkeys(dropout, 0)
    MegatronGPTModel(tiny_config(tiny_tokenizer_dir, **dropout)).save_to(f"{base}/")
    sizes = {"model.global_batch_size": PAIRS, "model.micro_batch_size": 2}
    tuning = {"adapter_dropout": 0.5, "row_init_method": "normal"}
    none = {"model.hidden_dropout": 0, "model.attention_dropout": 0.0}
    lora = {"model.peft.peft_scheme": "lora", "model.peft.lora_tuning": tuning}
    changes = {"": {}, "dropout": {"model.hidden_dropout": 0.1}, "none": none, "adapters": lora}
    cfg = job_configuration("gpt_dpo", base, **sizes, **changes[asked])
    cfg.model = load_and_override_model_config(base, cfg.model)
    model = load_from_nemo(MegatronGPTDPOModel, cfg.model, None, restore_path=base)
    model.init_peft(cfg.model.peft)
    model.set_reference_policy()
    data = data_of(tiny_tokenizer, tmp_path, records(PAIRS))
    trainer, log = trainer_of(model, data, max_steps=1)
    trainer.fit()
    assert (log[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)) == (asked in ("", "none"))
    off = "(attention_dropout=0.2)" if asked == "dropout" else "(hidden_dropout=0.1, attention"
    assert sum("is off in this job" in line and off in line for line in lines) == (asked != "none")
    # Of a policy that starts from other weights than its reference, a line says so before.
    assert sum("first_rewards is" in line for line in lines) == (asked == "dropout")
    told = sum("the reference policy is the base" in line for line in lines)
    assert told == (asked == "adapters")
    model.save_config_to(tmp_path)
    stored = OmegaConf.load(tmp_path / "model_config.yaml")
    assert {key: stored[key] for key in dropout} == (dropout if asked != "none" else zero)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_twenty_steps_end_at_the_weights_of_trls_trainer(
    write_folder, tiny_tokenizer, tiny_tokenizer_dir, tmp_path
):
    """TRL's data preparation, collator, loss, optimizer and loop, none of it ours."""
    if not (PEERS / "trl").is_dir():
        pytest.skip(f"{PEERS} has no trl; `make test-full` installs it")
    folder = write_folder(jobs.random_llama())
    data = data_of(tiny_tokenizer, tmp_path, records(STEPS * PAIRS), {"append_eod": True})
    given = {"model": folder, "tokenizer": tiny_tokenizer_dir, "pairs": tmp_path / "pairs.jsonl"}
    given |= {"output": tmp_path / "trl", "steps": STEPS, "batch": PAIRS, "loss": "sigmoid"}
    arguments = [str(part) for name, value in given.items() for part in (f"--{name}", value)]
    command = [sys.executable, "-m", "tests.trl_dpo_steps", *arguments]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=300)
    written = json.loads((tmp_path / "trl" / "log.json").read_text())
    assert written["trl"] == "0.29.1" and len(written["steps"]) == STEPS
    losses = [step["loss"] for step in written["steps"]]
    margins = [step["rewards/margins"] / 0.3 for step in written["steps"]]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trl")
    check_against(losses, margins, model.named_parameters(), folder, data, tmp_path)


def test_rewards_of_the_data_train_rpo(tiny_tokenizer_dir, tiny_tokenizer, tmp_path):
    """The implicit rewards move toward the gap that the data give."""
    gap = 2.0
    given = [{**r, "chosen_reward": gap, "rejected_reward": 0.0} for r in records(STEPS * PAIRS)]
    data = data_of(tiny_tokenizer, tmp_path, given)
    for name in ("rpo_sq", "rpo_bwd_kl", "rpo_fwd_kl"):
        model = tiny_policy(tiny_tokenizer_dir, preference_loss=name, gt_reward_scale=0.5)
        trainer, log = trainer_of(model, data)
        trainer.fit()
        losses = [metrics["preference_loss"] for metrics in log]
        expected = {"rpo_sq": (0.5 * gap) ** 2}.get(name, losses[0])
        assert losses[0] == pytest.approx(expected, abs=1e-5)
        assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


def test_a_batch_needs_its_reference(tiny_tokenizer_dir, tiny_tokenizer, tmp_path):
    model = MegatronGPTDPOModel(OmegaConf.merge(tiny_config(tiny_tokenizer_dir), job()))
    data = data_of(tiny_tokenizer, tmp_path, records(4))
    batch = dpo_custom_collate([data[i] for i in range(4)], eos_id=1)
    with pytest.raises(UserError, match="set_reference_policy"):
        model.get_ref_policy_logprobs(batch)
    with pytest.raises(UserError, match="no log-probs of the reference policy"):
        model.get_loss_and_metrics(batch)
    model.ref_policy_state_dict = model.weights_to_cpu()  # as NeMo-Aligner's script does
    assert model.get_ref_policy_logprobs(batch).shape == (8, LENGTH - 1)


@pytest.mark.parametrize("average", [False, True], ids=["sums", "means"])
def test_an_alarm_when_both_become_unlikely(tiny_tokenizer_dir, tiny_tokenizer, tmp_path, average):
    """The threshold is in nats per response, whatever the rewards are."""
    model = tiny_policy(tiny_tokenizer_dir, preference_average_log_probs=average)
    data = data_of(tiny_tokenizer, tmp_path, records(3 * PAIRS))
    trainer, log = trainer_of(model, data, alarms={"likelihood_fall": 0.5, "first_rewards": None})
    said = []
    trainer.alarms._warn = said.append
    for weight in model.unwrapped()[0].output_layer.parameters():
        weight.data *= 3  # a policy that is sure of other tokens
    trainer.fit()
    assert log[0]["likelihood_fall"] > 0.5 and log[0]["alarms_active"] == 1
    fall = -max(log[0]["rewards_chosen_mean"], log[0]["rewards_rejected_mean"])
    if average:
        assert log[0]["likelihood_fall"] > 2 * fall > 0
    else:
        assert log[0]["likelihood_fall"] == pytest.approx(fall)
    assert len(said) == 1 and "model.dpo.sft_loss_weight" in said[0]
