# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line: `nemo-aligner convert COMMAND`."""

import argparse
import dataclasses
import errno
import sys
from pathlib import Path

from nemo_aligner.core.endings import interruptible
from nemo_aligner.core.errors import UserError
from nemo_aligner.launch.start_up import remarks, warn_of_unsupported_versions

DTYPES = ("as-stored", "fp32", "bf16", "fp16")


def _size(text: str) -> float:
    size = float(text)
    if not 0 < size < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a size above 0")
    return size


_TO_NEMO = ("OUT", "file that ends in .nemo, or a folder")
_ANY_FORM = "checkpoint of any form that jobs take"
# Command -> what it does, name and meaning of its source, and of its target.
_CONVERSIONS: dict[str, tuple[str, tuple[str, str | None], tuple[str, str | None]]] = {
    "hf-to-nemo": (
        "write a .nemo from a Hugging Face folder; of adapters from one of PEFT",
        ("HF_FOLDER", None),
        _TO_NEMO,
    ),
    "nemo-to-hf": (
        "write a Hugging Face folder; of adapters one of PEFT",
        ("NEMO", _ANY_FORM),
        ("HF_FOLDER", None),
    ),
    "merge-lora": (
        "write adapters merged with their base as a .nemo",
        (
            "ADAPTERS",
            ".nemo of adapters, checkpoint folder of a job, or folder of Hugging Face's PEFT",
        ),
        _TO_NEMO,
    ),
    "to-megatron": (
        "write a checkpoint of Megatron-LM, with which its training goes on",
        ("SOURCE", _ANY_FORM),
        ("FOLDER", "--load of Megatron-LM"),
    ),
}


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="nemo-aligner convert",
        description="Convert checkpoints between Hugging Face folders and .nemo, on a CPU. Jobs "
        "take Hugging Face folders as they are, too "
        "(pretrained_checkpoint.restore_from_path=FOLDER).",
    )
    commands = result.add_subparsers(dest="command", required=True)
    for command, (what, *places) in _CONVERSIONS.items():
        own = commands.add_parser(command, help=what)
        for name, (metavar, meaning) in zip(("source", "target"), places, strict=True):
            own.add_argument(name, type=Path, metavar=metavar, help=meaning)
        if command == "nemo-to-hf":
            _add_options_of_folders(own)
        if command in ("nemo-to-hf", "to-megatron"):
            own.add_argument(
                "--tokenizer",
                type=Path,
                metavar="PATH",
                help="folder of Hugging Face, or SentencePiece model, where the source has none",
            )
        own.add_argument(
            "--base",
            type=lambda path: Path(path).expanduser(),
            metavar="PATH",
            help="base of the adapters, where it lies in another place than they say",
        )
        own.add_argument(
            "--dtype", choices=DTYPES, default="as-stored", help="of the weights that are written"
        )
        own.add_argument(
            "--overwrite", action="store_true", help="replace what stands at the target"
        )
        own.add_argument("--quiet", dest="progress", action="store_false", help="no progress bar")

    info = commands.add_parser("nemo-info", help="say what a checkpoint holds")
    info.add_argument("source", type=Path, metavar="PATH")
    info.add_argument("--json", action="store_true", help="as one JSON object")
    return result


def _add_options_of_folders(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--architecture",
        metavar="MODEL_TYPE",
        help="model_type to write (llama, qwen2, ...); default: that of the folder that the model "
        "came from, else the first one that can express it",
    )
    parser.add_argument(
        "--shard-size", type=_size, default=5.0, metavar="GB", help="largest file (default 5)"
    )
    parser.add_argument(
        "--merged",
        action="store_true",
        help="write adapters merged with their base as a folder with all weights",
    )
    parser.add_argument(
        "--drop-head-bias",
        action="store_true",
        help="leave out the bias of a reward model's head, for which Hugging Face has no place; "
        "all rewards shift by it",
    )


@interruptible()
@remarks.aside()
def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    warn_of_unsupported_versions()
    try:
        _run(args)
        return 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        print(f"error: {error}; nothing was written", file=sys.stderr)
    return 2


def _run(args: argparse.Namespace) -> None:
    # Megatron Core takes seconds to import.
    from nemo_aligner.checkpoint.forms import form_of_path
    from nemo_aligner.convert import conversions

    if args.command == "nemo-info":
        conversions.show_info(args.source, as_json=args.json)
        return
    names = {field.name for field in dataclasses.fields(conversions.Options)}
    options = conversions.Options(**{k: v for k, v in vars(args).items() if k in names})
    given = args.source, args.target, options
    if args.command == "hf-to-nemo":
        adapters = form_of_path(args.source.expanduser()) == "peft"
    else:
        _, (key, _), _ = _CONVERSIONS[args.command]
        adapters = conversions.are_adapters(args.source, key)
    if not adapters:
        _refuse_options(args)
    if args.command == "merge-lora":
        conversions.merge(*given)
    elif args.command == "hf-to-nemo":
        (conversions.peft_to_nemo if adapters else conversions.to_nemo)(*given)
    elif args.command == "to-megatron":
        print(conversions.to_megatron(*given))
        return
    elif not adapters or args.merged:
        size = int(args.shard_size * 1e9)
        conversions.from_nemo(*given, model_type=args.architecture, shard_bytes=size)
    elif args.architecture:
        raise UserError(
            f"--architecture chooses how all weights are written, but {args.source} holds "
            "adapters; add --merged to write them with their base, or leave it out."
        )
    else:
        conversions.to_peft(*given)
    print(args.target)


def _refuse_options(args: argparse.Namespace) -> None:
    """`UserError` if an option for adapters is given for a source without any."""
    for name in ("merged", "base"):
        if getattr(args, name, None):
            raise UserError(
                f"--{name} is for adapters, but {args.source} holds a model with all its weights; "
                "leave it out."
            )


if __name__ == "__main__":
    sys.exit(main())
