# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Writing Megatron Core distributed checkpoints in this process.

Megatron Core's own writer starts a manager process (which imports the user's script once more:
seconds) and forks workers (unsafe beside the threads of an inference server). The planning is
Megatron Core's; the files are written by PyTorch's synchronous writer. The format is the same
(`torch_dist`), and reading is Megatron Core's throughout.
"""

from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import torch as mcore_torch
from torch.distributed.checkpoint import FileSystemWriter


class _InProcessSave(mcore_torch.TorchDistSaveShardedStrategy):
    def save(self, sharded_state_dict, checkpoint_dir: Path) -> None:
        by_key, _flat_mapping, _rename_mapping = (
            mcore_torch._replace_state_dict_keys_with_sharded_keys(
                sharded_state_dict, self.keep_only_main_replica
            )
        )
        torch.distributed.checkpoint.save(
            mcore_torch.mcore_to_pyt_state_dict(by_key, False),
            storage_writer=FileSystemWriter(checkpoint_dir, single_file_per_rank=True),
            planner=mcore_torch.MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )


def save(sharded_state_dict: dict, folder) -> None:
    """Write a sharded state dict into the existing, empty `folder`; all ranks call it and share
    the file system.
    """
    dist_checkpointing.save(
        sharded_state_dict, str(folder), sharded_strategy=_InProcessSave("torch_dist", 1)
    )
