# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Constitutional AI, the part of reinforcement learning: a policy gives several responses to each
red-teaming prompt, and a judge names the best and the worst by a constitution. The comparisons are
data for train_reward_model.py, the prompts for train_gpt_ppo_actor.py.

    python generate_rl_cai_dataset.py --model sl_cai.nemo --judge-model judge.nemo \
        --batch-size 128 --red-teaming-file-path red_team.jsonl \
        --sys-prompt-constitution-file-path sys_prompt_constitution --output-dir rl_cai

Each of both is a policy of this project, or served with OpenAI's chat protocol (--url, or --host
and --port; --ngc-url and --ngc-model). Stopped, the same command goes on where it ended. See
docs/algorithms.md.
"""

import ast
import random
from pathlib import Path

from chat_models import (
    ModelParser,
    Sampling,
    ServedChatModel,
    check_files,
    engine_trainer,
    open_model,
    read_api_key,
    text_form,
    unescaped,
)
from constitutional import (
    Generator,
    candidates,
    check_shares,
    compare,
    preference_texts,
    red_team_prompt,
    split,
)

from nemo_aligner.core.errors import UserError
from nemo_aligner.generate.responses import check_writable, write_records
from nemo_aligner.launch.endings import user_errors_end_the_job
from nemo_aligner.parallel.environment import is_rank_zero
from nemo_aligner.synthetic import open_records

NGC_URL = "https://integrate.api.nvidia.com/v1/chat/completions"
KINDS = ("prompts", "comparisons")
JUDGEMENT_TOKENS = 1024


def parser() -> ModelParser:
    """The options."""
    result = ModelParser(
        __doc__,
        greedy="False",
        top_p=0.95,
        top_k=50,
        repetition_penalty=1.0,
        end_strings=["<extra_id_1>"],
        user_format=r"<extra_id_1>User\n{MESSAGE}\n<extra_id_1>Assistant\n",
        assistant_format=r"{MESSAGE}\n",
        system_format=r"<extra_id_0>System\n{MESSAGE}\n",
        system_default_message="",
        eos_token="<extra_id_1>",
    )
    result.add_argument("--batch-size", type=int, default=128, help="conversations at once")
    result.add_argument("--seed", type=int, default=1234)
    files = result.add_argument_group("files")
    files.add_argument("--red-teaming-file-path", required=True, help="jsonl")
    files.add_argument(
        "--sys-prompt-constitution-file-path",
        default=str(Path(__file__).with_name("sys_prompt_constitution")),
        help="text (%(default)s)",
    )
    files.add_argument("--output-dir", default=".")
    files.add_argument("--output-filename-prefix", default="cai_rlaif")
    files.add_argument("--splits", default="{'train': 0.8, 'test': 0.2}", help="(%(default)s)")
    files.add_argument("--shuffle", choices=("True", "False"), default="True")
    files.add_argument(
        "--blend-with",
        help="{'name': NAME, SPLIT: {'prompts': [FILE, ...], 'comparisons': [FILE, ...]}, ...}",
    )
    judge = result.add_argument_group("the judge")
    judge.add_argument("--judge-model", metavar="NEMO", help="a policy of this project")
    judge.add_argument("--ngc-url", default=NGC_URL, help="of a server (%(default)s)")
    judge.add_argument("--ngc-model", default="mistralai/mixtral-8x7b-instruct-v0.1")
    judge.add_argument("--ngc-api-key", help="which others can read in the list of processes")
    judge.add_argument("--ngc-api-key-file", help="file of the key (default: NGC_API_KEY)")
    return result


@user_errors_end_the_job
def main() -> None:
    args = parser().read()
    folder = Path(args.output_dir)
    check_files(sys_prompt_constitution_file_path=args.sys_prompt_constitution_file_path)
    check_writable(folder / "prompts.jsonl")
    if args.batch_size < 1:
        raise UserError("--batch-size must be above 0.")
    shares = read_literal("--splits", args.splits)
    check_shares(shares)
    blends = read_blends(args.blend_with, shares)
    constitution = Path(args.sys_prompt_constitution_file_path).expanduser().read_text("utf-8")
    records = open_records(
        args.red_teaming_file_path, lambda record: bool(red_team_prompt(record))
    )
    prompts = [red_team_prompt(record) for record in records]

    trainer = engine_trainer(args, args.model, args.judge_model)
    opened = open_model(args, args.model, text_form(args), trainer)
    generator = Generator(opened.model, args.seed, args.batch_size, args.skip_failed)
    found = candidates(generator, prompts, folder / "cai_candidate_dataset.jsonl")
    if opened.policy is not None and args.judge_model is not None:
        opened.policy.generator.model.clear()
    judge = open_judge(args, trainer)
    results = compare(judge, found, constitution, folder / "cai_preference_dataset.jsonl")
    if is_rank_zero():
        write(args, folder, split(results, shares, args.shuffle == "True", args.seed), blends)


def open_judge(args, trainer) -> Generator:
    """The judge, which responds with what is likeliest."""
    if args.judge_model is not None:
        args.greedy, args.tokens_to_generate = "True", JUDGEMENT_TOKENS
        form = text_form(args)
        model = open_model(args, args.judge_model, form, trainer, prefers_template=True).model
    else:
        key = args.ngc_api_key or read_api_key(args.ngc_api_key_file, "NGC_API_KEY")
        sampling = Sampling(temperature=0.0, max_tokens=JUDGEMENT_TOKENS)
        model = ServedChatModel(
            args.ngc_url,
            args.ngc_model,
            sampling,
            key,
            args.timeout_s,
            args.tries,
            args.batch_size,
        )
    return Generator(model, args.seed, args.batch_size, args.skip_failed)


def read_literal(option: str, text: str) -> dict:
    """The dict of an option.

    Raises:
        UserError: it is none.
    """
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = None
    if not isinstance(value, dict) or not value:
        raise UserError(f"{option} {text}: give a dict as Python writes it.")
    return value


def read_blends(text: str | None, shares: dict) -> dict:
    """The files to mix in.

    Raises:
        UserError: another form, or a file that does not exist.
    """
    if text is None:
        return {}
    blends = read_literal("--blend-with", text)
    wanted = {"name", *shares}
    whole = blends.keys() == wanted and all(
        isinstance(blends[name], dict) and blends[name].keys() == set(KINDS) for name in shares
    )
    if not whole or not blends["name"]:
        raise UserError(
            f"--blend-with must have the keys {', '.join(sorted(wanted))}, and each part of "
            "--splits the keys prompts and comparisons."
        )
    for name in shares:
        for kind in KINDS:
            files = blends[name][kind]
            blends[name][kind] = [files] if isinstance(files, str) else list(files)
            for file in blends[name][kind]:
                check_files(blend_with=file)
    return blends


def write(args, folder, parts, blends) -> None:
    """Write prompts and comparisons of each part, and mixed with others."""
    form, eos = text_form(args), unescaped(args.eos_token or "")
    prefix = f"{args.output_filename_prefix}_" if args.output_filename_prefix else ""
    for name, results in parts.items():
        texts = [preference_texts(result, form, eos) for result in results]
        lines = {
            "prompts": [[{"text": prompt}] for prompt, _, _ in texts],
            # Two neighbouring lines are a pair, the better first.
            "comparisons": [[{"text": better}, {"text": worse}] for _, better, worse in texts],
        }
        for kind in KINDS:
            path = folder / f"{prefix}{name}_{kind}_with_chat_prompt.jsonl"
            print(f"{write_groups(path, lines[kind])} lines: {path}")
            if blends:
                mixed = list(lines[kind])
                for file in blends[name][kind]:
                    mixed += read_groups(file, len(lines[kind][0]))
                random.Random(args.seed).shuffle(mixed)
                path = folder / f"blend_{blends['name']}_with_{path.name}"
                print(f"{write_groups(path, mixed)} lines: {path}")


def write_groups(path, groups) -> int:
    """Write groups of records; returns the number of lines."""
    return write_records(path, (record for group in groups for record in group))


def read_groups(path, size) -> list:
    """The records of a file in groups of `size` neighbours.

    Raises:
        UserError: a record without a text, or an incomplete group.
    """

    def check(record) -> int:
        if not isinstance(record.get("text"), str):
            raise UserError(f"field 'text' is missing; the line has {sorted(record)}.")
        return 0

    records = list(open_records(path, check))
    if len(records) % size:
        raise UserError(f"{path} has {len(records)} lines, but {size} neighbours make a pair.")
    return [records[start : start + size] for start in range(0, len(records), size)]


if __name__ == "__main__":
    main()
