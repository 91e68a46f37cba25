"""What AWS or Kubernetes would refuse in a deployment file, all of it at once: `python -m config.check FILE [--json]`.

With --template the files are CloudFormation templates of one deployment (JSON), also of others' making: the rules that
run with every synth (config/template_rules.py) look at them.

Exit code 0: clean; 1: findings; 2: a file can't be read. Starts no CDK, so it takes a second at most. --json prints a
list of {path, value, rule, fix, source}, all of them text, in the order of the readable form.
"""

import argparse
import copy
import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from config.deployment import DeploymentConfig
from config.document import read
from config.finding import Finding
from config.template_rules import template_findings

_ROUNDS = 25  # far more than a file has layers of errors

# What stands in for a required value that is wrong, so that the rules behind it still run on the rest of the file.
_STAND_INS: dict[str, Any] = {
    "cluster": {"region": "us-west-2", "availability_zone": "us-west-2a", "second_availability_zone": "us-west-2b"},
    "cluster.region": "us-west-2",
    "cluster.availability_zone": "us-west-2a",
    "cluster.second_availability_zone": "us-west-2b",
    "cluster.capacity": {"kind": "on_demand"},
    "cluster.capacity.reservation_id": "cr-0123456789abcdef0",
    "job": {"name": "job", "node_count": 1, "nproc_per_node": 1, "image": "trainer@sha256:" + "0" * 64},
    "job.name": "job",
    "job.node_count": 1,
    "job.nproc_per_node": 1,
    "job.instance_type": "p5.48xlarge",
    "job.image": "trainer@sha256:" + "0" * 64,
    "train.run_name": "run",
    "train.model": "debug-3m",
    "train.run_directory": "/fsx/runs/run",
    "train.data": {"path": "/fsx/data/corpus", "tokenizer": "bytes"},
    "train.data.path": "/fsx/data/corpus",
    "train.data.tokenizer": "bytes",
    "train.total_steps": 1_000_000,
    "train.seq_len": 1,
    "train.micro_batch_size": 1,
    "train.global_batch_size": 1,
    "train": {
        "run_name": "run",
        "model": "debug-3m",
        "run_directory": "/fsx/runs/run",
        "data": {"path": "/fsx/data/corpus", "tokenizer": "bytes"},
        "total_steps": 1_000_000,
        "seq_len": 1,
        "micro_batch_size": 1,
        "global_batch_size": 1,
        "checkpoint": {"directory": "/fsx/runs/run/checkpoints", "interval_steps": 1},
    },
    "train.checkpoint": {"directory": "/fsx/runs/run/checkpoints", "interval_steps": 1},
    "train.checkpoint.interval_steps": 1,
    "train.checkpoint.directory": "/fsx/runs/run/checkpoints",
}
# Rules whose text does not name every field that they depend on: word of the text -> fields.
_IMPLIED = {
    "ranks": ("node_count", "nproc_per_node", "instance_type", "micro_batch_size", "global_batch_size"),
    "GPUs": ("instance_type",),
    "instances": ("node_count", "spare_count", "capacity", "kind"),
    "addresses": ("node_count", "spare_count", "vpc_cidr"),
    "zone": ("region", "availability_zone", "second_availability_zone"),
}

_GUIDE = "https://docs.aws.amazon.com"
# The most specific prefix of the path says where the rule is from.
_SOURCES = {
    "cluster": f"{_GUIDE}/eks/latest/userguide/create-cluster.html",
    "cluster.region": f"{_GUIDE}/eks/latest/userguide/add-ons-images.html",
    "cluster.availability_zone": "https://github.com/aws/containers-roadmap/issues/2204",
    "cluster.second_availability_zone": f"{_GUIDE}/eks/latest/userguide/network-reqs.html",
    "cluster.vpc_cidr": f"{_GUIDE}/vpc/latest/userguide/vpc-cidr-blocks.html",
    "cluster.kubernetes_version": f"{_GUIDE}/eks/latest/userguide/kubernetes-versions.html",
    "cluster.ami_release_version": f"{_GUIDE}/eks/latest/userguide/eks-linux-ami-versions.html",
    "cluster.endpoint_public_cidrs": f"{_GUIDE}/eks/latest/userguide/cluster-endpoint.html",
    "cluster.capacity": f"{_GUIDE}/eks/latest/userguide/capacity-blocks-mng.html",
    "cluster.storage": f"{_GUIDE}/fsx/latest/LustreGuide/increase-storage-capacity.html",
    "cluster.system_nodes": f"{_GUIDE}/AWSCloudFormation/latest/UserGuide/aws-resource-eks-nodegroup.html",
    "cluster.network": f"{_GUIDE}/eks/latest/userguide/private-clusters.html",
    "cluster.observability": f"{_GUIDE}/cost-management/latest/userguide/budgets-managing-costs.html",
    "job.instance_type": f"{_GUIDE}/AWSEC2/latest/UserGuide/efa-acc-inst-types.html",
    "job.name": "https://kubernetes.io/docs/concepts/overview/working-with-objects/names/",
    "job.namespace": "https://kubernetes.io/docs/concepts/overview/working-with-objects/names/",
    "job.image": "https://kubernetes.io/docs/concepts/containers/images/",
    "job.storage": "https://github.com/kubernetes-sigs/aws-fsx-csi-driver/blob/master/docs/README.md",
    "": "deployments/schema.json, training/config.py",
}

# pydantic's own errors in a reader's words, and their fixes: its text is the rule alone.
_RULES = {
    "missing": "is needed",
    "extra_forbidden": "unknown key",
    "model_type": "must be a section with settings of its own",
    "union_tag_not_found": "needs a kind",
}
_FIXES = {
    "missing": "add it",
    "model_type": "write its settings below it, as deployments/p5-2node.yaml does",
    "extra_forbidden": "check its spelling against deployments/schema.json; an unknown key would be ignored",
    "literal_error": "choose one of those",
    "union_tag_invalid": "choose one of those",
    "union_tag_not_found": "add kind, for example on_demand",
    "string_pattern_mismatch": "write it in that pattern",
}


def check(document: dict[str, Any], name: str) -> list[Finding]:
    """Every finding in a deployment file's content; `name` is the file's name without .yaml."""
    return list(_findings({"name": name, **copy.deepcopy(document)}))


def _findings(document: dict[str, Any]) -> Iterator[Finding]:
    """Validate, put something valid in the place of what is wrong, validate again.

    pydantic runs a section's rules about several fields only once each field is right by itself, and those about
    several sections last: without the stand-ins their errors would come to light one run later. A later error that
    depends on a stand-in is nobody's mistake and is left out.
    """
    original, mended = copy.deepcopy(document), set[str]()
    for round_ in range(_ROUNDS):
        try:
            DeploymentConfig.model_validate(document)
        except ValidationError as error:
            problems = [problem for item in error.errors() for problem in _problems(item, original)]
        else:
            return
        for problem in problems:
            if round_ == 0 or not _depends_on(problem, mended):
                yield problem
        for path in dict.fromkeys(problem.path for problem in problems):
            _mend(document, path, mended)


def _problems(item: Any, document: dict[str, Any]) -> Iterator[Finding]:
    """One error of pydantic's as findings: a rule on several fields reports a line for each contradiction."""
    for message in item["msg"].removeprefix("Value error, ").splitlines():
        path = _named_field(_place(item["loc"], document), message, document)
        rule, _, fix = message.partition("; ")
        # "Input should be greater than 0" is pydantic's rule; "make it greater than 0" is what to do about it.
        wanted = re.sub(r"^Input should be ", "", rule).partition(", unable")[0]
        rule = _RULES.get(item["type"], re.sub(r"^Input should be ", "must be ", rule))
        fix = fix.replace("known: ", "choose one of ") or _FIXES.get(item["type"], f"make it {wanted}")
        yield Finding(path or "(top level)", _shown(document, path), rule, fix, _source(path))


def _place(location: tuple[int | str, ...], document: Any) -> str:
    """Path in the file; pydantic's location also names the member of a union, which is no key."""
    parts, here = [], document
    for part in location:
        if isinstance(here, dict) and part not in here and part == here.get("kind"):
            continue
        parts.append(str(part))
        if isinstance(here, dict):
            here = here.get(part)
        elif isinstance(here, list) and isinstance(part, int) and part < len(here):
            here = here[part]
        else:
            here = None
    return ".".join(parts)


def _named_field(section: str, message: str, document: dict[str, Any]) -> str:
    """The field that a rule on several speaks of. By our convention (README, style) it stands first in the text."""
    inner = re.fullmatch(r"(?:(train): )?([a-z_]+(?:\.[a-z_]+)*)\b.*", message)
    if inner is None or not _is_section(section, document):
        return section
    return ".".join(part for part in (section, inner[1], inner[2]) if part)


def _is_section(path: str, document: dict[str, Any]) -> bool:
    return isinstance(_get(document, path), dict)


def _get(document: Any, path: str) -> Any:
    here = document
    for part in path.split(".") if path else ():
        if isinstance(here, dict):
            here = here.get(part)
        elif isinstance(here, list) and part.isdigit() and int(part) < len(here):
            here = here[int(part)]
        else:
            return None
    return here


def _shown(document: dict[str, Any], path: str) -> str:
    value = _get(document, path)
    if value is None:
        return "not given"
    text = "(section)" if isinstance(value, dict) else json.dumps(value, default=str)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _source(path: str) -> str:
    parts = path.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((_SOURCES[prefix] for prefix in prefixes if prefix in _SOURCES), _SOURCES[""])


def _depends_on(problem: Finding, mended: set[str]) -> bool:
    """Whether it is about something that a stand-in replaced: the path itself, or a field that the text names."""
    if any(problem.path == path or problem.path.startswith(f"{path}.") for path in mended):
        return True
    words = set(re.findall(r"[A-Za-z_]+", problem.rule))
    words |= {field for word in words & _IMPLIED.keys() for field in _IMPLIED[word]}
    return any(path.rpartition(".")[2] in words for path in mended)


def _mend(document: dict[str, Any], path: str, mended: set[str]) -> None:
    """Put a stand-in, or the default, at `path`; where that did not help before, at the section around it."""
    while path in mended and "." in path:
        path = path.rpartition(".")[0]
    mended.add(path)
    parent_path, _, key = path.rpartition(".")
    parent = _get(document, parent_path)
    if isinstance(parent, list) and key.isdigit():
        # A member of a list: the list goes, since the others would move.
        _mend(document, parent_path, mended)
    elif isinstance(parent, dict):
        parent.pop(key, None)
        if path in _STAND_INS:
            parent[key] = copy.deepcopy(_STAND_INS[path])


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="config.check", description="find what AWS or Kubernetes would refuse")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="deployment file")
    parser.add_argument("--template", action="store_true", help="the files are CloudFormation templates (JSON)")
    parser.add_argument("--json", action="store_true", help="a list of {path, value, rule, fix, source} on stdout")
    arguments = parser.parse_args(argv)
    files: list[Path] = arguments.files
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # half a surrogate pair is valid JSON, and no UTF-8
    try:
        if arguments.template:
            findings = template_findings(_templates(files))
        else:
            findings = [finding for path in files for finding in check(read(path), path.stem)]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RecursionError:
        print(f"error: {', '.join(map(str, files))}: nested too deeply to be read; nothing real is", file=sys.stderr)
        return 2
    named = ", ".join(map(str, files))
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    elif findings:
        print(*findings, sep="\n")
        print(f"{named}: {len(findings)} to mend")
    else:
        print(f"{named}: nothing that AWS or Kubernetes would refuse")
    return 1 if findings else 0


def _templates(files: list[Path]) -> dict[str, Any]:
    """The templates by stack name, which is the file's name up to its first dot."""
    templates: dict[str, Any] = {}
    for path in files:
        name = path.name.partition(".")[0]
        if name in templates:
            raise ValueError(f"{path}: a second template named {name}; check one deployment at a time")
        templates[name] = _template(path)
    return templates


def _template(path: Path) -> dict[str, Any]:
    try:
        template = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); convert a YAML template first") from error
    resources = template.get("Resources") if isinstance(template, dict) else None
    if not isinstance(resources, dict) or not all(
        isinstance(one, dict) and isinstance(one.get("Type"), str) for one in resources.values()
    ):
        raise ValueError(f"{path}: no CloudFormation template; it has no Resources, each with a Type")
    return template


if __name__ == "__main__":
    sys.exit(main())
