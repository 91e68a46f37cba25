"""The build project in the template, and the script that starts it, against a fake `aws` command."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import aws_cdk as cdk
import pytest
from aws_cdk.assertions import Template

import image_build
from config.deployment import load
from stacks.image import ImageStack

ROOT = Path(__file__).parents[2]
DEPLOYMENT = ROOT / "deployments/p5-2node.yaml"
IMAGE = "123456789012.dkr.ecr.us-west-2.amazonaws.com/trainer@sha256:" + "a" * 64


@pytest.fixture(scope="session")
def project(templates, only):
    return only(templates["image"], "AWS::CodeBuild::Project", "Project")[1]["Properties"]


def variables(project):
    return {entry["Name"]: entry["Value"] for entry in project["Environment"]["EnvironmentVariables"]}


def build_script(project):
    (script,) = json.loads(project["Source"]["BuildSpec"])["phases"]["build"]["commands"]
    return script


def test_the_build_has_a_docker_daemon_disk_and_an_end(project):
    assert project["Environment"]["PrivilegedMode"] is True
    assert project["Environment"]["ComputeType"] == "BUILD_GENERAL1_LARGE"
    assert project["Environment"]["Type"] == "LINUX_CONTAINER"
    assert project["TimeoutInMinutes"] == 120


def test_the_tag_is_the_hash_of_the_sources_that_are_built(project):
    key = project["Source"]["Location"]["Fn::Join"][1][-1]
    assert variables(project)["TAG"] in key
    assert len(variables(project)["TAG"]) == 64


def test_a_run_that_compiles_gets_a_compiler_in_its_image_and_a_tag_of_its_own(project):
    stack = ImageStack(cdk.App(), "Image", config=load(DEPLOYMENT).cluster.storage, compiles=True)
    (compiling,) = Template.from_stack(stack).find_resources("AWS::CodeBuild::Project").values()
    assert variables(project)["COMPILER_PACKAGES"] == ""
    assert variables(compiling["Properties"])["COMPILER_PACKAGES"] == "gcc libc6-dev python3.12-dev"
    assert variables(compiling["Properties"])["TAG"] == variables(project)["TAG"] + "-compiler"
    assert '--build-arg "COMPILER_PACKAGES=$COMPILER_PACKAGES"' in build_script(project)


def test_the_image_is_run_before_it_is_pushed_and_its_digest_lands_in_the_parameter(project, templates, only):
    script = build_script(project)
    assert script.index("docker build") < script.index("docker run") < script.index("docker push")
    assert script.index("docker push") < script.index("aws ssm put-parameter")
    parameter = only(templates["image"], "AWS::SSM::Parameter", "ImageParameter")
    assert parameter[1]["Properties"]["Name"] == "/p5-2node-image/image"
    assert variables(project)["PARAMETER"] == {"Ref": parameter[0]}


def test_the_build_script_is_valid_bash(project):
    done = subprocess.run(["bash", "-n"], input=build_script(project), text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_dockerfile_takes_the_base_image_that_the_build_gives_it():
    assert "ARG BASE=" in (ROOT / "training/Dockerfile").read_text()


def test_the_build_may_push_to_its_own_repository_and_write_its_own_parameter(templates, only):
    repository = only(templates["image"], "AWS::ECR::Repository", "Repository")[0]
    statements = [
        statement
        for policy in templates["image"].find_resources("AWS::IAM::Policy").values()
        for statement in policy["Properties"]["PolicyDocument"]["Statement"]
    ]
    pushes = [s for s in statements if "ecr:PutImage" in s["Action"]]
    assert [s["Resource"] for s in pushes] == [{"Fn::GetAtt": [repository, "Arn"]}]
    (writes,) = [s for s in statements if "ssm:PutParameter" in s["Action"]]
    assert "parameter" in json.dumps(writes["Resource"])
    assert writes["Resource"] != "*"


# A stand-in for the aws command line: answers from a file of canned answers, one list per command, the last one again
# and again; and notes what it was asked.
FAKE_AWS = """\
#!{python}
import json, sys
from pathlib import Path
folder = Path({folder!r})
command = " ".join(sys.argv[1:3])
with (folder / "asked").open("a") as asked:
    asked.write(" ".join(sys.argv[1:]) + chr(10))
answers = json.loads((folder / "answers").read_text())
answer = answers[command].pop(0) if len(answers[command]) > 1 else answers[command][0]
(folder / "answers").write_text(json.dumps(answers))
if isinstance(answer, str):
    sys.exit(answer)
print(json.dumps(answer))
"""


@pytest.fixture
def fake_aws(tmp_path, monkeypatch):
    """fake_aws(**answers) puts the stand-in on PATH; calls it afterwards are in .asked()."""
    folder = tmp_path / "fake"
    folder.mkdir()
    script = folder / "aws"
    script.write_text(FAKE_AWS.format(python=sys.executable, folder=str(folder)))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(image_build, "POLL_SECONDS", 0.0)
    outputs = [{"OutputKey": "ProjectName", "OutputValue": "P"}, {"OutputKey": "ParameterName", "OutputValue": "/i"}]
    good = {
        "cloudformation describe-stacks": [{"Stacks": [{"Outputs": outputs}]}],
        "codebuild start-build": [{"build": {"id": "P:1"}}],
        "codebuild batch-get-builds": [
            {"builds": [{"buildStatus": "IN_PROGRESS", "currentPhase": "QUEUED"}]},
            {"builds": [{"buildStatus": "IN_PROGRESS", "currentPhase": "BUILD"}]},
            {"builds": [{"buildStatus": "IN_PROGRESS", "currentPhase": "BUILD"}]},
            {"builds": [{"buildStatus": "SUCCEEDED", "currentPhase": "COMPLETED"}]},
        ],
        "ssm get-parameter": [{"Parameter": {"Value": IMAGE}}],
    }

    def answer(**changes):
        changed = {name.replace("__", " ").replace("_", "-"): value for name, value in changes.items()}
        assert changed.keys() <= good.keys()
        (folder / "answers").write_text(json.dumps(good | changed))
        return folder / "asked"

    return answer


def run(tmp_path):
    return image_build.main(["--deployment", str(DEPLOYMENT), "--out", str(tmp_path / "dist/p5-2node.image.txt")])


def test_a_build_is_started_watched_phase_by_phase_and_its_image_written(fake_aws, tmp_path, capsys):
    asked = fake_aws()
    assert run(tmp_path) == 0
    assert (tmp_path / "dist/p5-2node.image.txt").read_text() == IMAGE + "\n"
    phases = [line.split(" s  ")[1] for line in capsys.readouterr().out.splitlines() if " s  " in line]
    assert phases == ["queued", "build", "completed"]
    commands = asked.read_text().splitlines()
    assert "cloudformation describe-stacks --stack-name p5-2node-image" in commands[0]
    assert all("--region us-west-2" in command for command in commands)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {
                "codebuild__batch_get_builds": [
                    {"builds": [{"buildStatus": "FAILED", "logs": {"deepLink": "https://log.example"}}]}
                ]
            },
            ["P:1 ended as FAILED", "https://log.example"],
        ),
        ({"ssm__get_parameter": [{"Parameter": {"Value": "none"}}]}, ["build succeeded", "/i says 'none'"]),
        (
            {"cloudformation__describe_stacks": ["Stack with id p5-2node-image does not exist"]},
            ["aws cloudformation describe-stacks", "does not exist"],
        ),
        (
            {"cloudformation__describe_stacks": [{"Stacks": [{}]}]},
            ["p5-2node-image has no build project", "deploy it again"],
        ),
    ],
)
def test_whatever_goes_wrong_is_one_line_and_nothing_is_written(fake_aws, tmp_path, capsys, changes, words):
    fake_aws(**changes)
    assert run(tmp_path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in words), line
    assert not (tmp_path / "dist").exists()


def test_without_the_aws_command_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(tmp_path) == 2
    assert "the aws command is missing; install the AWS CLI" in capsys.readouterr().err


def test_manifests_take_the_image_that_was_built_unless_another_is_named(tmp_path):
    def command(*settings):
        done = subprocess.run(
            ["make", "--no-print-directory", "--dry-run", "--assume-old=.venv/.ready", "manifests", *settings],
            cwd=ROOT,
            env={"PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    built = tmp_path / "image.txt"
    assert "--image" not in command(f"IMAGE_FILE={built}")
    built.write_text(IMAGE + "\n")
    assert f"--image {IMAGE}" in command(f"IMAGE_FILE={built}")
    assert "--image other@sha256:0" in command(f"IMAGE_FILE={built}", "IMAGE=other@sha256:0")
