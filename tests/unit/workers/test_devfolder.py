"""The data folder of the development server: whose it is, where its sockets are, what it leaves behind."""

import json
import os
import shutil
import socket
import stat
from pathlib import Path

import pytest

from qim.clock import ManualClock, SystemClock
from qim.errors import ConfigError
from workers import devfolder
from workers.devfolder import open_folder

SOCKET_PATH_BYTES_MAX = 107


def deep(folder: Path) -> Path:
    """A folder in which no socket has room."""
    return folder / ("x" * SOCKET_PATH_BYTES_MAX)


def test_sockets_live_in_the_folder_where_their_paths_fit(tmp_path_factory: pytest.TempPathFactory) -> None:
    with open_folder(tmp_path_factory.mktemp("d") / "d", clock=SystemClock()) as folder:
        if len(str(folder.path / "run" / devfolder.LONGEST_SOCKET)) > SOCKET_PATH_BYTES_MAX:
            pytest.skip("the folder of this test run is too deep")
        assert folder.run == folder.path / "run"
        assert stat.S_IMODE(folder.run.stat().st_mode) == 0o700
        assert not list(folder.run.iterdir())
    assert not (folder.path / "run").exists()


def test_sockets_move_to_a_private_folder_where_paths_are_too_long(tmp_path: Path) -> None:
    with open_folder(deep(tmp_path), clock=SystemClock()) as folder:
        assert (folder.path / "run").resolve() == folder.run
        assert stat.S_IMODE(folder.run.stat().st_mode) == 0o700
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder.run / devfolder.LONGEST_SOCKET))
    assert not folder.run.exists()
    assert not (folder.path / "run").is_symlink()


def test_what_a_killed_launcher_left_is_cleared(tmp_path: Path) -> None:
    path = deep(tmp_path)
    with open_folder(path, clock=SystemClock()) as folder:
        left = folder.run.parent / f"{folder.run.name}-left"
        left.mkdir()
    (path / "run").symlink_to(left)
    (path / "dev.json").write_text("{}")
    with open_folder(path, clock=SystemClock()):
        assert not left.exists()
        assert not (path / "dev.json").exists()


def test_a_link_to_a_folder_of_somebody_else_costs_them_nothing(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with open_folder(path, clock=SystemClock()):
        pass
    precious = tmp_path / "precious"
    precious.mkdir()
    (path / "run").symlink_to(precious)
    with open_folder(path, clock=SystemClock()):
        assert precious.exists()


def test_the_announcement_is_private_and_gone_at_the_end(tmp_path: Path) -> None:
    with open_folder(tmp_path / "data", clock=SystemClock()) as folder:
        folder.announce({"endpoint": "127.0.0.1:7443"})
        path = folder.path / "dev.json"
        assert json.loads(path.read_text()) == {"schema": 1, "endpoint": "127.0.0.1:7443"}
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


def test_a_second_launcher_is_refused_naming_the_first(tmp_path: Path) -> None:
    with (
        open_folder(tmp_path / "data", clock=SystemClock()),
        pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"),
        open_folder(tmp_path / "data", clock=ManualClock()),
    ):
        pass


def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"data folder .*: Not a directory"),
        open_folder(tmp_path / "file" / "data", clock=SystemClock()),
    ):
        pass


def test_a_path_that_goes_up_is_named_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with open_folder(tmp_path / "a" / ".." / "d", clock=SystemClock()) as folder:
        assert folder.path == tmp_path.resolve() / "d"


def test_keys_that_lost_their_other_half_are_made_anew(tmp_path: Path) -> None:
    with open_folder(tmp_path / "d", clock=SystemClock()) as folder:
        folder.prepare(address="127.0.0.1", port=0, workers=None)
        before = folder.token_key.read_bytes()
        (folder.path / "token-public.pem").unlink()
        folder.prepare(address="127.0.0.1", port=0, workers=None)
        assert folder.token_key.read_bytes() != before
        assert (folder.path / "token-public.pem").exists()


def test_a_damaged_certificate_is_named_with_what_to_do(tmp_path: Path) -> None:
    with open_folder(tmp_path / "d", clock=SystemClock()) as folder:
        folder.prepare(address="127.0.0.1", port=0, workers=None)
        folder.certificate.write_text("x")
        with pytest.raises(ConfigError, match=r"certificate\.pem: not a certificate in PEM form; remove it"):
            folder.prepare(address="127.0.0.1", port=0, workers=None)
        folder.certificate.unlink()
        folder.prepare(address="127.0.0.1", port=0, workers=None)


@pytest.mark.parametrize(("lost", "said"), [("store", "is missing"), ("store/a", "holds no append-only")])
def test_a_store_that_has_gone_is_never_begun_anew_without_a_word(
    tmp_path: Path, lost: str, said: str
) -> None:
    path = tmp_path / "d"
    with open_folder(path, clock=SystemClock()) as folder:
        (path / "store" / "a").mkdir(parents=True)
        (path / "store" / "a" / "appendonly.aof.manifest").touch()
        folder.mark_initialised()
    with open_folder(path, clock=SystemClock()):
        pass
    shutil.rmtree(path / lost)
    with (
        pytest.raises(
            ConfigError, match=f"{path}: .*store {said}.*whole data folder to begin anew.*--data-dir"
        ),
        open_folder(path, clock=SystemClock()),
    ):
        pass
    shutil.rmtree(path)
    with open_folder(path, clock=SystemClock()) as folder:
        assert not (folder.path / devfolder.INITIALISED).exists()


def test_a_first_start_that_failed_before_its_store_was_ready_may_be_repeated(tmp_path: Path) -> None:
    with open_folder(tmp_path / "d", clock=SystemClock()) as folder:
        folder.prepare(address="127.0.0.1", port=0, workers=None)
    with open_folder(tmp_path / "d", clock=SystemClock()):
        pass


def test_a_folder_of_ours_without_its_marker_is_told_from_a_foreign_one(tmp_path: Path) -> None:
    path = tmp_path / "d"
    with open_folder(path, clock=SystemClock()) as folder:
        folder.prepare(address="127.0.0.1", port=0, workers=None)
    (path / "deployment").unlink()
    with (
        pytest.raises(ConfigError, match=r"looks like one of qim dev, but its file `deployment` is missing"),
        open_folder(path, clock=SystemClock()),
    ):
        pass
    (path / "deployment").write_text("qim-dev\n")
    with open_folder(path, clock=SystemClock()):
        pass
