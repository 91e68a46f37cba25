"""What AWS would refuse in synthesized templates: a pure function over plain dictionaries, run by every synth.

cfn-lint finds 2 of the 17 defects that its tests seed (docs/decisions.md); everything here is from AWS's
documentation or from somebody's failed deployment, linked in each finding.
"""

from collections.abc import Mapping
from typing import Any

from config.finding import Finding
from config.rules import cluster, file_system, interfaces, launch, network
from config.rules.node_group import node_groups
from config.rules.template import Templates


def template_findings(templates: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """All findings in the templates of one deployment, which are given by stack name."""
    resolved = Templates(templates)
    findings = list(resolved.findings)
    for group in node_groups(resolved):
        for rule in (*launch.RULES, *interfaces.RULES, *network.RULES, *cluster.GROUP_RULES):
            findings += rule(group)
    for fs in file_system.file_systems(resolved):
        for rule in file_system.RULES:
            findings += rule(fs)
    for rule in cluster.RULES:
        findings += rule(resolved)
    return findings


def refuse(templates: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError with every finding, if there is one."""
    findings = template_findings(templates)
    if findings:
        raise ValueError(
            f"{len(findings)} problems that AWS would report only while deploying\n" + "\n".join(map(str, findings))
        )
