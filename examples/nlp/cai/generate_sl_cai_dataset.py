# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Constitutional AI, the supervised part: a model responds to red-teaming prompts, criticizes its
responses and revises them; the revisions are data for train_gpt_sft.py (model.data.chat=True).

    python generate_sl_cai_dataset.py --model policy.nemo \
        --red-teaming-prompts-dataset-path red_team.jsonl \
        --few-shot-prompts-dataset-path few_shot_samples_example.json \
        --critique-revision-instructions-path CritiqueRevisionInstructions.json \
        --output-filepath sl_cai.jsonl

The model is a policy of this project (--model), or served with OpenAI's chat protocol (--url, or
--host and --port). Stopped, the same command goes on where it ended. See
docs/algorithms.md.
"""

import json
import random
from pathlib import Path

from chat_models import (
    ModelParser,
    check_files,
    engine_trainer,
    open_model,
    text_form,
)
from constitutional import (
    Generator,
    read_few_shot,
    read_principles,
    red_team_prompt,
    revise,
    revised_conversation,
)

from nemo_aligner.core.errors import UserError
from nemo_aligner.generate.responses import check_writable, replaced, write_records
from nemo_aligner.launch.endings import user_errors_end_the_job
from nemo_aligner.parallel.environment import is_rank_zero
from nemo_aligner.synthetic import open_records


def parser() -> ModelParser:
    """The options."""
    result = ModelParser(
        __doc__,
        greedy="True",
        top_p=0.9,
        top_k=1,
        repetition_penalty=1.2,
        end_strings=None,
    )
    files = result.add_argument_group("files")
    files.add_argument("--red-teaming-prompts-dataset-path", required=True, help="jsonl")
    files.add_argument("--few-shot-prompts-dataset-path", required=True, help="json")
    files.add_argument("--critique-revision-instructions-path", required=True, help="json")
    files.add_argument("--helpfulness-dataset-path", help="conversations to mix in, jsonl")
    files.add_argument("--output-filepath", default="cai_revisions_aligner_chat_template.jsonl")
    result.add_argument("--num-examples", type=int, default=-1, help="prompts to use; -1: all")
    result.add_argument("--batch_size", type=int, default=32, help="conversations at once")
    result.add_argument("--seed", type=int, default=1234)
    result.add_argument("--save-to-file-interval", type=int, help="has no effect: each is saved")
    result.add_argument("--max-seq-length", type=int, help="leave out what is longer, in tokens")
    result.add_argument("--tokenizer-library", help="for --max-seq-length (default: --model's)")
    result.add_argument("--tokenizer-model", help="for --max-seq-length (default: --model's)")
    result.add_argument("--apply_chat_template", choices=("True", "False"), default="False")
    return result


@user_errors_end_the_job
def main() -> None:
    args = parser().read()
    out = Path(args.output_filepath)
    check_files(helpfulness_dataset_path=args.helpfulness_dataset_path)
    check_writable(out)
    if args.num_examples == 0 or args.num_examples < -1 or args.batch_size < 1:
        raise UserError("--num-examples is -1 or above 0, and --batch_size above 0.")
    needs_tokenizer = args.max_seq_length is not None and args.model is None
    if needs_tokenizer and None in (args.tokenizer_library, args.tokenizer_model):
        raise UserError("--max-seq-length needs --tokenizer-library and --tokenizer-model.")
    principles = read_principles(args.critique_revision_instructions_path)
    few_shot = read_few_shot(args.few_shot_prompts_dataset_path)
    prompts = open_records(
        args.red_teaming_prompts_dataset_path, lambda record: bool(red_team_prompt(record))
    )
    count = len(prompts) if args.num_examples < 0 else min(args.num_examples, len(prompts))

    trainer = engine_trainer(args, args.model)
    form = text_form(args) if args.apply_chat_template == "True" else None
    opened = open_model(args, args.model, form, trainer)
    generator = Generator(opened.model, args.seed, args.batch_size, args.skip_failed)
    log = out.parent / "cai_output"
    results = revise(
        generator,
        [red_team_prompt(prompts[n]) for n in range(count)],
        principles,
        few_shot,
        log / f"{out.stem}_critique_revision_samples.jsonl",
    )
    if is_rank_zero():
        write(args, out, log, results, opened.tokenizer)


def write(args, out, log, results, tokenizer) -> None:
    """Write the data of supervised fine-tuning, alone and mixed with others."""
    from nemo_aligner.synthetic import check_conversations, without_long

    samples = [revised_conversation(result) for result in results]
    if not samples:
        raise UserError("no prompt got a revision; the warnings above say why.")
    write_records(log / "cai_samples.jsonl", samples)
    files = [str(log / "cai_samples.jsonl")]
    if args.helpfulness_dataset_path is not None:
        samples += check_conversations(args.helpfulness_dataset_path)
        files.insert(0, args.helpfulness_dataset_path)
        random.Random(args.seed).shuffle(samples)
    if args.max_seq_length is not None:
        whole = len(samples)
        samples = without_long(
            samples, args.max_seq_length, tokenizer, args.tokenizer_library, args.tokenizer_model
        )
        print(f"{whole - len(samples)} conversations are longer than {args.max_seq_length} tokens")
    print(f"{write_records(out, samples)} conversations: {out}")
    with replaced(out.with_suffix(".summary.json")) as file:
        summary = {"input_files": files, "output_file": str(out), "prompt_template": "chat"}
        json.dump(summary, file, indent=4)


if __name__ == "__main__":
    main()
