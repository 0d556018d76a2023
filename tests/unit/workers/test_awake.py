"""The promise that idle processors spin: what is written, that it is held, and the refusal in words."""

import os
from pathlib import Path

import pytest

from qim.errors import ConfigError
from workers.awake import DEVICE, keep_awake


def test_the_promise_is_a_machine_zero_in_a_file_that_stays_open(tmp_path: Path) -> None:
    device = tmp_path / "cpu_dma_latency"
    device.touch()
    descriptor = keep_awake(device)
    try:
        assert device.read_bytes() == bytes(4)
        assert os.path.samestat(os.fstat(descriptor), device.stat())
    finally:
        os.close(descriptor)


def test_a_host_that_does_not_allow_it_is_told_which_key_and_which_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.keep_awake: .*absent: No such file.*false"):
        keep_awake(tmp_path / "absent")


@pytest.mark.skipif(not os.access(DEVICE, os.W_OK), reason="this host lets nobody here ask for it")
def test_the_kernel_takes_it() -> None:
    os.close(keep_awake())
