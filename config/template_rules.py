"""What AWS would refuse in synthesized templates: a pure function over plain dictionaries, run by every synth.

cfn-lint finds 2 of the 17 defects that its tests seed (docs/decisions.md); everything here is from AWS's
documentation or from somebody's failed deployment, linked in each finding.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from config.finding import Finding
from config.rules import cluster, file_system, interfaces, launch, network
from config.rules.node_group import node_groups
from config.rules.template import Templates


def template_findings(templates: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """All findings in the templates of one deployment, which are given by stack name."""
    resolved = Templates(templates)
    return [*resolved.findings, *(finding for _, about in applied_rules(resolved) for finding in about)]


def applied_rules(templates: Templates) -> Iterator[tuple[Callable[..., Iterator[Finding]], Iterator[Finding]]]:
    """(rule, what it finds) for every rule and every thing in the templates that it is about."""
    for group in node_groups(templates):
        for rule in (*launch.RULES, *interfaces.RULES, *network.RULES, *cluster.GROUP_RULES):
            yield rule, rule(group)
    for fs in file_system.file_systems(templates):
        for rule in file_system.RULES:
            yield rule, rule(fs)
    for rule in cluster.RULES:
        yield rule, rule(templates)


def refuse(templates: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError with every finding, if there is one."""
    findings = template_findings(templates)
    if findings:
        raise ValueError(
            f"{len(findings)} problems that AWS would report only while deploying\n" + "\n".join(map(str, findings))
        )
