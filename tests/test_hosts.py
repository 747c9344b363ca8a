"""Host names and origins, as browsers send them and in forged forms."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from nanovllm.config import ConfigError, load_config
from nanovllm.hosts import host_of, is_loopback, is_loopback_origin, origin_of, setting


@pytest.mark.parametrize(
    ("authority", "host"),
    [
        ("localhost", "localhost"),
        ("LocalHost:8000", "localhost"),
        ("localhost.:8000", "localhost"),
        ("localhost:", "localhost"),
        ("127.0.0.1:80", "127.0.0.1"),
        ("[::1]:8000", "::1"),
        ("[2001:DB8::1]", "2001:db8::1"),
        ("my_box-2.example:1", "my_box-2.example"),
        ("", None),
        ("::1", None),
        ("a b", None),
        ("user@localhost", None),
        ("localhost/x", None),
        ("localhost:evil", None),
        ("$(reboot).evil.test", None),
        ("localhost\n", None),
        ("b\xfccher.example", None),
    ],
)
def test_the_host_of_an_authority(authority, host) -> None:
    assert host_of(authority) == host


def test_what_only_this_machine_reaches() -> None:
    for host in ("localhost", "LOCALHOST", "127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"):
        assert is_loopback(host), host
    for host in ("0.0.0.0", "::", "10.0.0.5", "localhost.evil.test", "127.evil.test", "a", ""):
        assert not is_loopback(host), host


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("https://Chat.Example", "https://chat.example"),
        ("https://chat.example:443", "https://chat.example"),
        ("http://chat.example:80", "http://chat.example"),
        ("http://chat.example:443", "http://chat.example:443"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
        ("file://", "file://"),
        ("null", "null"),
        ("", None),
        ("chat.example", None),
        ("https://chat.example/", None),
        ("https://user@chat.example", None),
        ("https://a b", None),
        ("https://$(reboot).evil.test", None),
        ("https://chat.example\r\nX: y", None),
    ],
)
def test_an_origin_has_one_form(text, origin) -> None:
    assert origin_of(text) == origin


def test_origins_of_this_machine() -> None:
    for text in ("http://localhost:3000", "https://localhost", "http://127.0.0.1:5173",
                 "http://[::1]:80"):  # fmt: skip
        assert is_loopback_origin(text), text
    for text in ("null", "file://", "http://localhost.evil.test", "http://evil.test:8000",
                 "http://127.0.0.1.evil.test", "https://10.0.0.5", "data://localhost"):  # fmt: skip
        assert not is_loopback_origin(text), text


@pytest.mark.parametrize(
    "origins",
    [["https://a.example"], ["http://a:3000", "https://b.example"], ["null"],
     ["*", "https://a.example"], ["http://[2001:db8::1]:3000"], ["file://"]],
)  # fmt: skip
def test_the_line_that_a_refusal_names_sets_just_that(origins) -> None:
    flag, value = shlex.split(setting("server.allowed_origins", origins))
    assert flag == "--set"
    assert load_config(None, [value]).recipe.server.allowed_origins == origins


def test_no_shell_expands_the_line_that_a_refusal_names() -> None:
    """zsh refuses a word with unquoted brackets that matches no file."""
    assert setting("server.allowed_hosts", ["a", "b"]) == "--set 'server.allowed_hosts=[a,b]'"
    assert setting("server.allowed_origins", ["*"]) == """--set server.allowed_origins='["*"]'"""


def test_documents_name_settings_that_a_shell_and_yaml_read() -> None:
    found = []
    for name in ("README.md", "recipes/README.md", "nanovllm/server/README.md"):
        text = (Path(__file__).parents[1] / name).read_text()
        found += re.findall(r"--set 'server\.allowed_origins=[^']*\]'", text)
    values = [shlex.split(line)[1] for line in found]
    origins = [load_config(None, [value]).recipe.server.allowed_origins for value in values]
    assert ["*"] in origins and ["https://a.example"] in origins


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("allowed_origins=[chat.example]", "server.allowed_origins has 'chat.example'"),
        ("allowed_origins=[https://a.example/x]", "'https://a.example/x'; an origin is a scheme"),
        ("allowed_origins=['https://*.example']", r"has 'https://\*.example'"),
        ("allowed_origins=https://a.example", r'it must be a list of text, as in \["a", "b"\]'),
        ("allowed_origins=[7]", "must be a list of text"),
        ("allowed_origins=['']", "server.allowed_origins has ''"),
        ("allowed_hosts=['http://box']", "server.allowed_hosts has 'http://box'; write a name"),
        ("allowed_hosts=['box:8000']", "'box:8000'; write a name without scheme and port"),
        ("allowed_hosts=['*']", r"server.allowed_hosts has '\*'"),
    ],
)
def test_a_value_that_no_request_could_match_is_an_error(line, said) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(None, [f"server.{line}"])


def test_values_as_they_are_copied_from_an_address_bar() -> None:
    copied = ["server.allowed_origins=[https://Chat.example/]", "server.allowed_hosts=[Box.local.]"]
    server = load_config(None, copied).recipe.server
    assert server.allowed_origins == ["https://Chat.example/"]
    assert load_config(None).recipe.server.allowed_origins == []
