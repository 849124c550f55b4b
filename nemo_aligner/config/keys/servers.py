# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Keys of servers."""

from dataclasses import dataclass
from typing import Any

from nemo_aligner.config.fields import LARGEST_PORT, key


@dataclass
class Server:
    """What takes requests.

    Attributes:
        frontend: **new**: what takes the requests. `triton`: Triton, behind a front of this
            package. `asgi`: uvicorn, without PyTriton; needs `pip install
            'nemo-aligner-mcore[asgi]'` ([jobs.md](jobs.md#servers-without-triton))
        tls_certificate, tls_key: **new**: with `asgi`, PEM files of the certificate and the key
            with which the server encrypts; the key may be readable by you alone, and has no
            password. null: plain HTTP
    """

    frontend: str | None = key("triton")
    tls_certificate: str | None = key(None)
    tls_key: str | None = key(None)


@dataclass
class Listening:
    """Where a server listens, and for whom.

    Attributes:
        host: **new**: address to listen on. `127.0.0.1` serves this machine alone; any other
            address needs a token. NeMo-Aligner: all addresses
        port: port to listen on
        token_file: **new**: file with the token that every request must bring, readable by you
            alone; null: the environment variable `NEMO_ALIGNER_TOKEN`, and without it no token
            ([jobs.md](jobs.md))
        max_request_mb: **new**: largest body of a request, in MiB, 64 to 2047. Our clients send
            larger batches in several requests; NeMo-Aligner's do not
        max_queue_delay_microseconds: how long Triton holds a request back for others that it
            hands over with it; each is scored by itself, so waiting brings nothing (NeMo-Aligner:
            2000)
        inference_micro_batch_size: samples per data-parallel rank that end the wait, an int or a
            list
        strip_sequence_length_to_multiple: cut padding that no sample uses, down to a multiple of
            this
    """

    host: str = key("127.0.0.1")
    port: int = key(5556, at_least=1, at_most=LARGEST_PORT)
    token_file: str | None = key(None)
    max_request_mb: float | None = key(64, at_least=64, at_most=2047)
    max_queue_delay_microseconds: float = key(0, at_least=0)
    inference_micro_batch_size: Any = key("${model.forward_micro_batch_size}", required=True)
    strip_sequence_length_to_multiple: int | None = key(None, at_least=1)


@dataclass
class Inference(Listening):
    """A server of one endpoint.

    Attributes:
        model_name: name of the endpoint
    """

    model_name: str = key("reward_model")
