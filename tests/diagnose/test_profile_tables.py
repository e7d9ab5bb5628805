"""Reading tables of a profile: every spelling gives the same figures, every fault is told."""

from __future__ import annotations

import codecs

import pytest
from profile_case import (
    COLUMNS_210,
    COLUMNS_LEVEL0,
    COLUMNS_OF_MSPROF,
    OUTPUT,
    Kernel,
    step_kernels,
    write_kernels,
    write_table,
)

from tuner.diagnose.fallback import read_profile
from tuner.diagnose.profile_tables import (
    KERNEL_DETAILS,
    TableRows,
    find_tables,
    plain_name,
)
from tuner.diagnose.profile_totals import core_named, parse_number
from tuner.diagnose.profile_work import parse_shapes, work_of

HEADER = "Name,Type,Accelerator Core,Duration(us),Input Shapes\n"
ROWS = 'a,Add,AI_CORE,1.5,"2,3;2,3"\nb,Mul,AI_CPU,2.5,"4;4"\n'


def written(folder, content, name="kernel_details.csv"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(folder, content):
    """Rows of a kernel_details.csv, and what was said of it."""
    table = TableRows(written(folder, content), KERNEL_DETAILS)
    rows = list(table.rows())
    return rows, [finding.what for finding in table.findings()]


def figures(report):
    return [(op.op_type, op.core, op.count, pytest.approx(op.total_s)) for op in report.ops]


def table_problems(report):
    return [finding.what for finding in report.findings if finding.name == "profile-table"]


def test_rows_are_those_of_the_file(tmp_path):
    rows, problems = read(tmp_path, HEADER + ROWS)
    assert rows == [
        ["a", "Add", "AI_CORE", "1.5", "2,3;2,3"],
        ["b", "Mul", "AI_CPU", "2.5", "4;4"],
    ]
    assert problems == []


@pytest.mark.parametrize(
    "content",
    [
        codecs.BOM_UTF8 + (HEADER + ROWS).encode(),
        (HEADER + ROWS).replace("\n", "\r\n"),
        (HEADER + ROWS).rstrip("\n"),
        "\n" + HEADER + "\n" + ROWS + "\n\n",
    ],
    ids=["BOM", "CRLF", "no last line end", "empty lines"],
)
def test_harmless_differences_change_nothing(tmp_path, content):
    rows, problems = read(tmp_path, content)
    assert [row[:4] for row in rows] == [
        ["a", "Add", "AI_CORE", "1.5"],
        ["b", "Mul", "AI_CPU", "2.5"],
    ]
    assert problems == []


def test_quoted_fields_may_hold_commas_quotes_and_line_ends(tmp_path):
    rows, problems = read(tmp_path, HEADER + '"a\nb, c",Add,AI_CORE,1.5,"""2,3;2,3"""\n' + ROWS)
    assert rows[0][1:] == ["Add", "AI_CORE", "1.5", '"2,3;2,3"']
    assert len(rows) == 3 and problems == []


def test_lines_that_straddle_blocks_are_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("tuner.diagnose.profile_tables.BLOCK_BYTES", 7)
    name = "Größe"
    rows, problems = read(tmp_path, HEADER + f'{name},Add,AI_CORE,1.5,"2,3"\n' * 20)
    assert rows == [[name, "Add", "AI_CORE", "1.5", "2,3"]] * 20
    assert problems == []


@pytest.mark.parametrize(
    ("content", "num_rows", "problem"),
    [
        ("", 0, "is empty"),
        ("\n\n", 0, "is empty"),
        ("Name,Start Time(us)\na,1\n", 0, "has no column optype/type and"),
        (HEADER + ROWS + "c,Ad", 2, "ends within a line"),
        (HEADER + ROWS + 'c,Add,AI_CORE,1.5,"2,', 3, None),
        (HEADER + ROWS + "c,Add,AI_CORE,1", 2, "ends within a line"),
        (HEADER + "c,Add\n" + ROWS, 2, "has 1 line with too few columns"),
        (HEADER + "c,Add\nd\n" + ROWS, 2, "has 2 lines with too few columns"),
        (HEADER + "c,Add,AI_CORE,1\n" + ROWS, 3, None),
        ((HEADER + ROWS).encode("utf-16"), 2, "is UTF-16"),
        (HEADER.encode() + "größe,Add,AI_CORE,1,\n".encode("latin-1"), 1, "is not UTF-8"),
        (b"\x7fELF\0\1\2" * 300_000, 0, "has a line of over a million"),
        (b"PK\3\4\n" * 100, 0, "has no column"),
    ],
)
def test_a_fault_is_told_and_the_rest_is_read(tmp_path, content, num_rows, problem):
    rows, problems = read(tmp_path, content)
    assert len(rows) == num_rows
    assert [problem in told for told in problems] == ([True] if problem else [])


def test_after_a_quote_that_does_not_end_reading_goes_on(tmp_path):
    """It swallows as much as a field may hold, 131072 characters, and no more."""
    row = "a,Add,AI_CORE,1.0,8\n"
    rows, problems = read(tmp_path, HEADER + row + '"a,Add,AI_CORE,1.0,8\n' + row * 20_000)
    lost = 20_000 + 1 + 1 - len(rows)
    assert abs(lost - 131072 / (len(row) - 1)) < 3
    assert problems and f"has {lost} lines with a quote that does not end" in problems[0]


def test_a_line_of_a_megabyte_ends_reading(tmp_path):
    rows, problems = read(tmp_path, HEADER + ROWS + "x" * 3_000_000)
    assert len(rows) == 2
    assert len(problems) == 1


def test_what_cannot_be_opened_is_told(tmp_path):
    (tmp_path / "kernel_details.csv").symlink_to(tmp_path / "gone.csv")
    report = read_profile(tmp_path)
    assert "is not a file that can be read" in table_problems(report)[0]
    assert report.findings[0].name == "no-profile" and report.findings[0].severity == "error"


def test_an_error_of_the_disk_is_told(tmp_path, monkeypatch):
    path = written(tmp_path, HEADER + ROWS)

    def fail(self, *arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", fail)
    assert "cannot be read: Permission denied" in table_problems(read_profile(tmp_path))[0]


@pytest.mark.parametrize("folder", ["", "gone"])
def test_a_folder_without_a_profile_is_an_error_value(tmp_path, folder):
    report = read_profile(tmp_path / folder)
    assert (report.sources, report.total_s, report.ops) == ((), 0.0, ())
    assert [finding.severity for finding in report.findings] == ["error"]


@pytest.mark.parametrize(
    ("name", "columns", "spelling"),
    [
        (f"{OUTPUT}/kernel_details.csv", COLUMNS_210, {}),
        (f"{OUTPUT}/kernel_details.csv", COLUMNS_210, COLUMNS_OF_MSPROF),
        (f"{OUTPUT}/kernel_details.csv", COLUMNS_210[::-1], {c: c.upper() for c in COLUMNS_210}),
        (f"{OUTPUT}/KERNEL_DETAILS.CSV", COLUMNS_210, {c: f" {c} " for c in COLUMNS_210}),
        (
            "PROF_1/mindstudio_profiler_output/op_summary_20260101.csv",
            COLUMNS_210,
            COLUMNS_OF_MSPROF,
        ),
        ("flat/kernel_details.csv", COLUMNS_LEVEL0, {}),
    ],
)
def test_every_version_gives_the_same_figures(tmp_path, name, columns, spelling):
    kernels = step_kernels()
    path = write_kernels(tmp_path, kernels, name=name, columns=columns, spelling=spelling)
    report = read_profile(tmp_path)
    assert report.sources == (path,)
    assert report.total_s == pytest.approx(1e-3)
    assert figures(report) == [
        ("MatMulV3", "AI_CORE", 6, 6e-4),
        ("Cast", "AI_VECTOR_CORE", 10, 2e-4),
        ("LayerNormV3", "AI_VECTOR_CORE", 10, 2e-4),
    ]
    assert [op.share for op in report.ops] == pytest.approx([0.6, 0.2, 0.2])


@pytest.mark.parametrize(
    ("text", "core"),
    [
        ("AI_CPU", "AI_CPU"), ("AI CPU", "AI_CPU"), ("AICPU", "AI_CPU"), ("ai_cpu ", "AI_CPU"),
        ("AI_CORE", "AI_CORE"), ("AI_Core", "AI_CORE"), ("AI VECTOR CORE", "AI_VECTOR_CORE"),
        ("MIX_AIC", "MIX_AIC"), ("MIX AIV", "MIX_AIV"), ("N/A", "N/A"), ("", "N/A"),
        ("HCCL", "HCCL"), ("DSA_SQE", "DSA_SQE"), ("Notify Wait SQE", "NOTIFY_WAIT_SQE"),
    ],
)  # fmt: skip
def test_cores_have_one_spelling(text, core):
    assert core_named(text) == core


@pytest.mark.parametrize(
    ("text", "number"),
    [("1.5", 1.5), ("1,234.5", 1234.5), ("12,345,678", 12345678), (" 7\t", 7), ("1e3", 1000)],
)
def test_numbers_are_read_as_people_and_sheets_write_them(text, number):
    assert parse_number(text) == number


def test_rows_without_a_usable_number_are_counted_and_left_out(tmp_path):
    durations = ["1.0", "", "N/A", "nan", "inf", "-3", '"1,002.0"', "x"]
    rows = "".join(f"a,Add,AI_CORE,{text},8\n" for text in durations)
    written(tmp_path, HEADER + rows)
    report = read_profile(tmp_path)
    assert figures(report) == [("Add", "AI_CORE", 2, 1003e-6)]
    assert "has 6 lines with no usable number" in table_problems(report)[0]


def test_an_op_without_a_type_goes_by_its_name(tmp_path):
    rows = "".join(
        f"{name},N/A,N/A,1.0,N/A\n"
        for name in ("Default/net/Add-op1", "Default/net/Add-op22", "aclnnMul_MulAiCore_Mul")
    )
    written(tmp_path, HEADER + rows)
    assert figures(read_profile(tmp_path)) == [
        ("Add", "N/A", 2, 2e-6),
        ("aclnnMul_MulAiCore_Mul", "N/A", 1, 1e-6),
    ]


def test_profiles_of_ranks_are_found_apart_and_summed(tmp_path):
    for rank in range(3):
        name = f"rank_{rank}/host_{rank}_2026_ascend_ms/ASCEND_PROFILER_OUTPUT/kernel_details.csv"
        write_kernels(tmp_path, step_kernels(), name=name)
    assert len(find_tables(tmp_path)) == 3
    report = read_profile(tmp_path)
    assert len(report.sources) == 3
    assert report.total_s == pytest.approx(3e-3)
    assert "3 profiles are read as one" in [finding.what for finding in report.findings]


STATISTIC = [
    [0, "N/A", "MatMulV3", "AI_CORE", 6, "600.0", 90, 100, 110, 60],
    [0, "N/A", "Sort", "AI CPU", "1,000", "2,400.0", 1, 2.4, 9, 40],
]
STATISTIC_HEADER = (
    "Device_id,Model Name,OP Type,Core Type,Count,Total Time(us),Min,Avg,Max,Ratio(%)"
)


def write_statistic(folder, name=f"{OUTPUT}/op_statistic.csv"):
    return write_table(folder / name, STATISTIC_HEADER.split(","), STATISTIC)


def test_the_statistic_is_read_where_there_are_no_kernels(tmp_path):
    path = write_statistic(tmp_path)
    report = read_profile(tmp_path)
    assert report.sources == (path,)
    assert figures(report) == [("Sort", "AI_CPU", 1000, 2.4e-3), ("MatMulV3", "AI_CORE", 6, 6e-4)]


def test_kernels_and_statistic_of_one_profile_are_not_added_up(tmp_path):
    write_statistic(tmp_path)
    kernels = write_kernels(tmp_path, step_kernels())
    summary = "host_1_20260101000000000_ascend_ms/PROF_1/op_summary_1.csv"
    write_kernels(tmp_path, step_kernels(), name=summary)
    (tables,) = find_tables(tmp_path)
    assert set(tables) == {"kernel_details", "op_summary", "op_statistic"}
    report = read_profile(tmp_path)
    assert report.sources == (kernels,)
    assert report.total_s == pytest.approx(1e-3)


def test_the_statistic_stands_in_for_broken_kernels(tmp_path):
    path = write_statistic(tmp_path)
    written(path.parent, "Name,Start\na,1\n")
    report = read_profile(tmp_path)
    assert report.sources == (path,)
    assert len(table_problems(report)) == 1


def test_names_of_columns_are_compared_without_case_and_spaces():
    spellings = ["Duration(us)", " duration (us) ", "DURATION(US)", '"Duration(us)"']
    assert {plain_name(text) for text in spellings} == {"duration(us)"}
    assert plain_name("Input_Shapes") == plain_name("Input Shapes")


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("8,512;512,64", ((8, 512), (512, 64))),
        ("[2,4096];[]", ((2, 4096), ())),
        (";;", ((), (), ())),
        ("8", ((8,),)),
        ("", None),
        ("N/A", None),
        ("8,x", None),
    ],
)
def test_shapes_are_parsed(text, shapes):
    assert parse_shapes(text) == shapes


@pytest.mark.parametrize(
    ("op_type", "inputs", "outputs", "work"),
    [
        ("Add", "8,512;512", "8,512", 8 * 512),
        ("ReduceSum", "8,512", "8", 8 * 512),
        ("MatMulV3", "64,32;32,16", "64,16", 64 * 32 * 16),
        # Transposed, and in 16 x 16 blocks.
        ("MatMul", "32,64;16,32", "64,16", 64 * 32 * 16),
        ("MatMul", "2,4,16,16;1,2,16,16", "1,4,16,16", 64 * 32 * 16),
        ("BatchMatMul", "6,4,10,3;6,4,3,10", "6,4,10,10", 24 * 10 * 3 * 10),
        ("BatchMatMul", "6,10,3;3,7", "6,10,7", 6 * 10 * 3 * 7),
        ("Gather", "32000,512;8,64;", "8,64,512", 8 * 64 * 512),
        ("FlashAttentionScore", "8,512,512", "8,512,512", None),
        ("MatMul", "64,32;32,16", "", None),
        ("Add", "0,512", "0,512", None),
        ("Add", "", "", None),
    ],
)
def test_work_is_what_a_call_has_to_do(op_type, inputs, outputs, work):
    assert work_of(op_type, inputs, outputs) == (None if work is None else pytest.approx(work))


def test_fixtures_write_what_msprof_writes(tmp_path):
    """Shapes in quotes of their own, tabs after start times."""
    kernel = Kernel("Add", "AI_CORE", 1.5, "2,3;2,3", "2,3")
    text = write_kernels(tmp_path, [kernel]).read_text()
    assert '"""2,3;2,3"""' in text and ".140\t," in text
