# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens, and the addresses that need one."""

import pytest

from nemo_aligner.config.access import (
    REWARD_TOKEN_VARIABLE,
    TOKEN_VARIABLE,
    is_loopback,
    read_token,
    server_token,
)
from nemo_aligner.core.errors import ConfigError
from tests.cases import says

TOKEN = "0123456789abcdef-0123456789"


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


def write(path, text=TOKEN, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_file_wins_over_the_environment(tmp_path, monkeypatch):
    assert read_token(None, "inference") is None
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert read_token(None, "inference") == TOKEN
    other = write(tmp_path / "token", "x" * 16 + "\n")
    assert read_token(other, "inference") == "x" * 16


@pytest.mark.parametrize(
    "text, mode, words",
    [
        (TOKEN, 0o644, ["mode 0644", "chmod 600"]),
        (TOKEN, 0o620, ["mode 0620"]),
        ("short", 0o600, ["5 characters", "16 to 512"]),
        ("with a space in between", 0o600, ["no token"]),
        ("", 0o600, ["0 characters"]),
        ("ä" * 20, 0o600, ["no token"]),
    ],
)
def test_files_that_are_refused(tmp_path, text, mode, words):
    path = write(tmp_path / "token", text, mode)
    with pytest.raises(ConfigError) as caught:
        read_token(path, "trainer.ppo")
    for word in [*words, f"trainer.ppo.token_file={path}"]:
        assert word in str(caught.value)
    assert text not in str(caught.value).replace(path, "") or not text


def test_servers_of_others_have_tokens_of_any_length(tmp_path):
    for text in ("short", "x" * 2000):
        path = write(tmp_path / "token", text)
        assert read_token(path, "trainer.ppo", "k", REWARD_TOKEN_VARIABLE) == text
    with pytest.raises(ConfigError, match=r"0 characters .* spaces\.$"):
        read_token(write(tmp_path / "token", ""), "trainer.ppo", "k", REWARD_TOKEN_VARIABLE)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="remote_rm.token_file=.*No such file"):
        read_token(str(tmp_path / "missing"), "remote_rm")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1"])
def test_this_machine_alone_needs_no_token(host):
    assert is_loopback(host)
    assert server_token(host, None, "trainer.ppo") is None


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "10.1.2.3", "no-such-host.invalid"])
def test_other_addresses_need_a_token(host, monkeypatch):
    with says(ConfigError, f"trainer.ppo.host={host} ", TOKEN_VARIABLE, "trainer.ppo.token_file"):
        server_token(host, None, "trainer.ppo")
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert server_token(host, None, "trainer.ppo") == TOKEN
