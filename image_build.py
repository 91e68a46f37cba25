"""Builds the trainer image on AWS: starts the CodeBuild project of a deployment, waits, and writes the image's name.

`make image` runs it after deploying the image stack, so that the build sees the sources as they are here. It speaks
through the aws command line, which a user of the cluster has anyway (kubectl gets its tokens there).
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from config.deployment import load

POLL_SECONDS = 10.0
# The project's own limits are 2 h of build after 30 min in the queue; this is for a service that never answers.
GIVE_UP_SECONDS = 3 * 3600


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="image_build.py", description="build the trainer image on AWS")
    parser.add_argument("--deployment", type=Path, required=True, help="deployment file")
    parser.add_argument("--out", type=Path, required=True, help="file for REPOSITORY@sha256:DIGEST")
    arguments = parser.parse_args(argv)
    try:
        image = build(arguments.deployment)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(image + "\n")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {arguments.out}: cannot be written ({error.strerror}); choose another --out", file=sys.stderr)
        return 2
    print(f"{image}\nwritten to {arguments.out}, where `make manifests` finds it")
    return 0


def build(deployment: Path) -> str:
    """Build the deployment's image; returns it as REPOSITORY@sha256:DIGEST.

    Raises:
        ValueError: there is nothing to build with, AWS refused, or the build failed.
    """
    config = load(deployment)
    if config.cluster is None:
        raise ValueError(f"deployment {config.name} has no cluster section, so nothing on AWS builds its image")
    aws = Aws(config.cluster.region)
    stack = f"{config.name}-image"
    described = aws("cloudformation", "describe-stacks", "--stack-name", stack)
    outputs = {output["OutputKey"]: output["OutputValue"] for output in described["Stacks"][0].get("Outputs", [])}
    if not {"ProjectName", "ParameterName"} <= outputs.keys():
        raise ValueError(f"stack {stack} has no build project; deploy it again")
    started = aws("codebuild", "start-build", "--project-name", outputs["ProjectName"])
    _wait(aws, started["build"]["id"])
    image = aws("ssm", "get-parameter", "--name", outputs["ParameterName"])["Parameter"]["Value"]
    if "@sha256:" not in image:
        raise ValueError(f"the build succeeded, but parameter {outputs['ParameterName']} says {image!r}; see its log")
    return image


class Aws:
    """The aws command line in one region."""

    def __init__(self, region: str) -> None:
        self._region = region

    def __call__(self, *arguments: str) -> Any:
        """Run one command; returns its parsed answer.

        Raises:
            ValueError: there is no aws command, or it failed.
        """
        command = ["aws", *arguments, "--region", self._region, "--output", "json"]
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise ValueError("the aws command is missing; install the AWS CLI, version 2, and log in") from error
        if done.returncode:
            said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            raise ValueError(f"aws {arguments[0]} {arguments[1]}: {said}")
        return json.loads(done.stdout)


def _wait(aws: Aws, build_id: str) -> None:
    """One line per phase, until the build has ended."""
    print(f"build {build_id}", flush=True)
    start, phase = time.monotonic(), ""
    while (elapsed := time.monotonic() - start) < GIVE_UP_SECONDS:
        (build,) = aws("codebuild", "batch-get-builds", "--ids", build_id)["builds"]
        if build.get("currentPhase") not in (None, phase):
            phase = build["currentPhase"]
            print(f"{elapsed:7.0f} s  {phase.lower().replace('_', ' ')}", flush=True)
        if build["buildStatus"] == "SUCCEEDED":
            return
        if build["buildStatus"] != "IN_PROGRESS":
            log = build.get("logs", {}).get("deepLink", "its log in CodeBuild")
            raise ValueError(f"build {build_id} ended as {build['buildStatus']}; see {log}")
        time.sleep(POLL_SECONDS)
    raise ValueError(f"build {build_id} did not end within {GIVE_UP_SECONDS / 3600:.0f} hours; look at it in CodeBuild")


if __name__ == "__main__":
    sys.exit(main())
