# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The front on uvicorn with the attributes that tests use of the front of Triton."""

from nemo_aligner.servers.asgi_host import AsgiHost
from nemo_aligner.servers.ports import find_free_port


class AsgiFront:
    """Serves `endpoints` from now on until `close`.

    Args:
        endpoints: each with the function that handles its requests.
        access: what is asked of the clients.
        port: to listen on; 0: a free one.
        tls: of a server that encrypts.
    """

    def __init__(self, endpoints, access, port=0, tls=None):
        self.address = "127.0.0.1", port or find_free_port()
        self.host = AsgiHost(*self.address, endpoints, access, tls)
        self.host.start(lambda: False)
        self.admission = self.host.admission

    def close(self):
        self.host.stop()
