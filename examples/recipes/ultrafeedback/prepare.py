# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Data for SFT, a reward model and PPO from UltraFeedback in its binarized form: jsonl files with
lines `{"prompt": ..., "chosen": [messages], "rejected": [messages]}`, a message being
`{"role": ..., "content": ...}`.

    python examples/recipes/ultrafeedback/prepare.py MODEL TRAIN.jsonl TEST.jsonl OUT_FOLDER
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from chat_text import ChatText, read_lines, write_lines  # noqa: E402  (found beside this folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="Hugging Face folder, for its chat template")
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    chat = ChatText(args.model)
    for name, file in (("train", args.train), ("validation", args.test)):
        prompts, examples, pairs = [], [], []
        for line in read_lines(file):
            *before, last = line["chosen"]
            prompt, better = chat.prompt(before), chat.response(last["content"])
            worse = chat.response(line["rejected"][-1]["content"])
            if better == worse:
                continue
            prompts.append({"text": prompt})
            examples.append({"input": prompt, "output": better})
            pairs += [{"text": prompt + better}, {"text": prompt + worse}]
        write_lines(args.out / f"prompts_{name}.jsonl", prompts)
        write_lines(args.out / f"sft_{name}.jsonl", examples)
        write_lines(args.out / f"pairs_{name}.jsonl", pairs)


if __name__ == "__main__":
    main()
