"""Which file an account has, and what a token tells without being believed."""

from pathlib import Path

import pytest

from qim.client import AuthError, Target
from qim.client.account import (
    Endpoint,
    Secret,
    client_message_id,
    parse_endpoint,
    read_account,
    store_path,
)
from qim.ids import DeviceId
from tests.unit.client.fake_server import ME, OTHER, TENANT, build_token

DATA = Path("/data")


def path_of(endpoint: str, token: str) -> Path:
    return store_path(DATA, parse_endpoint(endpoint), read_account(Secret(token)))


@pytest.mark.shows("K7")
@pytest.mark.parametrize(
    "same", ["chat.example", "CHAT.Example:7443", "qim://chat.example.:7443/", " chat.example:7443 "]
)
def test_one_server_written_in_several_ways_is_one_scope(same: str) -> None:
    assert path_of(same, build_token()) == path_of("chat.example:7443", build_token())


def test_the_newline_that_a_shell_puts_behind_a_token_is_not_sent() -> None:
    assert Secret(f"{build_token()}\n").reveal() == build_token()


@pytest.mark.shows("K7")
def test_another_server_tenant_or_user_is_another_file() -> None:
    paths = {
        path_of("a.example", build_token()),
        path_of("b.example", build_token()),
        path_of("a.example:7444", build_token()),
        path_of("a.example", build_token(tenant=8)),
        path_of("a.example", build_token(OTHER)),
    }
    assert len(paths) == 5


@pytest.mark.shows("K7")
def test_the_path_is_scope_tenant_and_user_and_nothing_of_the_token() -> None:
    token = build_token()
    path = path_of("a.example", token)
    scope, tenant, name = path.relative_to(DATA).parts
    assert (len(scope), int(scope, 16) >= 0, tenant, name) == (16, True, str(TENANT), f"{ME.hex()}.db")
    assert path == path_of("a.example", token.replace("SECRETSIGNATURE", "RENEWED"))
    assert not [part for part in token.split(".") if part in str(path)]


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("[::1]:9", Endpoint("::1", 9)),
        ("[0:0:0::1]", Endpoint("::1", 7443)),
        ("::1", Endpoint("::1", 7443)),
        ("10.0.0.1:80", Endpoint("10.0.0.1", 80)),
    ],
)
def test_addresses_take_their_shortest_form(text: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(text) == endpoint
    assert parse_endpoint(endpoint.canonical()) == endpoint


@pytest.mark.parametrize(
    "text", ["", ":1", "host:0", "host:65536", "host:x", "[::1", "a b", "u@host", "http://x/y"]
)
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_endpoint(text)


@pytest.mark.parametrize("token", ["", "a.b", "a.%%%.c", "a.e30.c", build_token(tenant=-1), "x" * 9_000])
def test_what_is_no_token_is_refused_without_repeating_it(token: str) -> None:
    with pytest.raises(AuthError) as raised:
        read_account(Secret(token))
    assert raised.value.__cause__ is None
    assert not token or token not in str(raised.value)


def test_a_secret_hides_itself_and_a_bound_device_is_read() -> None:
    assert "abc" not in repr(Secret("abc"))
    assert read_account(Secret(build_token(device=b"d" * 16))).bound_device == b"d" * 16
    assert read_account(Secret(build_token())).bound_device is None


@pytest.mark.shows("K6")
def test_an_identity_depends_on_the_device_and_the_ordinal() -> None:
    one, two = DeviceId(b"1" * 16), DeviceId(b"2" * 16)
    assert client_message_id(one, 7) == client_message_id(one, 7)
    assert len({client_message_id(one, 7), client_message_id(one, 8), client_message_id(two, 7)}) == 3
    assert len(client_message_id(one, 2**63)) == 16


def test_a_target_accepts_both_forms_of_an_id() -> None:
    assert Target.user(ME.hex()) == Target.user(ME) == Target(1, ME)
    for wrong in ("zz", b"short"):
        with pytest.raises(ValueError):
            Target.user(wrong)
