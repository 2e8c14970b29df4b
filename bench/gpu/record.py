"""Keeps how the parts of run_all.sh ended. Needs nothing but Python.

    record.py part OUT NAME required|optional STATUS SECONDS
    record.py summary OUT

`part` adds a part to OUT/summary.json and sees to it that OUT/NAME.json exists: as the part wrote it, from
the JUnit file OUT/NAME.xml, or, where the part did not end well, with the end of its log. `summary` prints
the table and exits with 1 where a required part did not end well.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

TAIL = 40  # lines


def tests_of(xml: Path) -> dict[str, Any]:
    """Counts and the names of what failed, of a JUnit file as pytest and GoogleTest write it."""
    cases = list(ElementTree.parse(xml).getroot().iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None]
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": len(failed),
        "skipped": len(skipped),
        "failures": [f"{c.get('classname')}.{c.get('name')}" for c in failed],
    }


def part(out: Path, name: str, need: str, status: str, seconds: str) -> None:
    """Records one part."""
    log, result, xml = out / "logs" / f"{name}.log", out / f"{name}.json", out / f"{name}.xml"
    entry: dict[str, Any] = {"part": name, "need": need, "status": status, "seconds": int(seconds)}
    if xml.exists():
        try:
            entry["tests"] = tests_of(xml)
        except ElementTree.ParseError:  # the part was ended while it wrote
            entry["tests"] = None
        xml.unlink()
    if status != "ok":
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        entry["tail"] = lines[-TAIL:]
    if status != "ok" or not result.exists():
        if result.exists():
            result.rename(out / f"{name}.partial.json")
        result.write_text(json.dumps(entry, indent=1) + "\n")
    summary = out / "summary.json"
    entries = json.loads(summary.read_text()) if summary.exists() else []
    summary.write_text(json.dumps([*entries, entry], indent=1) + "\n")


def summarize(out: Path) -> int:
    """Prints one line a part; the exit status of the whole run."""
    entries = json.loads((out / "summary.json").read_text())
    print(f"\n{'part':<11}{'need':<10}{'seconds':>7}  status")
    for entry in entries:
        tests = entry.get("tests")
        counts = ""
        if tests:
            counts = f", {tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped"
        print(f"{entry['part']:<11}{entry['need']:<10}{entry['seconds']:>7}  {entry['status']}{counts}")
        if entry["need"] == "required" and entry["status"] != "ok":
            print("".join(f"    | {line}\n" for line in entry.get("tail", [])[-8:]), end="")
    bad = [e["part"] for e in entries if e["need"] == "required" and e["status"] != "ok"]
    print(f"results in {out}" + (f"; not well: {', '.join(bad)}" if bad else ""))
    return 1 if bad or not entries else 0


if __name__ == "__main__":
    if sys.argv[1] == "part":
        part(Path(sys.argv[2]), *sys.argv[3:])
    else:
        sys.exit(summarize(Path(sys.argv[2])))
