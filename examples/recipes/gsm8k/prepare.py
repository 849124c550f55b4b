# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts and answers from GSM8K (https://github.com/openai/grade-school-math), whose
`train.jsonl` and `test.jsonl` have lines `{"question": ..., "answer": "... #### 42"}`.

    python examples/recipes/gsm8k/prepare.py MODEL SOURCE_FOLDER OUT_FOLDER
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from chat_text import ChatText, read_lines, write_lines  # noqa: E402  (found beside this folder)
from reward import INSTRUCTION  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="Hugging Face folder, for its chat template")
    parser.add_argument("source", type=Path, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    chat = ChatText(args.model)
    for split in ("train", "test"):
        prompts = []
        for line in read_lines(args.source / f"{split}.jsonl"):
            question = [{"role": "user", "content": line["question"].strip() + INSTRUCTION}]
            answer = line["answer"].rpartition("####")[2].strip()
            prompts.append({"text": chat.prompt(question), "answer": answer})
        write_lines(args.out / f"{split}.jsonl", prompts)


if __name__ == "__main__":
    main()
