"""One thing that AWS or Kubernetes would refuse, or that would fail in silence: where, what, why, how to mend it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """`path` leads to the field, in the deployment file or in a template (`Stack/LogicalId.Property`)."""

    path: str
    value: str
    rule: str
    fix: str
    source: str

    def __str__(self) -> str:
        """The finding on four short lines, for people; `--json` gives the fields."""
        first = f"{self.path}: {self.value or 'empty'}"
        return f"{first}\n    rule: {self.rule}\n    fix:  {self.fix}\n    see:  {self.source}"
