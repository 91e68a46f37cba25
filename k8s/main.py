"""Write a deployment's Kubernetes manifests: `python -m k8s.main --deployment deployments/x.yaml --out dist/x`.

The same input gives the same bytes. The folder is replaced as a whole: `kubectl apply -f` never sees half of it. What
Kubernetes would refuse, or would run wrongly, is an error here (`k8s/rules.py`).
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import yaml
from cdk8s import App, Chart
from pydantic import ValidationError

from config.deployment import DeploymentConfig, load
from config.job import JobConfig
from k8s import drill, rules
from k8s.data_job import DIRECTORIES, PREPARE_DATA, DirectoriesChart, PrepareDataChart
from k8s.preflight_job import PREFLIGHT, PreflightChart
from k8s.queue import Precedence
from k8s.shared import SharedChart
from k8s.training_job import TrainingJobChart
from training.config import describe_errors

SUFFIX = ".k8s.yaml"
JOB = "job"
_PLACEHOLDER_DIGEST = "sha256:" + "0" * 64

# Declares the charts of one folder.
Declare = Callable[[App], object]


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        deployment = load(arguments.deployment)
        if arguments.image is not None:
            deployment = with_image(deployment, arguments.image)
        pair = _pair(deployment, arguments)
        if pair is None:
            files = write(deployment, arguments.out, chart=arguments.chart)
        else:
            files = write_pair(deployment, pair, arguments.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        place = error.filename or arguments.out
        print(f"error: {place}: cannot be written ({error.strerror}); choose another --out", file=sys.stderr)
        return 2
    for file in files:
        print(file)
    if pair is not None:
        print(
            f"note: apply one folder after the other, they need the same nodes; results: {pair.results}",
            file=sys.stderr,
        )
    if deployment.job.image.endswith(_PLACEHOLDER_DIGEST):
        print("note: job.image is a placeholder that no registry serves; pass --image", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="k8s.main", description="write a deployment's Kubernetes manifests")
    parser.add_argument("--deployment", type=Path, required=True, help="deployment file")
    parser.add_argument("--out", type=Path, required=True, help="folder for the manifests; replaced as a whole")
    parser.add_argument("--image", help="REPOSITORY@sha256:DIGEST in place of the deployment's image")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--chart",
        choices=(JOB, PREFLIGHT, DIRECTORIES, PREPARE_DATA),
        default=JOB,
        help="the training job (default), or a Job to run once before it",
    )
    kind.add_argument(
        "--fault", action="append", metavar="KIND@STEP:rankN", help="a drill: the job with and without; repeatable"
    )
    kind.add_argument("--benchmark", choices=("checkpoint",), help="the job with async and with sync checkpoints")
    parser.add_argument("--steps", type=int, help="total_steps of a drill or benchmark")
    return parser


def _pair(deployment: DeploymentConfig, arguments: argparse.Namespace) -> drill.Pair | None:
    """The drill or benchmark that the command line asks for, if it does."""
    if arguments.fault:
        faults = tuple(drill.parse_fault(text) for text in arguments.fault)
        return drill.fault_drill(deployment, faults, steps=arguments.steps)
    if arguments.benchmark:
        return drill.checkpoint_benchmark(deployment, steps=arguments.steps)
    if arguments.steps is not None:
        raise ValueError(
            f"--steps {arguments.steps} is for drills and benchmarks; for the job itself set train.total_steps"
        )
    return None


def with_image(deployment: DeploymentConfig, image: str) -> DeploymentConfig:
    """The deployment with another image, checked as if it stood in the file."""
    try:
        job = JobConfig.model_validate({**deployment.job.model_dump(exclude_unset=True), "image": image})
    except ValidationError as error:
        raise ValueError(f"--image: {describe_errors(error)}") from error
    return deployment.model_copy(update={"job": job})


def build(app: App, deployment: DeploymentConfig, chart: str = JOB) -> None:
    """Declare what is shared, then the chart. A Job that runs once finds namespace and claim either way."""
    _declare(app, deployment, chart).add_dependency(_shared(app, deployment))


def _shared(app: App, deployment: DeploymentConfig) -> Chart:
    shared = SharedChart(app, f"{deployment.job.name}-shared", deployment=deployment)
    Precedence(shared, "precedence", job=deployment.job)
    return shared


def _declare(app: App, deployment: DeploymentConfig, chart: str) -> Chart:
    name = deployment.job.name
    match chart:
        case "preflight":
            return PreflightChart(app, f"{name}-{PREFLIGHT}", deployment=deployment)
        case "directories":
            return DirectoriesChart(app, f"{name}-{DIRECTORIES}", deployment=deployment)
        case "prepare-data":
            preparation = deployment.job.prepare_data
            if preparation is None:
                raise ValueError("--chart prepare-data: job.prepare_data is not set; say there what to tokenize")
            return PrepareDataChart(app, f"{name}-{PREPARE_DATA}", deployment=deployment, preparation=preparation)
    return TrainingJobChart(app, name, deployment=deployment)


def write(deployment: DeploymentConfig, out: Path, *, chart: str = JOB) -> list[Path]:
    """Render one chart and what it shares into `out`; returns the files, in the order to apply them.

    Raises:
        ValueError: a rule is broken, or `out` holds something else, which replacing it would delete.
        OSError: `out` or its parent cannot be written; what was there is still there.
    """
    return _replace(out, {".": lambda app: build(app, deployment, chart)})


def write_pair(deployment: DeploymentConfig, pair: drill.Pair, out: Path) -> list[Path]:
    """Render what is shared into `out`, and each run of the pair into a folder below. Raises like `write`."""
    folders: dict[str, Declare] = {
        ".": lambda app: _shared(app, deployment),
        **{name: lambda app, run=run: _job_only(app, run) for name, run in pair.runs.items()},
    }
    return _replace(out, folders)


def _job_only(app: App, deployment: DeploymentConfig) -> None:
    TrainingJobChart(app, deployment.job.name, deployment=deployment)


def _replace(out: Path, folders: dict[str, Declare]) -> list[Path]:
    _refuse_foreign(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that a rename suffices.
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        fresh, old = Path(scratch) / "new", Path(scratch) / "old"
        for folder, declare in folders.items():
            app = App(outdir=str(fresh / folder), output_file_extension=SUFFIX)
            declare(app)
            app.synth()
        files = [file.relative_to(fresh) for file in _manifests(fresh)]
        for file in files:
            _check(fresh / file, file)
        if out.exists():
            out.rename(old)
        try:
            fresh.rename(out)
        except OSError:
            if old.exists():
                old.rename(out)
            raise
    return [out / file for file in files]


def _check(path: Path, name: Path) -> None:
    """Raise ValueError for the first rule that an object of the file breaks."""
    for document in yaml.load_all(path.read_text(), Loader=yaml.CSafeLoader):
        for problem in rules.broken(document):
            raise ValueError(f"{name.name}: {document['kind']} {document['metadata']['name']}: {problem}")


def _manifests(folder: Path) -> list[Path]:
    """Every file, those of the folder itself first."""
    return sorted(folder.glob(f"*{SUFFIX}")) + sorted(folder.glob(f"*/*{SUFFIX}"))


def _refuse_foreign(out: Path) -> None:
    if not out.exists():
        return
    ours = {*_manifests(out), *(file.parent for file in _manifests(out))}
    foreign = sorted(entry.name for entry in [*out.iterdir(), *out.glob("*/*")] if entry not in ours)
    if foreign:
        raise ValueError(f"--out {out} holds other files ({foreign[0]}); choose a folder of its own")


if __name__ == "__main__":
    sys.exit(main())
