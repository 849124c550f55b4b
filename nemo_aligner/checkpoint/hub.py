# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Models by their names on the Hugging Face Hub."""

import re
from pathlib import Path

from nemo_aligner.core.errors import UserError

HUB = "hf://"  # before a name: the model may be downloaded
_NAME = re.compile(r"(hf:/{1,2})?([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")  # a Path has one slash
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def folder_of(path: str, key: str) -> Path | None:
    """The folder in the local cache for `ORGANISATION/MODEL[@REVISION]`, the value of `key`; None:
    `path` is no such name. With `hf://` before it, the model is downloaded first.

    Raises:
        UserError: it is not in the cache, or cannot be downloaded.
    """
    match = _NAME.fullmatch(path)
    if match is None or path.endswith(".nemo"):
        return None
    scheme, name, revision = match.groups()
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=_FILES,
                ignore_patterns="consolidated*",  # the same weights again
                local_files_only=scheme is None,
            )
        )
    except Exception as error:  # of the network, the Hub or its licences, in many classes
        if scheme is None:
            command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
            raise UserError(
                f"{key}={path} does not exist, and no model of this name is in the local Hugging "
                f"Face cache; give a path, run `{command}`, or write {HUB}{path}."
            ) from None
        first = str(error.__cause__ or error).partition("\n")[0]
        raise UserError(f"{key}={path} cannot be downloaded: {first}") from error
