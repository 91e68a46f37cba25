"""cfn-lint, the real command, over every shipped deployment's templates, each in its own region."""

import json
import subprocess
import sys
from pathlib import Path

import aws_cdk as cdk
import pytest

from app import build
from config.deployment import load

SHIPPED = {
    path.stem: deployment
    for path in sorted((Path(__file__).parents[2] / "deployments").glob("*.yaml"))
    if (deployment := load(path)).cluster is not None
}
# Rule -> why it is passed over.
IGNORED = {
    "W3010": "the zone is named on purpose: reservation, file system and EFA traffic live in it",
    "W3005": "CDK writes a DependsOn beside a reference that implies it; both say the same",
}


@pytest.mark.parametrize("name", SHIPPED)
def test_cfn_lint_has_nothing_to_say(name, cdk_context, tmp_path):
    deployment = SHIPPED[name]
    assert deployment.cluster is not None
    app = cdk.App(context=cdk_context, analytics_reporting=False, outdir=str(tmp_path))
    build(app, deployment)
    app.synth()
    templates = sorted(str(path) for path in tmp_path.glob("*.template.json"))
    assert len(templates) == 5
    command = [
        str(Path(sys.executable).with_name("cfn-lint")),
        "--format",
        "json",
        "--regions",
        deployment.cluster.region,
    ]
    command += ["--ignore-checks", *IGNORED, "--template", *templates]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    findings = json.loads(done.stdout or "[]")
    found = [f"{finding['Rule']['Id']} {finding['Message'][:200]}" for finding in findings]
    assert found == [], done.stderr
    assert done.returncode == 0
