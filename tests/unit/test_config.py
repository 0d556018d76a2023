"""The configuration: layers, origins, and one clear line for every mistake.

Each mistake is checked for its place (file and line, variable or flag), its key and what is allowed instead,
and for not repeating what was written, because a secret may stand in the wrong place.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

from qim import config_checks
from qim.config import SECTIONS, Config, Secret, describe, load_config
from qim.config_sources import KEYS, changes_for_restart, lines_of_keys
from qim.errors import ConfigError
from workers.reload import Reload

CANARY = "canary-hunter2"


def _problems(path: Path | None, **layers: Mapping[str, object]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, **layers)  # type: ignore[arg-type]  # the layers of a case
    return list(caught.value.problems)


def _write(folder: Path, text: str) -> Path:
    path = folder / "qim.toml"
    path.write_text(text)
    return path


def test_no_file_gives_the_defaults() -> None:
    config = load_config(None)
    assert config == Config()
    assert config.mailbox_urls == config.redis.core
    assert config.log_url == config.redis.core[0]


def test_a_tree_is_frozen_and_holds_plain_values() -> None:
    config = load_config(None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.gateway.port = 1  # type: ignore[misc]  # a frozen tree must refuse it
    assert all(not hasattr(getattr(config, section), "__dict__") for section in SECTIONS)


def test_first_layer_wins_and_each_key_knows_its_origin(tmp_path: Path) -> None:
    path = _write(tmp_path, "[gateway]\nport = 2\nbacklog = 2\nconnections_max = 2\n")
    config = load_config(
        path,
        profile={"gateway.port": 4, "gateway.connections_max": 4, "server.pin": False},
        profile_name="2c",
        overrides={"gateway.port": 1, "server.workers": None},
        environ={"QIM__GATEWAY__BACKLOG": "3", "HOME": "/"},
    )
    assert (config.gateway.port, config.gateway.backlog, config.gateway.connections_max) == (1, 3, 2)
    origins = {key: origin for key, _value, origin in describe(config)}
    assert origins["gateway.port"] == "command line"
    assert origins["gateway.backlog"] == "QIM__GATEWAY__BACKLOG"
    assert origins["gateway.connections_max"] == f"{path}:4"
    assert origins["server.pin"] == "profile 2c"
    assert origins["server.workers"] == "default"


def test_lists_and_tables_come_from_file_and_environment(tmp_path: Path) -> None:
    path = _write(tmp_path, '[auth.keys]\nfirst = "/a.pem"\n[redis]\ncore = [\n  "unix:///a.sock",\n]\n')
    environ = {"QIM__AUTH__KEYS__Second": "/b.pem", "QIM__REDIS__MAILBOX": "unix:///b.sock, redis://h:6380"}
    config = load_config(path, environ=environ)
    assert config.auth.keys == {"first": "/a.pem", "Second": "/b.pem"}
    assert config.redis.core == ("unix:///a.sock",)
    assert config.mailbox_urls == ("unix:///b.sock", "redis://h:6380")
    assert config.log_url == "unix:///a.sock"
    rows = {key: (value, origin) for key, value, origin in describe(config)}
    assert rows["redis.mailbox"][0] == "unix:///b.sock, redis://h:6380"
    assert rows["auth.keys"][1].endswith("QIM__AUTH__KEYS__Second") or "qim.toml:1" in rows["auth.keys"][1]


def test_all_problems_come_at_once_with_file_line_key_and_what_is_allowed(tmp_path: Path) -> None:
    path = _write(
        tmp_path,
        '[server]\ndeployment = "No Name"\nworker = 3\n\n[gateway]\nport = 99999\n[gatway]\nx = 1\n',
    )
    environ = {"QIM__GATEWY__PORT": "1", "QIM__GATEWAY__BACKLOG": "many"}
    problems = _problems(path, environ=environ, overrides={"log.level": "loud"})
    text = "\n".join(problems)
    assert f"{path}:2: server.deployment: not a name; allowed: 1 to 64 of a-z, 0-9 and -" in problems
    assert f"{path}:3: server.worker: there is no such key, did you mean workers?" in text
    assert f"{path}:6: gateway.port: not allowed; allowed: a whole number from 0 to 65535" in problems
    assert f"{path}:8: gatway.x: there is no section [gatway], did you mean gateway?" in text
    assert "QIM__GATEWY__PORT: gatewy.port: there is no section [gatewy], did you mean gateway?" in text
    assert (
        "QIM__GATEWAY__BACKLOG: gateway.backlog: not allowed; allowed: a whole number from 1 to 65535"
        in problems
    )
    assert any(
        line.startswith('command line: log.level: not allowed; allowed: "debug" or') for line in problems
    )
    assert len(problems) == 7


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[server\nx = "canary-hunter2"', ":1: not valid TOML"),
        ("[gateway]\nport = \n", ":2: not valid TOML"),
        ("gateway = 5\n", ":1: gateway: is a section, write [gateway] and its keys below it"),
        ("[server]\nworkers = 65\n", ':2: server.workers: not allowed; allowed: "auto" or 1 to 64'),
        ('[server]\nruntime_dir = "run"\n', ":2: server.runtime_dir: not an absolute path"),
        (f'[server]\nruntime_dir = "/{"x" * 80}"\n', ":2: server.runtime_dir: too long"),
        ("[server]\ncpus = [1, 1]\n", ":2: server.cpus: the same CPU twice"),
        ("[server]\nworkers = 2\ncpus = [1]\n", ":3: server.cpus: fewer CPUs than server.workers"),
        ('[gateway]\naddress = "example"\n', ":2: gateway.address: not an address"),
        (
            "[gateway]\nsilence_ms_max = 25000\n",
            ":2: gateway.silence_ms_max: must exceed gateway.ping_interval_ms",
        ),
        ("[limits]\nsends_burst = 1\n", ":2: limits.sends_burst: must be at least limits.sends_per_second"),
        ('[tls]\ncertificate_file = "x"\n', ":2: tls.certificate_file: not an absolute path"),
        ('[tls]\nkey_file = "x"\n', ":2: tls.key_file: not a path"),
        ('[auth]\naudience = ""\n', ":2: auth.audience: too short or too long"),
        ('[auth]\nkeys = "x"\n', ":2: auth.keys: not allowed; allowed: a table of absolute paths"),
        ('[auth.keys]\nk = "x"\n', ":1: auth.keys: not an absolute path"),
        ("[redis]\ncore = []\n", ":2: redis.core: 0 instances"),
        ('[redis]\ncore = ["unix:///a", "unix:///a"]\n', ":2: redis.core: the same instance twice"),
        ('[redis]\nlog = "http://h:1"\n', ":2: redis.log: unknown kind of address"),
        ('[redis]\nlog = "redis://h"\n', ":2: redis.log: needs host and port"),
        ('[redis]\nlog = "redis://h:port"\n', ":2: redis.log: not an address"),
        ('[redis]\nlog = "unix://a"\n', ":2: redis.log: a socket needs an absolute path"),
        (
            '[redis]\nlog = "redis://u:canary-hunter2@h:1"\n',
            ":2: redis.log: a password belongs into redis.password",
        ),
        ('[redis]\npassword = "canary-hunter2"\n', ":2: redis.password: a secret is never written down here"),
        ("[redis]\npassword = 7\n", ":2: redis.password: not allowed; allowed: credential:NAME or file:"),
        (
            '[log]\nreference_key = "canary-hunter2"\n',
            ":2: log.reference_key: a secret is never written down here",
        ),
        (
            '[log]\nformat = "canary-hunter2"\n',
            ':2: log.format: not allowed; allowed: "auto" or "json" or "console"',
        ),
        (
            '[test]\nfailpoints = "canary-hunter2"\n',
            ":2: test.failpoints: not allowed; allowed: true or false",
        ),
    ],
)
def test_bad_input_is_named_with_its_line_and_never_quoted(tmp_path: Path, text: str, expected: str) -> None:
    path = _write(tmp_path, text)
    problems = _problems(path)
    assert any(line.startswith(f"{path}{expected}") for line in problems), problems
    assert CANARY not in "\n".join(problems)


def test_an_unknown_key_on_the_command_line_is_refused_like_one_in_a_file() -> None:
    [problem, other] = _problems(None, overrides={"gateway.prt": 1, "gatway.port": 2})
    assert problem.startswith("command line: gateway.prt: there is no such key, did you mean port?")
    assert other.startswith("command line: gatway.port: there is no section [gatway], did you mean gateway?")


def test_a_secret_in_the_environment_is_refused_and_not_printed() -> None:
    problems = _problems(None, environ={"QIM__REDIS__PASSWORD": CANARY})
    assert problems == [
        (
            "QIM__REDIS__PASSWORD: redis.password: a secret is never written down here, only where it lies; "
            "allowed: credential:NAME or file:/absolute/path"
        )
    ]


def test_a_missing_and_a_binary_file_are_reported_by_name(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    assert _problems(missing) == [f"{missing}: cannot be read: No such file or directory"]
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"[a]\n\xff")
    assert _problems(binary) == [f"{binary}: not UTF-8 text at byte 4"]


def test_a_plain_value_and_a_part_of_a_table_in_the_environment_do_not_crash() -> None:
    config = load_config(None, environ={"QIM__AUTH__KEYS": "/x", "QIM__AUTH__KEYS__A": "/y"})
    assert config.auth.keys == {"A": "/y"}


def test_lines_are_found_in_dotted_keys_and_quoted_names() -> None:
    assert lines_of_keys('a.b = 1\n[c]\n# d = 0\n"d" = 2\n') == {"a.b": 1, "c": 2, "c.d": 4}


def test_every_key_has_a_text_and_says_what_is_allowed() -> None:
    assert set(KEYS) == {key for key, _value, _origin in describe(Config())}
    assert all(entry.key.text.endswith(".") and entry.allowed for entry in KEYS.values())


def test_a_secret_prints_as_stars() -> None:
    secret = Secret(CANARY.encode())
    assert CANARY not in f"{secret} {secret!r} {[secret]}"
    assert secret.reveal() == CANARY.encode()
    assert not Secret.none()


def test_a_secret_is_read_from_a_private_file_only(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(f"{CANARY}\n")
    path.chmod(0o400)
    assert config_checks.read_secret(f"file:{path}", environ={}).reveal() == CANARY.encode()
    credential = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert config_checks.read_secret("credential:secret", environ=credential).reveal() == CANARY.encode()
    with pytest.raises(ConfigError, match="CREDENTIALS_DIRECTORY is not set"):
        config_checks.read_secret("credential:secret", environ={})
    path.chmod(0o444)
    with pytest.raises(ConfigError, match="run: chmod 0400") as caught:
        config_checks.read_secret(f"file:{path}", environ={})
    assert CANARY not in str(caught.value)


def test_files_are_checked_together_and_named_by_key(tmp_path: Path) -> None:
    certificate = tmp_path / "cert.pem"
    certificate.write_text("x")
    config = load_config(
        None,
        overrides={
            "tls.certificate_file": str(certificate),
            "tls.key_file": str(tmp_path / "absent"),
            "auth.keys": {"k": str(tmp_path)},
        },
    )
    problems = config_checks.check_files(config, environ={})
    assert problems == [
        f"command line: tls.key_file: {tmp_path}/absent: No such file or directory",
        f"default: auth.keys.k: {tmp_path}: not a file",
    ]
    assert any(
        "auth.keys: none is configured" in line for line in config_checks.check_files(Config(), environ={})
    )


def test_a_change_that_no_reload_takes_over_is_named(tmp_path: Path) -> None:
    running = load_config(None)
    changed = "[gateway]\nport = 2\n[limits]\nsends_burst = 7777\n[log]\nlevel = 'debug'\n"
    assert changes_for_restart(running, running) == []
    fresh = load_config(_write(tmp_path, changed))
    assert changes_for_restart(running, fresh) == ["gateway.port", "limits.sends_burst"]


def test_exactly_what_a_reload_carries_is_called_hot() -> None:
    hot = {dotted.partition(".")[2] for dotted, entry in KEYS.items() if entry.key.hot}
    assert hot == set(Reload._fields)
