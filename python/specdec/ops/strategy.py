"""Which verification strategy to run: a table of measured winners, looked up at the nearest measured shape.

The package ships a table (`strategy_table.json`); `specdec tune --kernels` writes one for the user's machine
to `user_table_path()`, whose instruction sets then take the place of the shipped ones. A shape is a point
(B * HV, N, DK * DV), on a chain or a tree; nearest means nearest in the logarithms.

File format, version 1:

    {"version": 1, "tables": {"avx512": {"threads": 2, "points": [
        {"rows": 8, "nodes": 16, "state": 65536, "tree": false,
         "us": {"serial": 610.0, "solve": 402.5}}]}}}

`us` holds the microseconds of every strategy that was measured there. On a chain hybrid is serial and is left
out.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping
from functools import lru_cache
from operator import index
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch

from specdec._checks import is_integer, is_number, shown
from specdec._host import MAX_SERIAL_NODES

STRATEGIES = ("serial", "hybrid", "solve")
# Where kernels run on a GPU there is no measured table: a rule stands in, see `_choose_gpu`.
GPU = "gpu"
GPU_SOLVE_NODES = 16  # from here on `auto` solves
GPU_ENOUGH_ROWS = 32  # B * HV from which serial walks alone keep a GPU busy
VERSION = 1
# A strategy must win by this much to displace an earlier one of STRATEGIES: between equals the exact ones
# stay.
MARGIN = 0.02
_MOST = 1 << 63  # of any number in a table, so that ratios of them are finite
_ISAS = ("avx512", "avx2", "portable")


class Point(NamedTuple):
    """One measured shape: B * HV, N, DK * DV, chain or tree, and the microseconds of each strategy."""

    rows: int
    nodes: int
    state: int
    tree: bool
    us: dict[str, float]


class Table(NamedTuple):
    """Measured points of one instruction set, and the number of threads that they were measured with."""

    threads: int
    points: list[Point]


class TableError(ValueError):
    """A strategy table that does not have the format of this module; the message names file and entry."""


def shipped_table_path() -> Path:
    """The table in the package."""
    return Path(__file__).with_name("strategy_table.json")


def user_table_path() -> Path:
    """Where `specdec tune --kernels` writes: `specdec/strategy.json` in $XDG_CACHE_HOME, or in ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "specdec" / "strategy.json"


def read_tables(path: Path) -> dict[str, Table]:
    """The tables of a file by instruction set.

    Raises:
        TableError: the file is not JSON, has another version, or an entry is malformed.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # of text and of JSON; of JSON nested too deeply
        raise TableError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict) or content.get("version") != VERSION:
        version = content.get("version") if isinstance(content, dict) else None
        raise TableError(f"{path}: got version {shown(version)}, want {VERSION}")
    tables = content.get("tables")
    if not isinstance(tables, dict):
        raise TableError(f"{path}: tables: got {type(tables).__name__}, want an object")
    return {isa: _parse_table(path, isa, table) for isa, table in tables.items()}


def write_tables(path: Path, tables: Mapping[str, Table]) -> None:
    """Writes `tables` so that a reader sees the old file or the new one, never half of it."""
    content: dict[str, Any] = {"version": VERSION, "tables": {}}
    for isa, table in sorted(tables.items()):
        points = [point._asdict() for point in sorted(table.points)]
        content["tables"][isa] = {"threads": table.threads, "points": points}
    lines = json.dumps(content, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(_one_line_a_point(lines), encoding="utf-8")
    os.replace(scratch, path)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def resolve(
    strategy: str,
    isa: str,
    B: int,
    N: int,
    HV: int,
    DK: int,
    DV: int,
    tree: bool,
    prefix: bool = False,
) -> str:
    """The strategy to run: "serial", "hybrid" or "solve".

    Args:
        strategy: one of these, which is returned as it is; "exact", the faster of serial and hybrid, whose
            bits are those of decoding token by token; or "auto", the fastest of the three.
        isa: the instruction set that runs, `specdec.ops.cpu_isa()`, or `GPU`.
        B, N, HV, DK, DV: as in `specdec.ops.verify`.
        tree: whether `parents` is given.
        prefix: whether a prefix is given, which solve does not take.

    Raises:
        ValueError: `strategy` is none of the five.

    Example:
        >>> resolve("auto", "avx512", B=1, N=1, HV=8, DK=256, DV=256, tree=False)
        'serial'
    """
    if strategy in STRATEGIES:
        return strategy
    if strategy not in ("exact", "auto"):
        raise ValueError(
            f"strategy: got {shown(strategy)}, want 'serial', 'hybrid', 'solve', 'exact' or 'auto'"
        )
    exact = strategy == "exact" or prefix
    return _choose(isa, exact, B * HV, N, DK * DV, tree)


def resolve_shapes(
    strategy: str, isa: str, q: tuple[int, ...], v: tuple[int, ...], tree: bool, prefix: bool
) -> str:
    """`resolve` for the shapes of q [B, N, HK, DK] and v [B, N, HV, DV], remembered.

    At one token a call of the operator takes 100 us and has swept the interpreter out of the caches, so that
    every line of Python before it is felt: this is one look-up. Under torch.compile the choice depends on the
    sizes, so that dynamic ones become fixed.
    """
    if torch.compiler.is_compiling():
        return str(resolve(strategy, isa, *map(index, _sizes(q, v)), tree, prefix))
    try:
        return _resolved(strategy, isa, q, v, tree, prefix)
    except TypeError:  # a strategy that cannot be hashed
        return str(resolve(strategy, isa, *_sizes(q, v), tree, prefix))


def reload() -> None:
    """Forgets the tables that were read: the next `resolve` reads them again."""
    user_tables.cache_clear()
    _tables.cache_clear()
    _resolved.cache_clear()


@lru_cache(maxsize=4096)
def _resolved(
    strategy: str, isa: str, q: tuple[int, ...], v: tuple[int, ...], tree: bool, prefix: bool
) -> str:
    return str(resolve(strategy, isa, *_sizes(q, v), tree, prefix))


def _sizes(q: tuple[int, ...], v: tuple[int, ...]) -> tuple[int, int, int, int, int]:
    (B, N, _, DK), (_, _, HV, DV) = q, v
    return B, N, HV, DK, DV


def _choose(isa: str, exact: bool, rows: int, nodes: int, state: int, tree: bool) -> str:
    if nodes <= 1 or rows == 0:
        return "serial"
    if nodes > MAX_SERIAL_NODES and not exact:
        return "solve"
    if isa == GPU:
        return _choose_gpu(exact, rows, nodes, tree)
    tables = _tables()
    known = next((name for name in (isa, *_ISAS) if name in tables), None)
    points = [point for point in tables[known].points if point.tree == tree] if known is not None else []
    if not points:
        return "serial"
    return winner(min(points, key=lambda point: _distance(point, rows, nodes, state)).us, exact)


def _choose_gpu(exact: bool, rows: int, nodes: int, tree: bool) -> str:
    """The rule of a GPU. A serial walk reads the state once and takes a step a node, one after the other;
    solve reads it once and takes matrix products, which pay from some nodes on. Hybrid walks the chains of a
    tree side by side at the price of states in memory: for trees whose walks would leave the GPU idle.
    """
    if not exact and nodes >= GPU_SOLVE_NODES:
        return "solve"
    return "hybrid" if tree and rows < GPU_ENOUGH_ROWS else "serial"


def winner(us: Mapping[str, float], exact: bool) -> str:
    """The fastest strategy of those measured, ties within MARGIN to the earlier one of STRATEGIES."""
    best = "serial"
    for strategy in STRATEGIES[1:2] if exact else STRATEGIES[1:]:
        if us.get(strategy, math.inf) < (1.0 - MARGIN) * us[best]:
            best = strategy
    return best


def _distance(point: Point, rows: int, nodes: int, state: int) -> float:
    # The number of nodes decides most, so a point off by a factor in N is farther than one off in the others.
    return (
        abs(math.log(point.rows / rows))
        + 4.0 * abs(math.log(point.nodes / nodes))
        + abs(math.log(point.state / state))
    )


@lru_cache(maxsize=1)
def user_tables() -> Mapping[str, Table]:
    """The tables of `specdec tune --kernels`, read once; none where there is no such file.

    A file that is damaged only costs speed, so it is left out with one warning (RuntimeWarning).
    """
    user = user_table_path()
    try:
        return read_tables(user) if os.path.exists(user) else {}
    except TableError as error:
        warnings.warn(
            f"{error}; the table of the package is used. Delete the file or run `specdec tune --kernels`.",
            RuntimeWarning,
            stacklevel=2,
        )
        return {}


@lru_cache(maxsize=1)
def _tables() -> dict[str, Table]:
    """The shipped tables under those of the user."""
    return read_tables(shipped_table_path()) | dict(user_tables())


def _parse_table(path: Path, isa: str, table: object) -> Table:
    where = f"{path}: tables.{isa}"
    if isa not in _ISAS:
        raise TableError(f"{where}: want one of {', '.join(_ISAS)}")
    if not isinstance(table, dict) or not isinstance(table.get("points"), list):
        raise TableError(f"{where}: want an object with threads and points")
    if not _is_count(table.get("threads")):
        raise TableError(f"{where}.threads: got {shown(table.get('threads'))}, want a positive integer")
    points = [_parse_point(f"{where}.points[{i}]", entry) for i, entry in enumerate(table["points"])]
    return Table(table["threads"], points)


def _parse_point(where: str, entry: object) -> Point:
    if not isinstance(entry, dict) or set(entry) != set(Point._fields):
        raise TableError(f"{where}: want an object with {', '.join(Point._fields)}")
    for name in ("rows", "nodes", "state"):
        if not _is_count(entry[name]):
            raise TableError(f"{where}.{name}: got {shown(entry[name])}, want a positive integer")
    if not isinstance(entry["tree"], bool):
        raise TableError(f"{where}.tree: got {shown(entry['tree'])}, want true or false")
    us = entry["us"]
    if not isinstance(us, dict) or "serial" not in us or not set(us) <= set(STRATEGIES):
        raise TableError(
            f"{where}.us: got {shown(us)}, want microseconds of serial and maybe hybrid and solve"
        )
    for name, value in us.items():
        if not is_number(value) or not 0 < value < _MOST:
            raise TableError(f"{where}.us.{name}: got {shown(value)}, want a positive number")
    return Point(**entry)


def _is_count(value: object) -> TypeGuard[int]:
    return is_integer(value) and 0 < value < _MOST


def _one_line_a_point(text: str) -> str:
    """Joins the lines of every point: a table stays readable, and a diff shows points."""
    out: list[str] = []
    inside = False
    for line in text.splitlines():
        stripped = line.strip()
        if inside:
            out[-1] += stripped if stripped.startswith("}") or out[-1].endswith("{") else " " + stripped
            inside = line.rstrip(",") != "    }"
        else:
            out.append(line)
            inside = line == "    {"
    return "\n".join(out) + "\n"
