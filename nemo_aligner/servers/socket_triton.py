# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""PyTriton's Triton on a Unix socket alone. Imports PyTriton, so only rank 0 of a server does.

On a TCP port every user of the machine can speak to Triton, which runs the Python of any model
that it is told to load; PyTriton's token against that is on Triton's command line, for all to
read. A socket in a folder of mode 0700 needs none: only this user and the front can connect.
"""

import os

from pytriton.models.manager import ModelManager
from pytriton.triton import Triton, TritonConfig, TritonLifecyclePolicy, TritonSecurityConfig
from pytriton.utils.workspace import Workspace

# Triton's processes would else give their shared memory Python's names, which tell no owner.
_NAMES = """
import os
from multiprocessing import shared_memory
shared_memory._make_filename = lambda: "/{prefix}-" + os.urandom(4).hex()
"""


class SocketTriton(Triton):
    """Triton without a port. The models that are bound before it runs are all it ever loads.
    `directory`, of mode 0700 and with a path of at most 60 characters, holds the workspace, the
    socket and the log. `memory_prefix`: of the names of all shared memory.
    """

    def __init__(self, directory: str, memory_prefix: str):
        self._memory_prefix = memory_prefix
        self.socket_path = os.path.join(directory, "http")
        self.log_path = os.path.join(directory, "triton.log")
        super().__init__(
            config=TritonConfig(
                http_address=f"unix:{self.socket_path}",
                allow_grpc=False,
                allow_metrics=False,
                exit_timeout_secs=10,  # if this process is killed in the middle of a request
                log_file=self.log_path,
            ),
            workspace=os.path.join(directory, "w"),
            # Models in a folder start side by side; those added to a running Triton do not.
            triton_lifecycle_policy=TritonLifecyclePolicy(local_model_store=True),
            security_config=TritonSecurityConfig(restricted_endpoints=[]),  # and so no token
        )
        self._model_manager = _Models(self._url, self._workspace.model_store_path)

    def _prepare_triton_config(self, workspace: Workspace) -> None:
        """Have Triton refuse to load or unload models on request."""
        super()._prepare_triton_config(workspace)
        self._triton_server_config["model_control_mode"] = "none"
        self._triton_server_config["load_model"] = None

    def _shm_prefix(self) -> str:
        return self._memory_prefix

    def launch(self) -> None:
        for copy in self._workspace.model_store_path.glob("*/*/data.py"):
            with copy.open("a") as file:
                file.write(_NAMES.format(prefix=self._memory_prefix))
        self._run_server()

    def has_ended(self) -> bool:
        return not self._is_alive_impl()

    def connect(self) -> None:
        """Have the bound functions reply; PyTriton's own `connect` knows no sockets."""
        self._model_manager.setup_models()


class _Models(ModelManager):
    """The bound models; PyTriton's own would ask Triton, which has ended, to unload them."""

    def clean(self) -> None:
        for model in self.models:
            model.clean()
        self._models.clear()
