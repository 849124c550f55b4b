# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.servers.critic_client import (
    RemoteGPTRMCriticClient,
    RMCriticFutureResult,
    SaveFuture,
    TrainFuture,
)
from nemo_aligner.servers.futures import result_of_future as get_future_result
from nemo_aligner.servers.scoring_clients import RemoteGPTRMClient, RMFutureResult
