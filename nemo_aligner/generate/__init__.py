# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Text from a trained policy, in the terminal or to a file: `nemo-aligner generate`.

`settings.py` composes the configuration, `policy.py` loads the policy, `batch.py` responds to a
file of prompts, `responses.py` is that file's form, `terminal.py` is the conversation.
"""
