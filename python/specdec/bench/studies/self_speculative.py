"""Self-speculative decoding on this machine (arXiv 2309.08168): `specdec bench --study self-speculative`."""

from __future__ import annotations

from specdec.bench.studies import draft_costs, exits
from specdec.bench.studies.report import Study

STUDY = Study(
    "self-speculative",
    "Self-speculative decoding on this machine",
    "The paper is arXiv 2309.08168; its figures are of GPUs and of models of 7 to 70 billion weights.",
    {"costs": draft_costs, "exits": exits},
)
