# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding and padding of requests, Triton's needs, and the client's errors that need no
server.
"""

import contextlib
import json
import os
import re
import socket
import sysconfig
import threading
import time

import numpy as np
import pytest
import torch

from nemo_aligner.core.errors import UserError
from nemo_aligner.parallel import parallel_state
from nemo_aligner.servers import (
    http_communicator,
    ports,
    requests,
    triton_environment,
)
from nemo_aligner.servers.fingerprint import tokenizer_fingerprint
from nemo_aligner.servers.http_communicator import HTTPCommunicator, ServerUnreachableError


def test_decode_bytes_ndarray():
    array = np.array([["Grüße".encode()], [b"b"]], dtype=object)
    assert requests.decode_bytes_ndarray(array).tolist() == ["Grüße", "b"]


def test_the_fingerprint_of_a_hugging_face_tokenizer(
    tiny_tokenizer, tiny_tokenizer_dir, reversed_tokenizer_dir
):
    from nemo.collections.common.tokenizers import AutoTokenizer

    fingerprint = tokenizer_fingerprint(tiny_tokenizer)
    assert re.fullmatch(r"300 tokens, end 299, [0-9a-f]{12}", fingerprint)
    assert tokenizer_fingerprint(AutoTokenizer(tiny_tokenizer_dir)) == fingerprint
    other = AutoTokenizer(reversed_tokenizer_dir)
    assert other.text_to_tokens("the film") == tiny_tokenizer.text_to_tokens("the film")
    assert tokenizer_fingerprint(other)[:-12] == fingerprint[:-12]
    assert tokenizer_fingerprint(other) != fingerprint


def test_the_fingerprint_of_a_sentencepiece_tokenizer(tmp_path):
    """Another order of its pieces shows; that the same tokens come from a Hugging Face tokenizer
    does not.
    """
    from nemo.collections.common.tokenizers import AutoTokenizer, SentencePieceTokenizer
    from sentencepiece import SentencePieceTrainer
    from tokenizers import Tokenizer, models

    for name, symbols in (("a.model", ["<user>", "<bot>"]), ("b.model", ["<bot>", "<user>"])):
        with open(tmp_path / name, "wb") as file:
            texts = iter(["the film was a joy from the first scene to the last"])
            SentencePieceTrainer.train(
                sentence_iterator=texts,
                model_writer=file,
                vocab_size=40,
                model_type="bpe",
                user_defined_symbols=symbols,
            )
    tokenizer = SentencePieceTokenizer(str(tmp_path / "a.model"))
    fingerprint = tokenizer_fingerprint(tokenizer)
    assert re.fullmatch(rf"{tokenizer.vocab_size} tokens, end 2, [0-9a-f]{{12}}", fingerprint)
    again = SentencePieceTokenizer(str(tmp_path / "a.model"))
    assert tokenizer_fingerprint(again) == fingerprint
    swapped = tokenizer_fingerprint(SentencePieceTokenizer(str(tmp_path / "b.model")))
    assert swapped[:-12] == fingerprint[:-12] and swapped != fingerprint

    pieces = tokenizer.ids_to_tokens(range(tokenizer.vocab_size))
    words = Tokenizer(
        models.WordLevel({piece: id_ for id_, piece in enumerate(pieces)}, unk_token="<unk>")
    )
    words.save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert tokenizer_fingerprint(AutoTokenizer(str(tmp_path))) == fingerprint


def test_what_cannot_list_its_tokens_has_no_fingerprint():
    assert tokenizer_fingerprint(None) is None
    assert tokenizer_fingerprint(type("Tokenizer", (), {"vocab_size": 9})) is None


def test_lock_method_serialises_callers():
    class Counter:
        def __init__(self):
            self.lock = threading.Lock()
            self.inside = self.most = 0

        @requests.lock_method("self.lock")
        def enter(self):
            self.inside += 1
            self.most = max(self.most, self.inside)
            time.sleep(0.01)
            self.inside -= 1

    counter = Counter()
    threads = [threading.Thread(target=counter.enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.most == 1


def test_pad_input():
    assert requests.pad_input(np.array([[1, 2], [3, 4], [5, 6]]), 2, pad_value=9) == (
        [[1, 2], [3, 4], [5, 6], [9, 9]],
        1,
    )
    assert requests.pad_input([7], 3) == ([7, 0, 0], 2)
    assert requests.pad_input(["a", "b"], 2, "") == (["a", "b"], 0)
    assert requests.pad_input(None, 4) == (None, 0)


@pytest.mark.parametrize(
    "rows, dp, expected", [(3, 2, 2), (8, 2, 2), (9, 2, 8), (1, 1, 1), (5, 1, 4)]
)
def test_padding_multiple(monkeypatch, rows, dp, expected):
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: dp)
    assert requests.calculate_inference_batch_padding_multiple(rows, 4) == expected


def test_process_inputs_prefers_sentences():
    inputs = {
        "sentences": np.array([[b"ab"]]),
        "tokens": np.array([[9]]),
        "sequence_lengths": np.array([[1]]),
    }
    out = requests.process_inputs(inputs, lambda texts: (torch.tensor([[len(texts[0]), 0]]), [1]))
    assert out["inputs"].tolist() == [[2, 0]] and out["sequence_length"].tolist() == [1]
    del inputs["sentences"]
    out = requests.process_inputs(inputs, None)
    assert out["inputs"].tolist() == [[9]] and out["sequence_length"].tolist() == [1]
    with pytest.raises(UserError, match="'sequence_lengths' is missing"):
        requests.process_inputs({"tokens": np.array([[9]])}, None)
    for bad, message in (
        ([[b"a", b"b"]], r"'sentences' has shape \[1, 2\]"),
        ([[b"a"], [b"\xff"]], "in row 1 that are not UTF-8"),
    ):
        with pytest.raises(UserError, match=message):
            requests.process_inputs({"sentences": np.array(bad)}, None)


@pytest.mark.parametrize("strip, width", [(None, 8), (4, 4), (3, 3), (16, 8)])
def test_pad_batch_and_strip_sequence(strip, width):
    tokens = np.arange(24).reshape(3, 8)
    out, added, old_width = requests.pad_batch_and_strip_sequence(
        tokens, np.array([3, 2, 1]), 4, strip
    )
    assert out["inputs"].shape == (4, width) and added == 1 and old_width == 8
    assert (out["inputs"][:3] == tokens[:, :width]).all() and (out["inputs"][3] == 0).all()
    assert out["sequence_length"].tolist() == [3, 2, 1, 0]


def test_triton_environment_gets_the_library_path_once(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    triton_environment.prepare_triton_environment()
    triton_environment.prepare_triton_environment()
    paths = os.environ["LD_LIBRARY_PATH"].split(":")
    assert paths == [triton_environment.find_libpython(), "/somewhere"]
    assert os.path.exists(os.path.join(paths[0], sysconfig.get_config_var("INSTSONAME")))


def test_triton_environment_refuses_numpy_2(monkeypatch):
    monkeypatch.setattr(np, "__version__", "2.1.0")
    with pytest.raises(UserError, match="numpy 2.1.0.*pip install 'numpy<2'"):
        triton_environment.prepare_triton_environment()


def test_triton_environment_refuses_a_python_without_shared_library(monkeypatch):
    monkeypatch.setattr(triton_environment, "find_libpython", lambda: None)
    with pytest.raises(UserError, match="libpython.*--enable-shared"):
        triton_environment.prepare_triton_environment()


def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port}.*trainer.ppo.port"):
            ports.check_port_is_free("127.0.0.1", port)
    ports.check_port_is_free("127.0.0.1", port)


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
        taken = set()
        for port in range(10000, 10040):
            sock = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                if port != 10017:
                    sock.bind(("127.0.0.1", port))
                    sock.listen()
            taken.add(port)
        assert ports.find_free_port() == 10017
        last = stack.enter_context(socket.socket())
        last.bind(("127.0.0.1", 10017))
        last.listen()
        assert ports.find_free_port() not in taken


def test_wrong_port_is_one_clear_error_in_time(monkeypatch):
    lines = []
    monkeypatch.setattr(http_communicator.logging, "info", lines.append)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    communicator = HTTPCommunicator(init_timeout_s=2.5, progress_interval_s=0.5)
    start = time.monotonic()
    with pytest.raises(ServerUnreachableError) as caught:
        communicator.create_http_communicator_from_dict({"critic_infer": ("127.0.0.1", port)})
    assert time.monotonic() - start < 30  # the default is much longer
    assert isinstance(caught.value, UserError)
    for word in ("critic_infer", f"127.0.0.1:{port}", "2 s", "remote_critic_rm.init_timeout_s"):
        assert word in str(caught.value)
    assert len(lines) >= 3 and all(
        f"127.0.0.1:{port}" in line and "critic_infer" in line for line in lines
    )


def test_closing_says_so(monkeypatch):
    lines = []
    monkeypatch.setattr(http_communicator.logging, "info", lines.append)
    with HTTPCommunicator():
        pass
    assert any("Cleaning up communicator" in line for line in lines)
