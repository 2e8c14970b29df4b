"""The table of measured strategies: its format, the choice it makes, and the command that writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specdec import ops
from specdec.ops import strategy as table
from specdec.tuning.kernels import measure_strategies

SHAPE = {"B": 1, "HV": 8, "DK": 256, "DV": 256}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    table.reload()
    yield
    table.reload()


def write_user_table(*points: table.Point, isa: str = "avx512") -> None:
    table.write_tables(table.user_table_path(), {isa: table.Table(2, list(points))})
    table.reload()


def point(
    nodes: int, serial: float, solve: float, hybrid: float | None = None, **changes: object
) -> table.Point:
    us = {"serial": serial, "solve": solve} | ({} if hybrid is None else {"hybrid": hybrid})
    return table.Point(8, nodes, 65536, hybrid is not None, us)._replace(**changes)


def test_shipped_table_covers_the_instruction_sets() -> None:
    tables = table.read_tables(table.shipped_table_path())
    assert set(tables) == {"avx512", "avx2", "portable"}
    for entry in tables.values():
        assert {p.tree for p in entry.points} == {False, True}
        assert {p.nodes for p in entry.points} >= {2, 8, 16, 64}


def test_explicit_strategies_pass_through() -> None:
    for name in table.STRATEGIES:
        assert table.resolve(name, "avx512", N=7, tree=True, **SHAPE) == name
    with pytest.raises(ValueError, match="strategy: got 'best', want 'serial'"):
        table.resolve("best", "avx512", N=7, tree=True, **SHAPE)
    with pytest.raises(ValueError, match=r"strategy: got \['serial'\], want 'serial'"):
        table.resolve(["serial"], "avx512", N=7, tree=True, **SHAPE)


@pytest.mark.parametrize(
    ("strategy", "nodes", "tree", "prefix", "rows", "want"),
    [
        ("auto", 1, False, False, 8, "serial"),
        ("auto", 15, False, False, 8, "serial"),
        ("auto", 16, False, False, 8, "solve"),
        ("auto", 65, True, False, 512, "solve"),
        ("auto", 16, True, True, 8, "hybrid"),
        ("auto", 15, True, False, 31, "hybrid"),
        ("exact", 64, True, False, 31, "hybrid"),
        ("exact", 64, True, False, 32, "serial"),
        ("exact", 64, False, False, 8, "serial"),
    ],
)
def test_a_gpu_has_a_rule(strategy: str, nodes: int, tree: bool, prefix: bool, rows: int, want: str) -> None:
    write_user_table(point(16, 1.0, 9.0))  # means nothing to it
    shape = {**SHAPE, "B": 1, "HV": rows}
    assert table.resolve(strategy, table.GPU, N=nodes, tree=tree, prefix=prefix, **shape) == want


def test_nearest_point_decides() -> None:
    write_user_table(
        point(4, 100.0, 200.0),
        point(16, 400.0, 300.0),
        point(4, 100.0, 300.0, hybrid=90.0),
        point(16, 100.0, 50.0, hybrid=110.0),
        point(16, 10.0, 20.0, rows=128),
    )

    def auto(N: int, tree: bool = False, B: int = 1, strategy: str = "auto", prefix: bool = False) -> str:
        return table.resolve(strategy, "avx512", N=N, tree=tree, prefix=prefix, **{**SHAPE, "B": B})

    assert auto(1) == "serial"  # one node: nothing to choose
    assert auto(3) == auto(7) == "serial"
    assert auto(9) == auto(64) == "solve"  # sqrt(4 * 16) = 8 is the border
    assert auto(3, tree=True) == "hybrid"
    assert auto(16, tree=True) == "solve"
    assert auto(16, B=16) == "serial"  # 128 rows have a point of their own
    assert auto(16, strategy="exact") == "serial"
    assert auto(3, tree=True, strategy="exact") == "hybrid"
    assert auto(16, tree=True, prefix=True) == "serial"  # solve takes no prefix
    assert auto(65) == "solve"  # the only one beyond 64 nodes
    assert auto(65, strategy="exact") == "serial"


def test_ties_stay_exact() -> None:
    assert table.winner({"serial": 100.0, "hybrid": 99.0, "solve": 98.5}, exact=False) == "serial"
    assert table.winner({"serial": 100.0, "hybrid": 90.0, "solve": 89.0}, exact=False) == "hybrid"
    assert table.winner({"serial": 100.0, "hybrid": 90.0, "solve": 80.0}, exact=True) == "hybrid"


def test_user_table_replaces_its_instruction_set_only() -> None:
    shipped = table.resolve("auto", "avx2", N=64, tree=False, **SHAPE)
    write_user_table(point(64, 1.0, 2.0))
    assert table.resolve("auto", "avx512", N=64, tree=False, **SHAPE) == "serial"
    assert table.resolve("auto", "avx2", N=64, tree=False, **SHAPE) == shipped


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "got version 2, want 1"),
        ({"tables": []}, "tables: got list, want an object"),
        ({"tables": {"mmx": {}}}, "tables.mmx: want one of avx512"),
        ({"tables": {"avx2": {"threads": 0, "points": []}}}, "threads: got 0, want a positive integer"),
        ({"rows": 0}, r"points\[0\].rows: got 0, want a positive integer"),
        ({"tree": 1}, r"points\[0\].tree: got 1, want true or false"),
        ({"us": {"solve": 1.0}}, r"points\[0\].us: got .*, want microseconds of serial"),
        ({"us": {"serial": -1.0}}, r"us.serial: got -1.0, want a positive number"),
    ],
)
def test_malformed_tables_are_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    entry = point(4, 1.0, 2.0)._asdict()
    content: dict[str, object] = {"version": 1, "tables": {"avx2": {"threads": 1, "points": [entry]}}}
    (content if set(change) & {"version", "tables"} else entry).update(change)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(content))
    with pytest.raises(table.TableError, match=message):
        table.read_tables(path)
    path.write_text("{")
    with pytest.raises(table.TableError, match="cannot be read as JSON"):
        table.read_tables(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"version": 2}',
        b'{"version": ' + b"1" * 5000 + b"}",
        b'{"version": 1, "tables": {"avx512": {"threads": 1, "points": [{"rows": 1e999}]}}}',
    ],
    ids=["empty", "cut", "binary", "deep", "version", "digits", "infinite"],
)
def test_a_damaged_user_table_costs_one_warning(content: bytes) -> None:
    """Decoding goes on with the table of the package; the warning says which file it is and what to do."""
    shipped = [table.resolve("auto", "avx512", N=n, tree=True, **SHAPE) for n in range(1, 65)]
    path = table.user_table_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    table.reload()
    with pytest.warns(RuntimeWarning, match=f"{path}.*Delete the file or run `specdec tune") as caught:
        found = [table.resolve("auto", "avx512", N=n, tree=True, **SHAPE) for n in range(1, 65)]
    assert found == shipped
    assert len(caught) == 1
    assert len(str(caught[0].message)) < 500
    measure_strategies(budget=0.0, batches=(1,), nodes=(2,), widths=(32,))  # and what it says helps
    assert set(table.read_tables(path)) == {ops.cpu_isa()}


def test_numbers_too_large_for_a_ratio_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    for change, name in (({"rows": 10**400}, "rows"), ({"us": {"serial": 10**400}}, "us.serial")):
        entry = {**point(4, 1.0, 2.0)._asdict(), **change}
        path.write_text(json.dumps({"version": 1, "tables": {"avx2": {"threads": 1, "points": [entry]}}}))
        with pytest.raises(table.TableError, match=rf"points\[0\].{name}: got 1000"):
            table.read_tables(path)


def test_tables_survive_a_round_trip(tmp_path: Path) -> None:
    tables = {"avx2": table.Table(3, [point(4, 1.5, 2.0), point(8, 1.0, 2.0, hybrid=3.0)])}
    path = tmp_path / "deep" / "table.json"
    table.write_tables(path, tables)
    assert table.read_tables(path) == tables
    assert path.read_text().count('"rows"') == sum('"rows"' in line for line in path.read_text().splitlines())
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]


def test_measuring_writes_the_users_table() -> None:
    other = "portable" if ops.cpu_isa() != "portable" else "avx2"
    write_user_table(point(4, 1.0, 2.0), isa=other)
    seen: list[tuple[int, int]] = []
    path = measure_strategies(
        lambda done, total, _: seen.append((done, total)),
        budget=0.0,
        batches=(1,),
        nodes=(2, 5),
        widths=(32,),
    )
    assert path == table.user_table_path()
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    tables = table.read_tables(path)
    assert tables[other].points == [point(4, 1.0, 2.0)]
    measured = tables[ops.cpu_isa()].points
    assert {(p.rows, p.nodes, p.state, p.tree) for p in measured} == {
        (8, nodes, 1024, tree) for nodes in (2, 5) for tree in (False, True)
    }
    assert all(set(p.us) == ({*table.STRATEGIES} if p.tree else {"serial", "solve"}) for p in measured)


@pytest.mark.parametrize("fastest", ["serial", "hybrid", "solve"])
def test_verify_runs_what_the_table_says(fastest: str) -> None:
    us = {name: 1.0 if name == fastest else 2.0 for name in table.STRATEGIES}
    write_user_table(point(9, 0.0, 0.0, hybrid=0.0, us=us), isa=ops.cpu_isa())
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 9, 2, 64, generator=generator)
    beta = torch.rand(2, 9, 2, generator=generator)
    state = torch.randn(2, 2, 64, 64, generator=generator)
    parents = torch.tensor([[-1, 0, 1, 0, 3, 4, 5, 2, 7]] * 2, dtype=torch.int32)

    def run(strategy: str) -> torch.Tensor:
        out, _ = ops.verify(q, k, v, None, beta, state=state, parents=parents, strategy=strategy)
        return out

    assert torch.equal(run("auto"), run(fastest))
    assert torch.equal(run("exact"), run("serial"))
    if fastest == "solve":  # otherwise this test could not tell: the two round differently
        assert not torch.equal(run("solve"), run("serial"))
    torch.compiler.reset()  # a choice is a constant of the compiled graph
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled("auto"), run(fastest))
