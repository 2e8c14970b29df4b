"""HiSpec on this machine (arXiv 2510.01336): `specdec bench --study hispec`."""

from __future__ import annotations

from specdec.bench.studies import tier_memory, tiers
from specdec.bench.studies.report import Study

STUDY = Study(
    "hispec",
    "Early exits in two and three tiers on this machine",
    "The paper is arXiv 2510.01336; its figures are of LayerSkip checkpoints on an H100.",
    {"tiers": tiers, "memory": tier_memory},
)
