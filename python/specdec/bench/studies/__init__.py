"""Studies: measurements of several parts with one report, behind `specdec bench --study`."""
