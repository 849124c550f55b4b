# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Training data that models write or label.

`annotation.py` asks a served reward model for the attributes of responses (SteerLM);
`constitutional.py` has a model criticize, revise and compare responses (constitutional AI), which
`chat_models.py` gets from the engine or a server. `command_line.py` is what the scripts in
examples/nlp/data and examples/nlp/cai share.
"""
