# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""No split of the work changes the numbers: judges the cases of `matrix.py` and
`matrix_reload.py`.
"""

import json
import os

import pytest
import torch

from nemo_aligner.config.defaults import complete_model
from nemo_aligner.models.nlp.gpt.megatron_config import build_transformer_config
from nemo_aligner.parallel import parallel_state
from tests.distributed import matrix, matrix_reload
from tests.distributed.launcher import run_ranks
from tests.distributed.matrix import ROLES, SPLITS

BOUND = 1e-5
BOUND_BF16 = 0.1  # 8 bits; what was measured is in docs/parallelism.md
RELOAD = {  # by number of ranks: these save
    1: ["one rank", "one rank adamw"],
    2: [
        *("TP2", "PP2+VPP2", "DP2", "DP2 adamw", "DP2 overlap", "CP2", "EP2", "EP2 adamw"),
        *("TP2+SP bf16", "DP2 adamw bf16"),
    ],
    4: ["TP2xPP2", "TP2+SPxPP2+VPP2"],
}
SAVED = [name for names in RELOAD.values() for name in names]


def sources(name: str) -> list[str]:
    """What a split loads, of its precision: the first all, the others in turn that of the first
    and that of the one before them.
    """
    alike = [other for other in SAVED if SPLITS[other].precision == SPLITS[name].precision]
    place = alike.index(name)
    return [alike[0] if place % 2 else alike[place - 1]] if place else alike


def write_expected(tokenizer_dir, folder, cases_of):
    """What one rank computes of the cases of splits, `{name: cases}`, in this process."""
    precisions = [(SPLITS[name].precision, cases) for name, cases in cases_of.items()]
    wanted = [(*case, precision) for precision, cases in precisions for case in cases]
    matrix.write_expected(tokenizer_dir, folder, wanted)
    parallel_state.destroy()


def keep_report(numbers: dict) -> dict:
    """Append the deviations to the file that MATRIX_REPORT names, one JSON object per case."""
    if "MATRIX_REPORT" in os.environ:
        with open(os.environ["MATRIX_REPORT"], "a") as file:
            records = [{"case": case, "numbers": found} for case, found in numbers.items()]
            file.writelines(json.dumps(record) + "\n" for record in records)
    return numbers


@pytest.fixture(scope="module")
def full_reloads(tiny_tokenizer_dir, models):
    """Deviations of all reloads."""
    reloads = {}
    cases_of = {name: matrix_reload.cases(name) for name in SAVED}
    write_expected(tiny_tokenizer_dir, models, cases_of)
    for size, names in RELOAD.items():
        run_ranks(matrix_reload.save_all, size, 180, tiny_tokenizer_dir, models, names)
    for size, names in RELOAD.items():
        args = (tiny_tokenizer_dir, models, {name: sources(name) for name in names})
        reloads |= keep_report(run_ranks(matrix_reload.load_all, size, 180, *args)[0])
    return reloads


def must_differ(split: matrix.Split, quantity: str) -> bool:
    """Whether the split moves samples to other micro-batches, on which a mean of their means
    depends.
    """
    model_size = 1
    kinds = "tensor_model", "pipeline_model", "context"
    for size in (f"{kind}_parallel_size" for kind in kinds):
        model_size *= split.model[size]
    dealt_anew = (
        split.ranks > model_size and "microbatch" in quantity and not quantity.endswith(" 1")
    )
    return dealt_anew and not quantity.startswith("empty")


def out_of_bounds(name: str, report: dict) -> list[str]:
    """The numbers of all cases of a split that are not within their bounds."""
    split, wrong = SPLITS[name], []
    cases = {case: numbers for case, numbers in report.items() if case[0] == name}
    assert cases
    for case, numbers in cases.items():
        for quantity, deviation in numbers.items():
            kind = quantity.split()[0]
            bound = BOUND if split.precision == 32 else BOUND_BF16
            if quantity.startswith("empty"):
                bound = 0.0
            if kind == "generated" and split.precision != 32:
                continue  # two tokens of nearly the same probability may change places
            if (deviation < 1e-3) if must_differ(split, quantity) else not deviation <= bound:
                wrong.append(f"{case}: {quantity} off by {deviation:.1e}")
    return wrong


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SPLITS)
def test_every_split_gives_the_numbers_of_one_rank(name, tiny_tokenizer_dir, models):
    write_expected(tiny_tokenizer_dir, models, {name: SPLITS[name].cases()})
    args = (tiny_tokenizer_dir, models, [name])
    report = keep_report(run_ranks(matrix.run_splits, SPLITS[name].ranks, 180, *args)[0])
    wrong = out_of_bounds(name, report)
    assert not wrong, "\n".join(wrong)


def check_reloads(reloads: dict) -> None:
    wrong = []
    for case, numbers in reloads.items():
        bound = BOUND if SPLITS[case[1]].precision == 32 else BOUND_BF16
        bounds = {"loaded weights": 0.0}
        limits = {key: bounds.get(key, bound) for key in numbers}
        wrong += [f"{case}: {k} {x:.1e}" for k, x in numbers.items() if not x <= limits[k]]
    assert reloads and not wrong, "\n".join(wrong)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_checkpoints_load_at_every_split(full_reloads):
    check_reloads(full_reloads)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "architecture, role",
    [case for case in SPLITS["DP2"].cases() if ROLES[case[1]].reductions == matrix.REDUCTIONS],
)
def test_what_one_rank_computes(architecture, role, tiny_tokenizer_dir, models):
    """Micro-batches change nothing but the reduction that is named after them; no counting slot,
    no loss.
    """
    write_expected(tiny_tokenizer_dir, models, {"DP2": [(architecture, role)]})
    numbers = torch.load(matrix.expected_file(models, architecture, role, 32))
    for kind in ("loss", "gradient"):
        dynamic, alone = (numbers[f"{kind} token {size}"] for size in (matrix.DYNAMIC, 1))
        dynamic = matrix.apart(dynamic, alone, kind == "gradient")
        assert dynamic < BOUND
        for other in ("sequence 1", "microbatch 2"):
            found, alone = numbers[f"{kind} {other}"], numbers[f"{kind} token 1"]
            assert matrix.apart(found, alone, kind == "gradient") > 1e-3
    empty = {key: found for key, found in numbers.items() if key.startswith("empty")}
    assert empty == dict.fromkeys(empty, {"loss": 0.0, "gradient": 0.0}) and "empty token" in empty
    if role == "actor":
        ended = [sample[1] for sample in numbers["generated sampled"]]
        assert any(ended) and not all(ended)


def test_pipeline_stages_do_not_start_with_the_same_weights(tiny_tokenizer_dir):
    assert run_ranks(matrix.stages_start_different, 2, 60, tiny_tokenizer_dir)[0]


def test_virtual_stages_never_communicate_in_batches(tiny_tokenizer_dir):
    """Batched communication between virtual stages gives wrong gradients with PP=2, and no
    error.
    """
    for virtual in (None, 2):
        sizes = {"pipeline": 2, "virtual_pipeline": virtual}
        sizes = {f"{name}_model_parallel_size": size for name, size in sizes.items()}
        cfg = matrix.model_config(tiny_tokenizer_dir, "llama", **sizes)
        config = build_transformer_config(complete_model(cfg))
        assert config.batch_p2p_comm == (virtual is None) and config.overlap_p2p_comm == (
            virtual is not None
        )


def test_weights_are_never_gathered_during_inference(tiny_tokenizer_dir):
    """Megatron Core can leave the gathering of updated weights to the next forward pass of
    training; generation would read the old ones. No key of the configuration enables that."""
    optim = {"overlap_grad_sync": True, "overlap_param_sync": True, "overlap_param_gather": True}
    cfg = matrix.model_config(tiny_tokenizer_dir, "llama", optim=optim)
    model = matrix.MegatronGPTModel(cfg)
    optimizer, _ = model.setup_megatron_optimization(10)
    assert not any(chunk.ddp_config.overlap_param_gather for chunk in model.model)
    assert not any(part.ddp_config.overlap_param_gather for part in optimizer.chained_optimizers)
    assert not optimizer.config.overlap_param_gather
    assert model.transformer_config.param_sync_func is None
