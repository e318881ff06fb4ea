"""The metrics that the Grafana dashboard shows, and those that a live server exports."""

import json
import re
from pathlib import Path
from typing import Any

from launch.server import ServerProcess

DASHBOARD = json.loads((Path(__file__).parents[2] / "launch" / "grafana.json").read_text())
METRIC = r"sglang:sparse_\w+"


def shown_by_row() -> dict[str, set[str]]:
    """The metrics of the panels under each row, by the first word of its title."""
    found: dict[str, set[str]] = {}
    row: set[str] = set()
    for panel in DASHBOARD["panels"]:
        if panel["type"] == "row":
            row = found[panel["title"].split()[0]] = set()
        else:
            row |= {name for target in panel["targets"] for name in re.findall(METRIC, target["expr"])}
    return found


def exported(server: ServerProcess) -> dict[str, float]:
    """The plugin's metrics of a server with ``--enable-metrics``: the values of its first rank."""
    text = server.client.get("/metrics").raise_for_status().text
    found = re.findall(rf"^({METRIC})\{{([^}}]*)\}} (\S+)$", text, re.M)
    return {name: float(value) for name, labels, value in found if 'tp_rank="0"' in labels}


def assert_dashboard_shows(server: ServerProcess, *rows: str) -> None:
    """The rows that a server has panels for show exactly what it exports."""
    shown: dict[str, Any] = shown_by_row()
    assert set(exported(server)) == {name for row in rows for name in shown[row]}
