"""What YAML takes in silence, and nobody means."""

import pytest

from config.document import read


def refusal(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="mine.yaml: ") as caught:
        read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("job: 1\ntrain: 2\njob: 3\n", "line 3: job stands twice in one mapping"),
        ("job:\n  name: a\n  name: b\n", "line 3: name stands twice"),
        ("job: {1: 2}\n", "the key 1 is no text to YAML"),
        ("job: {on: 2}\n", "the key True is no text to YAML; put it in quotes"),
        ("job: &a [*a]\n", "recursive"),
        ("job: &a {b: *a}\n", "recursive"),
        ('job: "\\ud800"\n', "half a surrogate pair"),
        ("? [a]\n: 1\n", "no text"),
        ("job: 2020-13-45\n", "put such a value in quotes"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("a: 1\n---\nb: 2\n", "another document"),
        ("a: !!python/object:os.system x\n", "line 1"),
        ("a: !!map 3\n", "no mapping"),
        ("", "must be a mapping"),
        ("3", "must be a mapping"),
    ],
)
def test_what_is_refused_is_one_line_that_says_where(tmp_path, text, words):
    assert words in refusal(tmp_path, text)


def test_what_is_no_text_and_what_is_no_file_is_one_line(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not YAML"):
        read(tmp_path / "x.yaml")
    with pytest.raises(ValueError, match="Is a directory"):
        read(tmp_path)


def test_anchors_and_merges_stay_what_they_are(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: *a\nd: [*a, 2020-01-01]\n")
    document = read(path)
    assert document["b"] == {"x": 1, "y": 3}
    assert document["c"] == {"x": 1, "y": 2}
