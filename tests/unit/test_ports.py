# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Free ports; test_front.py has one that is taken."""

import contextlib
import socket

from nemo_aligner.servers import ports


def test_a_free_port_is_none_that_an_outgoing_connection_may_take():
    first, last = map(int, open("/proc/sys/net/ipv4/ip_local_port_range").read().split())
    found = [ports.find_free_port() for _ in range(50)]
    assert not any(first <= port <= last for port in found) and len(set(found)) > 25


def test_a_free_port_is_found_although_others_are_taken(monkeypatch, tmp_path):
    """Only 40 ports below the range of outgoing connections, 39 of them in use: the last is found,
    then another.
    """
    (tmp_path / "range").write_text("10040\t60999\n")
    monkeypatch.setattr(ports, "_EPHEMERAL_RANGE", tmp_path / "range")
    with contextlib.ExitStack() as stack:

        def take(port):
            sock = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # somebody else has it
                sock.bind(("127.0.0.1", port))
                sock.listen()

        for port in {*range(10000, 10040)} - {10017}:
            take(port)
        assert ports.find_free_port() == 10017
        take(10017)
        assert ports.find_free_port() not in range(10000, 10040)
