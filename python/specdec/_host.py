"""The compiled host-side structures (csrc/python), with a clear error where they are not built."""

from __future__ import annotations

try:
    from specdec._lib._host import (
        MAX_NODES,
        MAX_SERIAL_NODES,
        SuffixAutomaton,
        TreeSchedule,
        check_tree,
        merge_paths,
    )
except ImportError as error:
    raise ImportError(
        f"specdec's host module is not usable ({error}): run `make build` in the repository, "
        "or `pip install --no-build-isolation .`"
    ) from error

__all__ = ["MAX_NODES", "MAX_SERIAL_NODES", "SuffixAutomaton", "TreeSchedule", "check_tree", "merge_paths"]
