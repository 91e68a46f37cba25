"""Where the corpus lies for the runs of a drill."""

import pytest

from config.deployment import load
from drills.run import _corpus, link_corpus
from tests.drills.harness import write_deployment


@pytest.mark.parametrize("path", ["/fsx/data/python-stdlib", "/fsx/corpora/deep/python", "/fsx/corpus"])
def test_each_run_finds_the_corpus_wherever_data_path_says_and_shares_nothing_else(tmp_path, path):
    deployment = load(write_deployment(tmp_path / "one.yaml", data={"path": path, "tokenizer": "bytes"}))
    out = tmp_path / "out"
    _corpus(deployment, out).mkdir(parents=True)
    (_corpus(deployment, out) / "index.json").touch()
    for label in ("reference", "run"):
        link_corpus(deployment, out, out / label)
        assert (out / label / path.removeprefix("/fsx/") / "index.json").is_file()
    # A run directory below the same folder belongs to one run alone.
    (out / "reference" / "data" / "runs").mkdir(parents=True)
    assert not (out / "run" / "data" / "runs").exists()
