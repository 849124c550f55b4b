# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Who may use a server: addresses of this machine alone, and the token that others need; and by
what a server proves to its clients that it is the right one.

A token comes from a file that only its user can read, or from the environment, which other users
cannot read either. It is never an argument: every user of a machine can read command lines.
"""

import ipaddress
import os
import re
import socket
import ssl
import stat
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from nemo_aligner.core.errors import ConfigError

TOKEN_VARIABLE = "NEMO_ALIGNER_TOKEN"
REWARD_TOKEN_VARIABLE = "NEMO_ALIGNER_REWARD_TOKEN"  # for web servers, which may be of others
_TOKEN = re.compile(r"[!-~]+")  # printable ASCII without spaces, as HTTP headers take it
MAKE_A_TOKEN = f"export {TOKEN_VARIABLE}=$(python -c 'import secrets; print(secrets.token_hex())')"


def read_token(
    token_file: str | None, setting: str, key: str = "token_file", variable: str = TOKEN_VARIABLE
) -> str | None:
    """The token in `token_file`, else that in the environment; None without either. `setting` and
    `key` are the section of the configuration and the key that hold `token_file`. `ConfigError`:
    the file cannot be read, others can read it too, or its text is no token.
    """
    if token_file is None:
        token, source = os.environ.get(variable), variable
        if token is None:
            return None
    else:
        source = f"{setting}.{key}={token_file}"
        if not isinstance(token_file, str):  # a number would be a file that is open already
            raise ConfigError(f"{source} is no path.")
        try:
            with open(token_file) as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                token = file.read(8193).strip()
        except (OSError, ValueError) as error:  # a ValueError: no UTF-8, or a path with a null
            raise ConfigError(f"{source} cannot be read: {error}") from error
        _check_private(mode, source, token_file, "token")
    is_own = variable == TOKEN_VARIABLE  # others choose the tokens of their servers
    least, most = (16, 512) if is_own else (1, 8192)
    if not _TOKEN.fullmatch(token) or not least <= len(token) <= most:
        raise ConfigError(
            f"{source} holds {len(token)} characters that are no token: give {least} to {most} "
            f"printable ones without spaces{f', as by {MAKE_A_TOKEN}' if is_own else ''}."
        )
    return token


def server_token(host: str, token_file: str | None, setting: str) -> str | None:
    """The token that a server which listens on `host` asks for, if any. `ConfigError`: other
    machines can reach `host`, and there is no token; or see `read_token`.
    """
    if host is not None and not isinstance(host, str):
        raise ConfigError(f"{setting}.host={host!r} is no name or address.")
    token = read_token(token_file, setting)
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"{setting}.host={host} lets other machines use this server, so it needs a token: set "
            f"{TOKEN_VARIABLE} for the server and its clients ({MAKE_A_TOKEN}) or "
            f"{setting}.token_file; or set {setting}.host=127.0.0.1."
        )
    return token


def server_tls(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """Return the context of a server that encrypts, with these two files; None without them."""
    if certificate is None and key is None:
        return None
    files = f"server.tls_certificate={certificate} and server.tls_key={key}"
    if certificate is None or key is None:
        raise ConfigError(f"{files} belong together; set both, or none.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        mode = stat.S_IMODE(os.stat(key).st_mode)
        # The empty password has a key that is locked by one refused, instead of a prompt for it.
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"{files} cannot be used: {error}. They must be PEM files: the server's certificate, "
            "followed by those that signed it, and its key without a password."
        ) from error
    _check_private(mode, f"server.tls_key={key}", key, "key")
    return context


def _check_private(mode: int, source: str, path: str, secret: str) -> None:
    if mode & 0o077:
        raise ConfigError(
            f"{source} has mode {mode:04o}, so that other users can read or change it; run "
            f"chmod 600 {path}, and use a new {secret}."
        )


def client_tls(
    ca_file: str | None, setting: str, key: str = "tls_ca_file"
) -> ssl.SSLContext | None:
    """Return the context of a client that trusts the certificates in `ca_file`; None: no TLS."""
    if ca_file is None:
        return None
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ConfigError(
            f"{setting}.{key}={ca_file} cannot be used: {error}. It must be a PEM file."
        ) from error


# A password may hold an `@`, or a `/` that should have been escaped.
_USER_OF_URL = re.compile(r"(?<=://)([^/?#\s'\"@:]*:(?!\d+[/?#])[^\s'\",]*|[^/?#\s'\"]*)@")
_QUERY_OF_URL = re.compile(r"(://[^?\s'\"]*\?)[^\s'\"\],}]*")
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^A-Za-z0-9]+")
_USE = "(access|api|auth|bearer|encryption|hf|hub|private|refresh|secret|session|signing|wandb)"
_SECRET = re.compile(  # words with `_` between them
    rf"(^|.*_)({_USE}_?(key|token)s?|passw(or)?ds?|pwds?|passphrases?|secrets?|credentials?|creds|"
    r"cookies?|auth|authorization|(?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)(?<!sep_)(?<!cls_)"
    r"(?<!mask_)(?<!image_)(?<!end_)(?<!stop_)token)|_?tokens"
)


def shown_url(text: str) -> str:
    """`text` as a log or a page may have it: without user, password and query of URLs in it."""
    return _QUERY_OF_URL.sub(r"\1***", _USER_OF_URL.sub("***@", text))


def _is_secret(name: str) -> bool:
    """Whether a key of this name, `SECTION.KEY` too, holds a secret (`hfToken`)."""
    parts = name.split(".")
    return any(_SECRET.fullmatch(_WORDS.sub("_", part).lower()) for part in parts)


def shown_word(word: str) -> str:
    """A word of a command line, `KEY=VALUE`, as `shown_config` has the value that Hydra reads."""
    key, sign, text = word.partition("=")
    if not sign:
        return shown_url(word)
    value: Any = text
    try:
        read = OverridesParser.create().parse_override(word)
        is_read = not read.is_sweep_override()
        value = read.value() if is_read else text
    except HydraException:
        is_read = False
    shown = shown_config({key: value})[key]
    if not is_read and any(map(_is_secret, re.findall(r"[\w-]+", text))):
        shown = "***"
    if shown == value:
        return word
    if not isinstance(shown, str):
        shown = yaml.safe_dump(shown, default_flow_style=True, sort_keys=False, width=10**6)
    return f"{key}={shown.strip()}"


def is_web_address(url: str) -> bool:
    """Whether a request can go to `url`, which holds no user or password."""
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port
        return False
    return is_one and parts.username is None


def shown_config(tree: Any) -> Any:
    """A plain tree as a log may have it: no values of secret keys, URLs as in `shown_url`."""
    if isinstance(tree, Mapping):
        return {
            key: "***"
            if value and value is not True and _is_secret(str(key))
            else shown_config(value)
            for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [shown_config(value) for value in tree]
    return shown_url(tree) if isinstance(tree, str) else tree


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is reached from this machine alone."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host or "0.0.0.0", None)}
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in addresses)
