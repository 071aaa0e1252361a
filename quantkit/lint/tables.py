"""A Report for people: one table a severity, and a line of verdicts."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from quantkit.lint.finding import Finding, Severity
from quantkit.lint.report import Report

STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


def make_tables(report: Report) -> Iterator[tuple[Text, Table]]:
    """Yield a title and a table of the findings of each severity, the worst first."""
    for severity in Severity:
        findings = [f for f in report.findings if f.severity is severity]
        if findings:
            count = f"{len(findings)} {severity}{'s' if len(findings) > 1 else ''}"
            yield Text(count, style=STYLES[severity]), _table(findings)


def _table(findings: list[Finding]) -> Table:
    table = Table(box=box.HORIZONTALS, show_lines=True)
    table.add_column("engine", no_wrap=True)
    table.add_column("rule, where, what is wrong, what to do", overflow="fold")
    for finding in findings:
        table.add_row("\n".join(finding.engines), _described(finding))
    return table


def _described(finding: Finding) -> Text:
    advice = f"\n-> {finding.advice}" if finding.advice else ""
    return Text.assemble((finding.rule, "bold"), f"\n{finding.where}\n{finding.problem}{advice}")
