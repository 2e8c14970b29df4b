"""SpecLA's studies on this machine (arXiv 2607.16673): `specdec bench --study specla`."""

from __future__ import annotations

from specdec.bench.studies import acceptance, commits, decoding, tree_verification
from specdec.bench.studies.report import Study

STUDY = Study(
    "specla",
    "SpecLA's studies on this machine",
    "The paper is arXiv 2607.16673; its figures are of an H100 and another model.",
    {
        "acceptance": acceptance,
        "trees": tree_verification,
        "commits": commits,
        "decoding": decoding,
    },
)
