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


# Command -> what it does, and its source and target, by what they are.
_CONVERSIONS = {
    "hf-to-nemo": (
        "write a .nemo from a Hugging Face folder; of adapters from one of PEFT",
        "HF_FOLDER",
        "OUT",
    ),
    "nemo-to-hf": ("write a Hugging Face folder; of adapters one of PEFT", "NEMO", "HF_FOLDER"),
    "merge-lora": ("write adapters merged with their base as a .nemo", "ADAPTERS", "OUT"),
    "to-megatron": (
        "write a checkpoint of Megatron-LM, with which its training goes on",
        "SOURCE",
        "FOLDER",
    ),
}
_PLACES = {
    **dict.fromkeys(("NEMO", "SOURCE"), "checkpoint of any form that jobs take"),
    "ADAPTERS": ".nemo of adapters, checkpoint folder of a job, or folder of Hugging Face's PEFT",
    "OUT": "file that ends in .nemo, or a folder",
    "FOLDER": "--load of Megatron-LM",
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
        option = own.add_argument
        for name, place in zip(("source", "target"), places, strict=True):
            option(name, type=Path, metavar=place, help=_PLACES.get(place))
        if command == "nemo-to-hf":
            option(
                "--architecture",
                metavar="MODEL_TYPE",
                help="model_type to write (llama, qwen2, ...); default: that of the folder that "
                "the model came from, else the first one that can express it",
            )
            option("--shard-size", type=_size, default=5.0, metavar="GB", help="largest file (5)")
            option(
                "--merged",
                action="store_true",
                help="write adapters merged with their base as a folder with all weights",
            )
            option(
                "--drop-head-bias",
                action="store_true",
                help="leave out the bias of a reward model's head, for which Hugging Face has no "
                "place; all rewards shift by it",
            )
        if command in ("nemo-to-hf", "to-megatron"):
            option(
                "--tokenizer",
                type=Path,
                metavar="PATH",
                help="folder of Hugging Face, or SentencePiece model, where the source has none",
            )
        option(
            "--base",
            type=lambda path: Path(path).expanduser(),
            metavar="PATH",
            help="base of the adapters, where it lies in another place than they say",
        )
        option(
            "--dtype", choices=DTYPES, default="as-stored", help="of the weights that are written"
        )
        option("--overwrite", action="store_true", help="replace what stands at the target")
        option("--quiet", dest="progress", action="store_false", help="no progress bar")

    info = commands.add_parser("nemo-info", help="say what a checkpoint holds")
    info.add_argument("source", type=Path, metavar="PATH")
    info.add_argument("--json", action="store_true", help="as one JSON object")
    return result


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
    from nemo_aligner.convert import conversions  # Megatron Core takes seconds to import

    if args.command == "nemo-info":
        conversions.show_info(args.source, as_json=args.json)
        return
    names = {field.name for field in dataclasses.fields(conversions.Options)}
    options = conversions.Options(**{k: v for k, v in vars(args).items() if k in names})
    convert = {
        "hf-to-nemo": conversions.to_nemo,
        "nemo-to-hf": conversions.from_nemo,
        "merge-lora": conversions.merge,
        "to-megatron": conversions.to_megatron,
    }[args.command]
    print(convert(args.source, args.target, options) or args.target)


if __name__ == "__main__":
    sys.exit(main())
