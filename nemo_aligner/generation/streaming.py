# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The text of a response while its tokens come."""

import os

from nemo_aligner.core.tokenizer import Tokenizer, response_text

_INCOMPLETE = "\ufffd"  # what the bytes of half a character decode to


class TextStream:
    """Cuts the text of a growing response into pieces that can be shown at once.

    Joined, the pieces are `response_text` of all tokens. A token alone does not decode to its part
    of the text (a character may take several tokens; SentencePiece drops the space before the
    first one, and some tokenizers those at the end), so all tokens are decoded each time, and what
    may still change is held back.

    Args:
        tokenizer: NeMo tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.shown = ""

    def push(self, token: int) -> str:
        """The text that can be shown once `token` has come; may be empty."""
        self.ids.append(token)
        return self._advance(response_text(self.tokenizer, self.ids).rstrip(_INCOMPLETE))

    def finish(self) -> str:
        """The rest of the text."""
        text = response_text(self.tokenizer, self.ids)
        # A tokenizer that changed its mind about what is shown: what follows the common part.
        self.shown = os.path.commonprefix([self.shown, text])
        return self._advance(text)

    def _advance(self, text: str) -> str:
        if not text.startswith(self.shown):  # the end of the text is not settled yet
            return ""
        piece, self.shown = text[len(self.shown) :], text
        return piece
