"""Fills the mirror of a cluster without internet: prints a shell script that copies its charts and their images.

`python -m stacks.mirror FILE > mirror.sh`. The script needs helm, crane, and the aws command line with the rights to
create repositories; it runs where there is internet, and again without harm.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from config.deployment import load
from stacks.helm_releases import HelmRelease, upstream_releases

_HEAD = """\
#!/usr/bin/env bash
# Copies what {name} installs to {mirror}: charts to charts/, images to their path without the host.
set -euo pipefail
host={host}
prefix={prefix}
region="$(cut -d. -f4 <<<"$host")"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
aws ecr get-login-password --region "$region" | helm registry login --username AWS --password-stdin "$host"
aws ecr get-login-password --region "$region" | crane auth login --username AWS --password-stdin "$host"

repository() {{  # PATH below the mirror
  aws ecr describe-repositories --region "$region" --repository-names "$prefix$1" >/dev/null 2>&1 ||
    aws ecr create-repository --region "$region" --repository-name "$prefix$1" >/dev/null
}}

chart() {{  # NAME VERSION IMAGE-OR-EMPTY PULL-ARGUMENTS...
  local name="$1" version="$2" image="$3" found
  shift 3
  helm pull "$@" --version "$version" --destination "$work/$name"
  repository "charts/$name"
  helm push "$work/$name"/*.tgz "oci://$host/${{prefix}}charts"
  [[ -n "$image" ]] || return 0  # in the region's own EKS registry
  # The chart knows the tag that belongs to it.
  found="$(helm template "$work/$name"/*.tgz | grep -oE "${{image//./\\\\.}}[:@][A-Za-z0-9._:@-]+" | sort -u)" ||
    {{ echo "error: the chart $name $version names no image $image" >&2; exit 1; }}
  for each in $found; do
    repository "${{image#*/}}"
    crane copy "$each" "$host/$prefix${{each#*/}}"
  done
}}

"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0, or 2 with one line on stderr for what the user can mend."""
    parser = argparse.ArgumentParser(prog="python -m stacks.mirror", description="print the script that fills a mirror")
    parser.add_argument("deployment", type=Path, help="deployments/NAME.yaml, with network.mirror_registry")
    path: Path = parser.parse_args(arguments).deployment
    try:
        print(mirror_script(path), end="")
    except ValueError as error:
        print(f"mirror: {error}", file=sys.stderr)
        return 2
    return 0


def mirror_script(path: Path) -> str:
    """The script for a deployment file; ValueError when it has no mirror, or is not valid."""
    cluster = load(path).cluster
    mirror = None if cluster is None else cluster.network.mirror_registry
    if cluster is None or mirror is None:
        raise ValueError(f"{path}: cluster.network.mirror_registry is not set, so there is nothing to fill; set it")
    host, _, prefix = mirror.partition("/")
    head = _HEAD.format(
        name=path.stem, mirror=mirror, host=shlex.quote(host), prefix=shlex.quote(f"{prefix}/" if prefix else "")
    )
    return head + "".join(_line(release) for release in upstream_releases(cluster))


def _line(release: HelmRelease) -> str:
    from_oci = release.repository.startswith("oci://")
    source = [release.repository] if from_oci else [release.chart, "--repo", release.repository]
    return shlex.join(["chart", release.chart, release.version, release.image or "", *source]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
