"""One node's checks, against real files, a real file system and the process's own limits."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from training.preflight import checks
from training.preflight.gpus import gpus, judge

ROOT = Path(__file__).resolve().parents[3]


def healthy(index, **changes):
    gpu = {
        "index": index,
        "name": "NVIDIA H100 80GB HBM3",
        "uncorrected_ecc": 0,
        "row_remap_pending": False,
        "row_remap_failed": False,
        "recovery_action": 0,
    }
    return gpu | changes


def test_healthy_gpus_pass():
    assert judge([healthy(0), healthy(1)], expect=2).status == "pass"


def test_readings_that_a_gpu_does_not_have_are_no_complaint():
    unknown = dict.fromkeys(("uncorrected_ecc", "row_remap_pending", "row_remap_failed", "recovery_action"))
    assert judge([healthy(0, **unknown)], expect=1).status == "pass"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"uncorrected_ecc": 3}, "3 uncorrected ECC errors"),
        ({"row_remap_pending": True}, "waits to be remapped"),
        ({"row_remap_failed": True}, "could not be remapped"),
        ({"recovery_action": 2}, "recovery action 2"),
    ],
)
def test_an_ill_gpu_is_named(changes, said):
    check = judge([healthy(0), healthy(1, **changes)], expect=2)
    assert check.status == "fail"
    assert f"GPU 1: {said}" in check.detail or ("GPU 1: " in check.detail and said in check.detail)


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_gpus_fails(count):
    assert judge([healthy(index) for index in range(count)], expect=2).status == "fail"


def test_no_gpus_expected_is_skipped_by_name():
    check, _ = gpus(expect=0)
    assert (check.name, check.status) == ("gpus", "skip")


@pytest.fixture
def sysfs(tmp_path):
    """Two EFA devices and one of another kind, as the kernel shows them."""
    for name, driver in (("rdmap0s6", "efa"), ("rdmap1s6", "efa"), ("mlx5_0", "mlx5_core")):
        device = tmp_path / "infiniband" / name / "device"
        device.mkdir(parents=True)
        (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(tmp_path / "drivers" / driver)
    return tmp_path / "infiniband"


@pytest.fixture
def fi_info(tmp_path, monkeypatch):
    """A libfabric that lists the given domains."""

    def install(*domains):
        script = tmp_path / "bin" / "fi_info"
        script.parent.mkdir()
        lines = [f"provider: efa\\n    fabric: efa\\n    domain: {domain}\\n" for domain in domains]
        script.write_text(f"#!/bin/sh\nprintf '{''.join(lines)}'\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")

    return install


def test_efa_devices_are_counted_by_their_driver(sysfs, fi_info):
    fi_info("rdmap0s6-rdm", "rdmap1s6-rdm")
    check = checks.efa_devices(expect=2, sysfs=sysfs)
    assert (check.status, check.values["devices"]) == ("pass", ["rdmap0s6", "rdmap1s6"])


def test_a_missing_efa_device_fails(sysfs, fi_info):
    fi_info("rdmap0s6-rdm", "rdmap1s6-rdm")
    assert checks.efa_devices(expect=3, sysfs=sysfs).status == "fail"


def test_a_device_that_libfabric_cannot_use_fails(sysfs, fi_info):
    fi_info("rdmap0s6-rdm")
    assert "1 EFA domains, 2 expected" in checks.efa_devices(expect=2, sysfs=sysfs).detail


def test_no_libfabric_fails_by_name(sysfs):
    assert "fi_info" in checks.efa_devices(expect=2, sysfs=sysfs).detail


def test_a_limit_on_locked_memory_fails_where_efa_is_expected():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "from training.preflight.checks import locked_memory; print(locked_memory(needed=True).detail)"
    )
    finished = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert finished.stdout.startswith("limit is 64 KiB: libfabric would fail with -12")


def test_locked_memory_is_judged_only_with_efa():
    assert checks.locked_memory(needed=False).status == "skip"
    unlimited = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY
    assert checks.locked_memory(needed=True).status == ("pass" if unlimited else "fail")


def test_huge_pages_that_cannot_be_mapped_fail():
    assert checks.huge_pages(expect_mib=1 << 30).status == "fail"
    assert checks.huge_pages(expect_mib=0).status == "skip"


def test_a_mount_that_is_not_there_fails_with_its_name(tmp_path):
    check = mount(tmp_path / "fsx")
    assert check.status == "fail"
    assert f"{tmp_path / 'fsx'} cannot be used (No such file or directory)" in check.detail


def test_a_mount_that_cannot_be_written_fails():
    # Not even root can create a file there.
    check = mount(Path("/proc"))
    assert check.status == "fail"
    assert "/proc cannot be used" in check.detail


def test_a_full_file_system_fails(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    (tmp_path / ".preflight-0").symlink_to("/dev/full")
    check = mount(tmp_path)
    assert check.status == "fail"
    assert "No space left on device" in check.detail


def test_a_slow_mount_fails(tmp_path):
    assert mount(tmp_path, min_write_mib_s=1e9).status == "fail"
    assert mount(tmp_path, min_read_mib_s=1e9).status == "fail"


def test_a_mount_of_another_type_fails(tmp_path):
    check = mount(tmp_path, filesystem="lustre")
    assert check.status == "fail"
    assert "lustre expected" in check.detail
    assert mount(tmp_path, filesystem=checks.filesystem_of(tmp_path)).status == "pass"


def test_the_test_file_is_taken_away(tmp_path):
    assert mount(tmp_path).status == "pass"
    assert not list(tmp_path.iterdir())


def test_shared_memory_below_the_wanted_size_fails(tmp_path):
    assert checks.shared_memory(tmp_path, min_mib=1 << 40).status == "fail"
    assert checks.shared_memory(tmp_path, min_mib=1).status == "pass"


def test_a_check_that_breaks_has_failed():
    check = checks.guarded("shm", lambda: checks.shared_memory(Path("/no/such/folder"), min_mib=1))
    assert check.status == "fail"
    assert "No such file" in check.detail


def test_the_versions_are_those_of_the_image():
    check = checks.versions(driver="570.1")
    assert check.status == "pass"
    assert check.values["nvrx"] == "0.7.0"
    assert check.values["driver"] == "570.1"


def mount(directory, *, min_write_mib_s=0.0, min_read_mib_s=0.0, filesystem=None):
    return checks.mount(
        directory,
        file_mib=4,
        min_write_mib_s=min_write_mib_s,
        min_read_mib_s=min_read_mib_s,
        filesystem=filesystem,
        name="0",
    )
