# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Data as a job will see them, before it trains: `nemo-aligner inspect`. `findings.py` builds the
dataset of the job and looks for what is dropped, cut, empty or there twice; `show.py` shows it.
"""

import os
import sys

from nemo_aligner.config.jobs import JOBS as CONFIGURATIONS
from nemo_aligner.core.errors import UserError
from nemo_aligner.generate.settings import CommandParser
from nemo_aligner.launch.endings import user_errors_end_the_job

DESCRIPTION = """\
Show the first samples of data files as the model will see them, with the tokens that are trained
on in colour, the lengths, and what will be dropped, cut, is empty or there twice.

MODEL is a .nemo file or folder, a checkpoint folder of a job, the folder of a job, or a Hugging
Face folder; its tokenizer is used. The settings are those of the job that will read the files.

examples:
  nemo-aligner inspect train.jsonl --model sft.nemo
  nemo-aligner inspect chats.jsonl --model Llama-3.2-1B-Instruct --job gpt_sft \\
      model.data.chat_template=tokenizer model.data.train_ds.max_seq_length=2048
"""
JOBS = (*(job.name for job in CONFIGURATIONS.values() if job.algo and job.records), "steerlm2")


def parser() -> CommandParser:
    result = CommandParser(
        prog="nemo-aligner inspect",
        usage="%(prog)s FILE ... --model MODEL [--job JOB] [key=value ...]",
        description=DESCRIPTION,
        epilog="See docs/data.md.",
    )
    add = result.add_argument
    add("--model", metavar="MODEL", help="whose tokenizer is used")
    add(
        "--job",
        choices=JOBS,
        help="that will read the files (default: what the records look like)",
    )
    add("--samples", type=int, default=3, metavar="N", help="to show (default 3)")
    add(
        "--limit",
        type=int,
        default=20000,
        metavar="N",
        help="samples that lengths and findings are of (default 20000; 0: all)",
    )
    add("--html", metavar="FILE", help="write a page too")
    add("--color", choices=("auto", "always", "never"), default="auto", help="(default auto)")
    return result


@user_errors_end_the_job
def main(argv: list[str] | None = None) -> None:
    args, words, settings = parser().split(argv)
    if words[:1] != ["inspect"] or len(words) < 2:
        raise UserError("the command is: nemo-aligner inspect FILE ... --model MODEL")
    if args.model is None:
        raise UserError("--model is missing: name the model whose tokenizer the job will use.")
    if args.samples < 0 or args.limit < 0:
        raise UserError("--samples and --limit are numbers of samples, 0 or more.")
    # They take seconds to import.
    from nemo_aligner.data.nlp.records import first_record
    from nemo_aligner.generate.policy import quiet_logs
    from nemo_aligner.inspection.findings import look, open_job, read_samples
    from nemo_aligner.inspection.show import in_brackets, in_colour, in_html, show

    quiet_logs()
    try:
        job = open_job(words[1:], args.model, args.job, settings)
    except UserError:  # says what is wrong with these
        for name, value in first_record(words[1]).items():
            print(f"first record, {name}: {repr(value):.80}")
        raise
    found = (read_samples(job, args.samples), *look(job, args.limit))
    colored = args.color == "always" or (
        args.color == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    )
    print(show(job, *found, in_colour if colored else in_brackets))
    if args.html is not None:
        from nemo_aligner.generate.responses import replaced
        from nemo_aligner.report.elements import document

        text = f'<pre class="tokens">{show(job, *found, in_html)}</pre>'
        with replaced(args.html) as file:
            file.write(document("Data as the model sees them", text))
        print(f"\npage: {args.html}")
