"""The static report on compiled kernels reads what NVIDIA's disassemblers print, and a spill is a fault."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"
sys.path.insert(0, str(TOOLS))

import compiled_kernels  # noqa: E402
import kernel_report  # noqa: E402

SERIAL = "_ZN4runINS_12VerifySerialEEvv"
SOLVE = "_ZN4runINS_11VerifySolveEEvv"


def usage(stack: int) -> str:
    """As `cuobjdump -res-usage` prints two kernels for sm_80 and one for sm_90."""
    return f"""
Fatbin elf code:
================
arch = sm_80
code version = [1,8]
host = linux

Resource usage:
 Common:
  GLOBAL:0
 Function {SERIAL}:
  REG:149 STACK:{stack} SHARED:0 LOCAL:0 CONSTANT[0]:792 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function {SOLVE}:
  REG:168 STACK:0 SHARED:16 LOCAL:0 CONSTANT[0]:792 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin elf code:
================
arch = sm_90

Resource usage:
 Function {SERIAL}:
  REG:150 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:1000 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def sass(extra: str = "") -> list[str]:
    """As `nvdisasm -c` prints the two kernels of sm_80."""
    return f"""
	.section	.text.{SERIAL},"ax",@progbits
.text.{SERIAL}:
        /*0000*/                   LDG.E.128.CONSTANT R4, [R2.64] ;
        /*0010*/              @!P0 LDGSTS.E.BYPASS.128 [R5], [R2.64], P1 ;
        /*0020*/                   LDS.128 R8, [R5] ;
        /*0030*/                   STG.E.128 [R2.64], R4 ;
{extra}
	.section	.text.{SOLVE},"ax",@progbits
.text.{SOLVE}:
.L_x_0:
        /*0000*/                   LDGSTS.E.BYPASS.128 [R5], [R2.64] ;
        /*0010*/                   HMMA.1688.F32.TF32 R4, R8, R10, R4 ;
        /*0020*/              @P0  BRA `(.L_x_0) ;
""".splitlines()


def parsed(stack: int, extra: str = "") -> dict[str, compiled_kernels.Kernel]:
    """The kernels of sm_80."""
    kernels = {k.kernel: k for k in compiled_kernels.parse_usage(usage(stack)) if k.arch == "sm_80"}
    compiled_kernels.parse_sass(sass(extra), kernels)
    return kernels


def test_usage_of_every_architecture() -> None:
    kernels = compiled_kernels.parse_usage(usage(0))
    assert [(k.kernel, k.arch, k.registers) for k in kernels] == [
        (SERIAL, "sm_80", 149),
        (SOLVE, "sm_80", 168),
        (SERIAL, "sm_90", 150),
    ]
    assert [k.shared_bytes for k in kernels] == [0, 16, 0]  # without the runtime's KiB


def test_instructions_go_to_their_kernel() -> None:
    kernels = parsed(0)
    assert (kernels[SERIAL].wide_loads, kernels[SERIAL].hmma, kernels[SERIAL].local_accesses) == (2, 0, 0)
    assert (kernels[SOLVE].wide_loads, kernels[SOLVE].hmma, kernels[SOLVE].local_accesses) == (1, 1, 0)


def test_no_fault_without_spill() -> None:
    kernels = parsed(0)
    assert compiled_kernels.faults(kernels[SERIAL], "VerifySerial<>") == []
    assert compiled_kernels.faults(kernels[SOLVE], "VerifySolve<>") == []


@pytest.mark.parametrize(
    ("stack", "extra"),
    [
        (8, ""),
        (0, "        /*0040*/                   STL [R1+0x4], R7 ;"),
        (0, "        /*0040*/               @P1 LDL.LU R7, [R1] ;"),
    ],
)
def test_a_spill_is_a_fault(stack: int, extra: str) -> None:
    kernels = parsed(stack, extra)
    (fault,) = compiled_kernels.faults(kernels[SERIAL], "VerifySerial<>")
    assert "VerifySerial<> on sm_80 uses local memory" in fault
    assert compiled_kernels.faults(kernels[SOLVE], "VerifySolve<>") == []


def test_missing_instructions_are_faults() -> None:
    kernel = parsed(0)[SERIAL]
    (fault,) = compiled_kernels.faults(kernel, "Prefill<>")
    assert "tensor-core" in fault
    kernel.wide_loads = 0
    (fault,) = compiled_kernels.faults(kernel, "Commit<>")
    assert "16 bytes" in fault


def test_threads_from_a_cubin() -> None:
    """An ELF with one section of launch bounds: an attribute in the header, then the threads."""
    info = struct.pack("<BBH", 3, 0x1B, 255) + struct.pack("<BBHIII", 4, 5, 12, 256, 1, 1)
    names = b"\0.shstrtab\0.nv.info." + SERIAL.encode() + b"\0"
    body = info + names
    elf = bytearray(64 + len(body) + 3 * 64)
    elf[64 : 64 + len(body)] = body
    struct.pack_into("<Q", elf, 0x28, 64 + len(body))
    struct.pack_into("<HHH", elf, 0x3A, 64, 3, 1)
    sections = [(0, 0, 0), (1, 64 + len(info), len(names)), (11, 64, len(info))]
    for i, (name, begin, size) in enumerate(sections):
        struct.pack_into("<I20xQQ", elf, 64 + len(body) + 64 * i, name, begin, size)
    assert compiled_kernels.parse_threads(bytes(elf)) == {SERIAL: 256}


def test_names_of_both_compilers_agree() -> None:
    device = (
        "void specdec::cuda::detail::run<specdec::cuda::VerifySolve<specdec::cuda::SolveTraits<"
        "(specdec::Precision)1, false, 16> > >(specdec::cuda::VerifySolve<specdec::cuda::SolveTraits<"
        "(specdec::Precision)1, false, 16> >::Params)"
    )
    host = "VerifySolve<specdec::cuda::SolveTraits<specdec::Precision::kTf32x3, false, 16> >"
    wanted = "VerifySolve<SolveTraits<Precision::kTf32x3, false, 16>>"
    assert kernel_report.canonical(device, kernel_report.enumerators()) == wanted
    assert kernel_report.canonical(host, {}) == wanted


def test_counts_are_the_worst_of_the_shapes() -> None:
    row = kernel_report.Row("Commit<>", "sm_90", registers=64, threads=128)
    kernel = {"kernel": "Commit<>", "bytes_read": 60, "bytes_written": 50, "shared_bytes": 1024}
    shapes = [
        kernel_report.Shape(
            "commit",
            "",
            listed,
            100,
            0.0,
            [{**kernel, "sectors_per_request": sectors, "bank_conflicts": worst}],
        )
        for listed, sectors, worst in ((True, 3.5, 1), (False, 4.0, 2))
    ]
    kernel_report.join([row], shapes)
    assert (row.bytes_over_least, row.sectors_per_request, row.bank_conflicts) == (1.1, 4.0, 2)
    assert (row.shared_bytes, row.occupancy) == (1024, 0.5)


def test_an_instance_that_no_shape_runs_is_a_fault() -> None:
    rows = [kernel_report.Row("Commit<>", arch) for arch in ("sm_80", "sm_90")]
    (fault,) = kernel_report.not_run(rows)
    assert fault.startswith("Commit<> is run by no shape")
    for row in rows:
        row.sectors_per_request = 0.0
    assert kernel_report.not_run(rows) == []


def test_another_parser_reads_objects_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []

    def read(path: Path) -> list[compiled_kernels.Kernel]:
        reads.append(path)
        return [compiled_kernels.Kernel("Commit<>", "sm_80")]

    monkeypatch.setattr(kernel_report, "read_object", read)
    monkeypatch.setattr(kernel_report, "ROOT", tmp_path)
    (tmp_path / "tools").mkdir()
    parser, compiled, memory = tmp_path / "tools/compiled_kernels.py", tmp_path / "a.o", tmp_path / "memory"
    parser.write_text("1")
    compiled.write_text("")
    for count, text in ((1, "1"), (1, "1"), (2, "2")):
        parser.write_text(text)
        assert len(kernel_report.compiled([compiled], memory, 1)) == 1
        assert len(reads) == count
