# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.servers.scoring_clients import NoCriticFuture as NothingToDo
from nemo_aligner.servers.scoring_clients import RewardsInPlaceOfCritic
from nemo_aligner.servers.scoring_clients import RMFutureResult as RewardsWithoutValues
