"""The deployment that this folder's tests share."""

from pathlib import Path

import pytest

from tests.drills.harness import write_deployment


@pytest.fixture(scope="module")
def deployment_file(tmp_path_factory) -> Path:
    return write_deployment(tmp_path_factory.mktemp("deployment") / "small.yaml")
