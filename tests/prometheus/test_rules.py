"""The rule files, as Prometheus' own tool sees them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import promlab
import pytest
import yaml

PROMTOOL = promlab.find_tool("promtool") or ""
pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(not PROMTOOL, reason="promtool is missing (make setup unpacks Debian's package prometheus)"),
]

FOLDER = promlab.ROOT / "monitoring" / "rules"
RULES = sorted(FOLDER.glob("*.rules.yaml"))
SCRAPES = sorted((promlab.ROOT / "monitoring" / "scrape").glob("*.yaml"))
TESTS = sorted(FOLDER.glob("*.rules.test.yaml"))


def run(*arguments: str) -> str:
    """What promtool prints; it must have no complaint."""
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.stem)
def test_rules_are_valid(path: Path) -> None:
    """Promtool finds every rule of a file, and nothing wrong with it."""
    count = sum(len(group["rules"]) for group in yaml.safe_load(path.read_text())["groups"])

    assert f"SUCCESS: {count} rules found" in run("check", "rules", "--lint-fatal", str(path))


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_rules_give_what_their_tests_say(path: Path) -> None:
    """The rules turn the sample series of their test file into the values that stand there."""
    assert "SUCCESS" in run("test", "rules", str(path))


def test_every_rule_is_tested() -> None:
    """Each recorded series is evaluated in a test file."""
    recorded = {
        r["record"] for path in RULES for group in yaml.safe_load(path.read_text())["groups"] for r in group["rules"]
    }
    tested = {name for path in TESTS for name in re.findall(r"expr: (\S+:\S+)", path.read_text())}

    assert recorded == tested


@pytest.mark.parametrize("path", SCRAPES, ids=lambda path: path.stem)
def test_scrape_configuration_is_valid(path: Path, tmp_path: Path) -> None:
    """Prometheus would take each example of a scrape configuration."""
    # Debian builds Prometheus without Kubernetes' discovery; everything else of that example is checked all the same
    text = path.read_text().replace("kubernetes_sd_configs: [{role: node}]", "static_configs: [{targets: [n1:10250]}]")
    (tmp_path / "prometheus.yaml").write_text(text)

    assert "SUCCESS" in run("check", "config", "--syntax-only", str(tmp_path / "prometheus.yaml"))
