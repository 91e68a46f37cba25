"""A moto server and the real CDK command line, both on localhost, both ended with the tests."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest

ROOT = Path(__file__).parents[2]
REGION = "us-west-2"
# Long, for a machine that other work shares; nothing here waits for it.
COMMAND_SECONDS = 240


@dataclass(frozen=True)
class Cdk:
    """The CDK command line, with the moto server as its AWS."""

    environment: dict[str, str]

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """Run one command to its end; returns what it said. Fails unless it exits with `code`."""
        done = subprocess.run(self._command(*arguments), **self._settings(), check=False, timeout=COMMAND_SECONDS)
        assert done.returncode == code, done.stdout
        return done.stdout

    def start(self, *arguments: str) -> subprocess.Popen:
        """Begin one command."""
        return subprocess.Popen(self._command(*arguments), **self._settings())

    def _command(self, *arguments: str) -> list[str]:
        return [str(ROOT / "node_modules/.bin/cdk"), *arguments, "--no-notices", "--no-color"]

    def _settings(self) -> dict:
        return {
            "cwd": ROOT,
            "env": self.environment,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
        }


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def aws(tmp_path_factory):
    """The address of a moto server; it and its log are checked when the module ends."""
    port = free_port()
    log = tmp_path_factory.mktemp("moto") / "log"
    script = Path(__file__).parent / "moto_with_stand_ins.py"
    # moto deletes a stack's resources in the order of a set: the same one every time.
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    with log.open("w") as output:
        command = [sys.executable, str(script), str(port)]
        server = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT, env=environment)
    try:
        address = f"http://localhost:{port}"
        wait_for(address, server, log)
        yield address
    finally:
        server.terminate()
        server.wait(timeout=30)
    # moto answers its own faults with 500, which the CDK tries again and may then get past.
    _, fault, rest = log.read_text().partition("Traceback")
    assert not fault, rest[:8000]


def wait_for(address: str, server: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + COMMAND_SECONDS
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()
        try:
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{address}/moto-api/", timeout=5)
            return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"no answer from moto: {log.read_text()}")


@pytest.fixture(scope="module")
def aws_cdk(aws, tmp_path_factory) -> Cdk:
    """The CDK command line with dummy credentials, an empty home, and no way to any host but this one."""
    if not (ROOT / "node_modules/.bin/cdk").exists():
        pytest.fail("the cdk command line is missing: run `npm ci`")
    home = tmp_path_factory.mktemp("home")
    nowhere = "http://127.0.0.1:9"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment = kept | {
        "HOME": str(home),
        # jsii unpacks its libraries there once; in an empty home that alone takes 8 s per process.
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
        "AWS_ENDPOINT_URL": aws,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
        "CDK_DISABLE_CLI_TELEMETRY": "true",
        "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "20",
        "HTTP_PROXY": nowhere,
        "HTTPS_PROXY": nowhere,
        "NO_PROXY": "localhost",
    }
    return Cdk(environment)


@pytest.fixture(scope="module")
def client(aws):
    """client("ec2") -> boto3's client of that service, at the moto server."""

    def make(service: str):
        return boto3.client(
            service,
            region_name=REGION,
            endpoint_url=aws,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
        )

    return make
