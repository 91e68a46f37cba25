"""Write a deployment's Kubernetes manifests: `python -m k8s.main --deployment deployments/x.yaml --out dist/x`.

The same input gives the same bytes. The folder is replaced as a whole: `kubectl apply -f` never sees half of it.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from cdk8s import App
from pydantic import ValidationError

from config.deployment import DeploymentConfig, load
from config.job import JobConfig
from k8s.shared import SharedChart
from k8s.training_job import TrainingJobChart
from training.config import describe_errors

SUFFIX = ".k8s.yaml"
_PLACEHOLDER_DIGEST = "sha256:" + "0" * 64


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="k8s.main", description="write a deployment's Kubernetes manifests")
    parser.add_argument("--deployment", type=Path, required=True, help="deployment file")
    parser.add_argument("--out", type=Path, required=True, help="folder for the manifests; replaced as a whole")
    parser.add_argument("--image", help="REPOSITORY@sha256:DIGEST in place of the deployment's image")
    arguments = parser.parse_args(argv)
    try:
        deployment = load(arguments.deployment)
        if arguments.image is not None:
            deployment = with_image(deployment, arguments.image)
        files = write(deployment, arguments.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        place = error.filename or arguments.out
        print(f"error: {place}: cannot be written ({error.strerror}); choose another --out", file=sys.stderr)
        return 2
    for file in files:
        print(file)
    if deployment.job.image.endswith(_PLACEHOLDER_DIGEST):
        print("note: job.image is a placeholder that no registry serves; pass --image", file=sys.stderr)
    return 0


def with_image(deployment: DeploymentConfig, image: str) -> DeploymentConfig:
    """The deployment with another image, checked as if it stood in the file."""
    try:
        job = JobConfig.model_validate({**deployment.job.model_dump(exclude_unset=True), "image": image})
    except ValidationError as error:
        raise ValueError(f"--image: {describe_errors(error)}") from error
    return deployment.model_copy(update={"job": job})


def build(app: App, deployment: DeploymentConfig) -> None:
    """Declare the charts: what is shared, then the job."""
    job = TrainingJobChart(app, deployment.job.name, deployment=deployment)
    job.add_dependency(SharedChart(app, f"{deployment.job.name}-shared", deployment=deployment))


def write(deployment: DeploymentConfig, out: Path) -> list[Path]:
    """Render the manifests into `out`; returns the files, in the order to apply them.

    Raises:
        ValueError: `out` holds something else, which replacing it would delete.
        OSError: `out` or its parent cannot be written; what was there is still there.
    """
    foreign = [entry.name for entry in out.iterdir() if not entry.name.endswith(SUFFIX)] if out.exists() else []
    if foreign:
        raise ValueError(f"--out {out} holds other files ({sorted(foreign)[0]}); choose a folder of its own")
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that a rename suffices.
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        fresh, old = Path(scratch) / "new", Path(scratch) / "old"
        app = App(outdir=str(fresh), output_file_extension=SUFFIX)
        build(app, deployment)
        app.synth()
        if out.exists():
            out.rename(old)
        try:
            fresh.rename(out)
        except OSError:
            if old.exists():
                old.rename(out)
            raise
    return sorted(out.iterdir())


if __name__ == "__main__":
    sys.exit(main())
