# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line: `nemo-aligner generate MODEL ...`."""

from nemo_aligner.core.errors import UserError
from nemo_aligner.generate.responses import check_writable, read_prompts, write_records
from nemo_aligner.generate.settings import RESTORE_KEY, CommandParser, compose_settings
from nemo_aligner.launch.endings import user_errors_end_the_job
from nemo_aligner.parallel.environment import is_rank_zero

DESCRIPTION = """\
Use a trained policy: talk to it in the terminal, or have it respond to a file of prompts.

MODEL is a .nemo file or folder, a checkpoint folder of a job, or the folder of a job (its newest
checkpoint).

examples:
  in the terminal, with the tokenizer's chat template if it has one:
    nemo-aligner generate sft.nemo
  a file of prompts, lines {"text": prompt} or {"messages": [...]}, as for PPO:
    nemo-aligner generate results/gpt_ppo_actor --prompts val.jsonl --out out.jsonl
  sampling, and two ranks:
    nemo-aligner generate sft.nemo sampling_params.temperature=0.7 \\
        length_params.max_length=200 trainer.devices=2 model.tensor_model_parallel_size=2
"""


def parser() -> CommandParser:
    result = CommandParser(
        prog="nemo-aligner generate",
        usage="%(prog)s MODEL [--prompts FILE --out FILE] [--chat | --plain] [key=value ...]",
        description=DESCRIPTION,
        epilog="Every setting is explained in docs/config.md.",
    )
    result.add_argument("--prompts", metavar="FILE", help="jsonl, lines as for PPO")
    result.add_argument("--out", metavar="FILE", help="jsonl to write the responses to")
    form = result.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        action="store_true",
        help="put each text into the chat template, as a user's message (default in "
        "the terminal if it has one)",
    )
    form.add_argument(
        "--plain", action="store_true", help="continue each text as it is (default with --prompts)"
    )
    result.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    return result


@user_errors_end_the_job
def main(argv: list[str] | None = None) -> None:
    args, models, settings = parser().split(argv)
    if len(models) > 1:
        raise UserError(f"one model is needed, not {len(models)}: {', '.join(models)}.")
    if (args.prompts is None) != (args.out is None):
        raise UserError("--prompts and --out belong together: give both, or none to chat.")
    if args.system is not None and args.plain:
        raise UserError("--system is a part of a chat; leave --plain out.")
    cfg = compose_settings("generate", settings)
    if models:
        cfg.pretrained_checkpoint.restore_from_path = models[0]
    if cfg.pretrained_checkpoint.restore_from_path is None:
        raise UserError(
            "name the policy: nemo-aligner generate MODEL, a .nemo file or folder or "
            f"the folder of a job ({RESTORE_KEY})."
        )

    from nemo_aligner.config.checks import check_config

    if args.prompts is not None:
        prompts = read_prompts(args.prompts)  # before anything expensive
        check_writable(args.out)
    check_config(cfg, "generate")

    from nemo_aligner.generate.policy import ChatForm, load_policy, quiet_logs
    from nemo_aligner.launch.processes import resolve_and_create_trainer

    # Texts of a file mostly have a form of their own; the terminal takes the template, if any.
    takes_template = not args.plain and (args.prompts is None or args.system)
    form = ChatForm(args.chat or (None if takes_template else False), args.system)
    quiet_logs()
    policy = load_policy(cfg, resolve_and_create_trainer(cfg))
    if args.prompts is None:
        from nemo_aligner.generate.terminal import converse

        converse(policy, form)
    else:
        from nemo_aligner.generate.batch import respond

        responses = respond(policy, prompts, form, args.prompts)
        if is_rank_zero():
            write_records(args.out, (response.line for response in responses))
            ended = sum(bool(response.is_end) for response in responses)
            print(f"{len(responses)} responses, {ended} of them ended by themselves: {args.out}")


if __name__ == "__main__":
    main()
