# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What differs between the releases of Megatron Core that this project runs with: 0.16 on Python
3.10 and 3.11, 0.19 on 3.12.

Each function looks at what is there rather than at the version, and says which release has what.
`docs/megatron_core.md` says how to move to the next release.
"""

import dataclasses
import functools
from typing import Any

from torch import Tensor


def parts_of(builder: Any) -> Any:
    """The submodules that a layer's specification has for one of its modules."""
    if isinstance(builder, functools.partial):  # 0.19
        return builder.keywords["submodules"]
    return builder.submodules  # 0.16: a `ModuleSpec`


def with_class(builder: Any, module: type) -> Any:
    """The specification `builder` of a module, for `module` in the place of its class."""
    if isinstance(builder, functools.partial):  # 0.19
        return functools.partial(module, *builder.args, **builder.keywords)
    return dataclasses.replace(builder, module=module)  # 0.16: a `ModuleSpec`


def take_balance_table() -> dict[str, Tensor]:
    """Read and empty Megatron Core's table of the losses that balance experts: sums by layer."""
    try:
        from megatron.core.transformer.moe import moe_logging  # 0.19
    except ImportError:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        tracker = get_moe_layer_wise_logging_tracker()
        table = {name: entry["values"] for name, entry in tracker.items()}
        tracker.clear()  # not zeroed: the next model may have more layers
        return table
    table = {
        name: entry.values for name, entry in moe_logging.get_moe_metrics_tracker().metrics.items()
    }
    moe_logging.destroy_moe_metrics_tracker()
    return table
