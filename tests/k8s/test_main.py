"""The command line that writes the manifests."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from k8s import main as k8s_main

ROOT = Path(__file__).resolve().parents[2]
LOCAL = str(ROOT / "deployments" / "local.yaml")
P5 = str(ROOT / "deployments" / "p5-2node.yaml")
IMAGE = "123456789012.dkr.ecr.us-west-2.amazonaws.com/trainer@sha256:" + "ab" * 32


def run(*arguments):
    return k8s_main.main([str(argument) for argument in arguments])


def test_it_writes_the_files_and_names_them_in_the_order_to_apply(tmp_path, capsys):
    out = tmp_path / "dist" / "local"
    assert run("--deployment", LOCAL, "--out", out) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [str(out / "0000-local-shared.k8s.yaml"), str(out / "0001-local.k8s.yaml")]
    assert sorted(str(path) for path in out.iterdir()) == printed
    assert [path.name for path in (tmp_path / "dist").iterdir()] == ["local"]


def test_two_processes_write_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        command = [sys.executable, "-m", "k8s.main", "--deployment", P5, "--out", str(tmp_path / name)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert sorted(one) == ["0000-llama-8b-shared.k8s.yaml", "0001-llama-8b.k8s.yaml"]
    assert one == two


def test_a_second_run_replaces_what_the_first_wrote(tmp_path, capsys):
    out = tmp_path / "out"
    assert run("--deployment", LOCAL, "--out", out) == 0
    assert run("--deployment", P5, "--out", out) == 0
    assert sorted(path.name for path in out.iterdir()) == ["0000-llama-8b-shared.k8s.yaml", "0001-llama-8b.k8s.yaml"]


def test_the_image_given_is_used_everywhere_and_the_placeholder_is_told_of(tmp_path, capsys):
    assert run("--deployment", P5, "--out", tmp_path / "out") == 0
    assert "placeholder" in capsys.readouterr().err
    assert run("--deployment", P5, "--out", tmp_path / "out", "--image", IMAGE) == 0
    assert capsys.readouterr().err == ""
    text = (tmp_path / "out" / "0001-llama-8b.k8s.yaml").read_text()
    assert text.count(f"image: {IMAGE}\n") == 3
    assert "trainer@sha256:0000" not in text


@pytest.mark.parametrize("image", ["trainer", "trainer:latest", "trainer@sha256:abc", "Trainer@sha256:" + "0" * 64])
def test_an_image_that_is_not_pinned_is_refused(tmp_path, capsys, image):
    assert run("--deployment", LOCAL, "--out", tmp_path / "out", "--image", image) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --image: image: an image must be pinned by digest;")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_deployment_that_is_not_there_is_one_line(tmp_path, capsys):
    assert run("--deployment", tmp_path / "none.yaml", "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_a_deployment_that_breaks_a_rule_leaves_the_old_manifests(tmp_path, capsys):
    out, broken = tmp_path / "out", tmp_path / "broken.yaml"
    assert run("--deployment", LOCAL, "--out", out) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    document = yaml.safe_load(Path(LOCAL).read_text())
    document["job"]["node_count"] = 0
    broken.write_text(yaml.safe_dump(document))
    assert run("--deployment", broken, "--out", out) == 2
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_a_place_that_cannot_be_written_is_one_line(tmp_path, capsys, out):
    (tmp_path / "file").write_text("kept")
    assert run("--deployment", LOCAL, "--out", tmp_path / out) == 2
    error = capsys.readouterr().err
    assert "cannot be written" in error
    assert error.count("\n") == 1
    assert (tmp_path / "file").read_text() == "kept"


def test_a_folder_with_other_files_is_never_replaced(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("kept")
    assert run("--deployment", LOCAL, "--out", tmp_path) == 2
    assert "thesis.txt" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "kept"


def test_a_failure_halfway_leaves_the_old_manifests_and_no_scratch(tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert run("--deployment", LOCAL, "--out", out) == 0

    def fail(app, deployment, chart):
        raise RuntimeError("halfway")

    monkeypatch.setattr(k8s_main, "build", fail)
    with pytest.raises(RuntimeError):
        run("--deployment", LOCAL, "--out", out)
    assert len(list(out.iterdir())) == 2
    assert list(tmp_path.iterdir()) == [out]


def test_a_job_may_be_called_like_a_chart(render, changed):
    assert render(changed("local", job={"name": "namespace"})).only("JobSet")["metadata"]["name"] == "namespace"
