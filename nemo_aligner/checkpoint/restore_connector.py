# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""NeMo-Aligner's connector: how `MegatronGPTModel.restore_from` reads a `.nemo`."""

from typing import Any

from nemo.core.connectors.save_restore_connector import SaveRestoreConnector


class CustomSaveRestoreConnector(SaveRestoreConnector):
    """Says which weights of a `.nemo` count.

        MegatronGPTRewardModel.restore_from(
            path, save_restore_connector=CustomSaveRestoreConnector(load_base_model_only=True)
        )

    Args:
        load_base_model_only: leave the head of a reward model at its initial values.
        replace_sharded_tensor_key: NeMo-Aligner's prefix of the weights of NeMo 2.0; the prefix is
            recognized from the file here.
    """

    def __init__(
        self,
        *args: Any,
        load_base_model_only: bool = False,
        replace_sharded_tensor_key: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.load_base_model_only = load_base_model_only
        self.replace_sharded_tensor_key = replace_sharded_tensor_key

    def restore_from(self, calling_cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        """`calling_cls.restore_from(...)` with this connector."""
        return calling_cls.restore_from(*args, **{**kwargs, "save_restore_connector": self})
