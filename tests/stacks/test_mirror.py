"""The script filling a mirror, run by a real bash; helm, crane and aws are stand-ins that write down what they do."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from stacks.mirror import main
from tests.stacks.test_cluster import charts

ROOT = Path(__file__).parents[2]
HOST = "123456789012.dkr.ecr.us-west-2.amazonaws.com"
MIRROR = f"{HOST}/mirror"
SETTINGS = {
    "network": {"egress": "none", "mirror_registry": MIRROR},
    "addons": {"kueue": True},
    "observability": {"metrics": "prometheus"},
}

STAND_INS = {
    # A chart is a file that tells its version; its template has an image of that tag, if the test knows the chart's.
    "helm": r"""
case "$1" in
  registry) cat >/dev/null ;;
  pull) folder="${*: -1}"; mkdir -p "$folder"; echo "$*" >"$folder/chart.tgz" ;;
  template) cat "$IMAGES" ;;
esac""",
    "crane": 'if [[ "$1" == auth ]]; then cat >/dev/null; fi',
    # No repository exists yet.
    "aws": 'case "$2" in get-login-password) echo secret ;; describe-repositories) exit 1 ;; esac',
}


@pytest.fixture
def deployment(tmp_path):
    document = yaml.safe_load((ROOT / "deployments/p5-2node.yaml").read_text())
    for section, changes in SETTINGS.items():
        document["cluster"][section] = document["cluster"].get(section, {}) | changes
    (tmp_path / "private.yaml").write_text(yaml.safe_dump(document))
    return tmp_path / "private.yaml"


@pytest.fixture
def run(tmp_path):
    """run(script, images) -> (exit code, what was done, stderr)."""
    (tmp_path / "bin").mkdir()
    for name, body in STAND_INS.items():
        tool = tmp_path / "bin" / name
        tool.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >>"$DONE"\n{body}\n')
        tool.chmod(0o755)

    def start(script, images):
        (tmp_path / "images").write_text(images)
        done = tmp_path / "done"
        ended = subprocess.run(
            ["bash", "-c", script],
            env=os.environ
            | {
                "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
                "DONE": str(done),
                "IMAGES": str(tmp_path / "images"),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        return ended.returncode, done.read_text().splitlines(), ended.stderr

    return start


IMAGES = """
        image: "nvcr.io/nvidia/k8s-device-plugin:v0.19.3"
        image: registry.k8s.io/jobset/jobset:v0.12.0
      - image: nvcr.io/nvidia/k8s/dcgm-exporter:4.5.2-4.8.3-distroless
        image: registry.k8s.io/kueue/kueue:v0.19.4@sha256:0123456789abcdef
        image: registry.k8s.io/kube-state-metrics/kube-state-metrics:v2.20.0
        image: docker.io/library/busybox:1
"""


def test_every_chart_and_image_that_the_stacks_ask_for_is_copied(deployment, run, capsys, synthesize):
    assert main([str(deployment)]) == 0
    code, done, error = run(capsys.readouterr().out, IMAGES)
    assert code == 0, error

    asked = charts(synthesize(cluster=SETTINGS)["cluster"])
    pulled = {
        line.split()[2] if "--repo" in line else line.split()[2].rpartition("/")[2]: line
        for line in done
        if line.startswith("helm pull")
    }
    pushed = [line for line in done if line.startswith("helm push")]
    assert pulled.keys() == asked.keys()
    assert all(f"--version {chart['Version']} " in pulled[name] for name, chart in asked.items())
    assert len(pushed) == len(asked)
    assert all(line.endswith(f" oci://{MIRROR}/charts") for line in pushed)

    copied = dict(line.split()[2:] for line in done if line.startswith("crane copy"))
    assert copied["registry.k8s.io/kueue/kueue:v0.19.4@sha256:0123456789abcdef"].startswith(f"{MIRROR}/kueue/kueue:")
    assert not any("busybox" in image for image in copied)
    wanted = {image.rpartition("/")[0] for image in copied.values()}
    for name in ("nvidia-device-plugin", "dcgm-exporter"):
        assert asked[name]["Values"]["image"]["repository"].rpartition("/")[0] in wanted
    created = {line.split()[-1] for line in done if "create-repository" in line}
    assert {f"mirror/charts/{name}" for name in asked} <= created
    assert {image.removeprefix(f"{HOST}/").partition(":")[0] for image in copied.values()} <= created


def test_a_chart_without_the_image_that_is_looked_for_ends_the_script(deployment, run, capsys):
    main([str(deployment)])
    code, _, error = run(capsys.readouterr().out, "image: elsewhere/else:1\n")
    assert code == 1
    assert "nvidia-device-plugin 0.19.3 names no image nvcr.io/nvidia/k8s-device-plugin" in error


def test_a_deployment_without_a_mirror_is_told_so(capsys):
    assert main([str(ROOT / "deployments/p5-2node.yaml")]) == 2
    assert "mirror_registry is not set" in capsys.readouterr().err
