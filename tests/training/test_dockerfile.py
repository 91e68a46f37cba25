"""The trainer image's Dockerfile: hadolint finds nothing, and what it can't see is as it should be."""

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

from stacks import image

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "training/Dockerfile"


@pytest.fixture(scope="module")
def instructions():
    parser = DockerfileParser(fileobj=DOCKERFILE.open("rb"))
    return [(entry["instruction"], entry["value"]) for entry in parser.structure]


@pytest.fixture(scope="module")
def last_stage(instructions):
    start = max(index for index, (name, _) in enumerate(instructions) if name == "FROM")
    return instructions[start:]


def hadolint(text: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sysconfig.get_path("scripts")) / "hadolint"), "--no-color", "-"]
    return subprocess.run(command, input=text, check=False, capture_output=True, text=True)


def test_hadolint_finds_nothing():
    done = hadolint(DOCKERFILE.read_text())
    assert done.returncode == 0, done.stdout


def test_hadolint_would_find_something():
    assert "DL3007" in hadolint("FROM ubuntu:latest\n").stdout


def test_every_stage_begins_with_one_base_image_by_digest_and_codebuild_takes_the_same(instructions):
    (base,) = [value for name, value in instructions if name == "ARG" and value.startswith("BASE=")]
    assert re.fullmatch(r"BASE=ubuntu:24\.04@sha256:[0-9a-f]{64}", base)
    assert [value.split()[0] for name, value in instructions if name == "FROM"] == ["${BASE}", "${BASE}"]
    assert "public.ecr.aws/docker/library/" + base.removeprefix("BASE=") == image.BASE_IMAGE


def test_what_is_downloaded_is_checked_before_it_is_unpacked(last_stage):
    (checksum,) = [value for name, value in last_stage if name == "ARG" and value.startswith("EFA_INSTALLER_SHA256=")]
    assert re.fullmatch(r"EFA_INSTALLER_SHA256=[0-9a-f]{64}", checksum)
    (run,) = [value for name, value in last_stage if name == "RUN" and "efa-installer.amazonaws.com" in value]
    assert run.index("curl --fail") < run.index("sha256sum --check") < run.index("tar -xzf")


def test_the_last_stage_installs_no_build_tools_unless_told_to_and_leaves_no_lists(last_stage):
    (run,) = [value for name, value in last_stage if name == "RUN"]
    packages = run.split("install --yes --no-install-recommends", 1)[1].split("&&")[0].split()
    assert packages == ["ca-certificates", "coreutils", "curl", "python3.12", "util-linux", "${COMPILER_PACKAGES}"]
    assert ("ARG", "COMPILER_PACKAGES=") in last_stage
    assert "purge --yes curl" in run
    assert "rm -rf /var/lib/apt/lists/*" in run


def test_it_runs_as_a_user_without_rights_and_says_what_it_is(last_stage):
    assert [value for name, value in last_stage if name == "USER"] == ["1000:1000"]
    assert last_stage[-1] == ("CMD", '["python", "-m", "training.self_test"]')


def test_codebuild_runs_the_self_test_before_it_pushes_and_stops_at_its_first_error():
    script = image._BUILD
    assert "set -euo pipefail" in script
    assert script.index("docker build") < script.index("python -m training.self_test") < script.index("docker push")
