"""The command line: what it prints, and one line with the right exit code for everything that goes wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from fa4gen import console
from fa4gen.accuracy import AccuracyReport
from fa4gen.arch import DEVICES, get_device
from fa4gen.bench import BenchResult, Entry
from fa4gen.bound import bound
from fa4gen.cli import OpName, _as_op, app
from fa4gen.config import FlashBwdSm90Config, FlashFwdSm90Config
from fa4gen.errors import UnsupportedProblem
from fa4gen.measure.base import Failure, FailureKind, Measurement, Source
from fa4gen.measure.model import BoundMeasurer
from fa4gen.measure.replay import Grid
from fa4gen.presets import get_preset
from fa4gen.problem import AttentionProblem
from fa4gen.tuned_table import Provenance, Row, RunnerUp, TunedTable

PROBLEM = "b=2 h=16 s=4096 d=128 causal"
H200 = get_device("h200")
CONFIG = FlashFwdSm90Config(tile_m=128, tile_n=96, rescale_threshold=None)


def make_row(problem: str = PROBLEM, config: FlashFwdSm90Config = CONFIG, median: float = 300.0) -> Row:
    return Row(
        problem=AttentionProblem.parse(problem),
        family="flash_fwd_sm90",
        config=config,
        median_us=median,
        interval_us=(median - 1, median + 1),
        runner_up=RunnerUp(config=replace(config, tile_n=112), gap=0.02),
        default_us=median * 1.1,
        source=Source.MEASURED,
        provenance=Provenance.now(measurer="cuda", device="NVIDIA H200", samples=60, clock_mhz=1600.0),
    )


@pytest.fixture(autouse=True)
def own_directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FA4GEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FA4GEN_TUNED_DIR", str(tmp_path / "tuned"))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.json"
    TunedTable.update(path, H200.key, [make_row()])
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def fails(code: int, message: str, *arguments: str | Path) -> None:
    """Exit ``code``, and exactly one line on stderr, which holds ``message``."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "b=1 h=1 s=64 d=x"), "'x' is not an integer"),
        (("show", "b=1 h=3 hk=2 s=64 d=64"), "heads must be a multiple of heads_kv"),
        (("show", "b=1 h=1 s=64 d=264"), "head_dim must be a multiple of 8 from 8 to 256, got 264"),
        (("show", "b=1 h=1 s=64 d=64 dtype=fp32"), "dtype must be one of bf16, fp16"),
        (("show", PROBLEM, "--device", "v100"), "unknown device 'v100'"),
        (("show", PROBLEM, "--table", "absent.json"), "cannot read tuned table absent.json"),
        (("render", PROBLEM, "--set", "tile_k=3"), "unknown knob 'tile_k'"),
        (("render", PROBLEM, "--set", "tile_m"), "--set wants KNOB=VALUE"),
        (("render", PROBLEM, "--set", "tile_m=wide"), "--set tile_m=wide"),
        (("render", PROBLEM, "--set", "tile_m=[1"), "no YAML value"),
        (("render", PROBLEM, "--set", "tile_n=512"), "tile_n must be a multiple of 16 from 16 to 256, got 512"),
        (("compile", PROBLEM, "--set", "kv_stages=8"), "shared memory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    device = () if "--device" in arguments else ("--device", "h200")
    fails(2, message, *arguments, *device)


def test_corrupt_and_future_tables(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text('{"rows": [')
    fails(2, "not valid JSON", "show", PROBLEM, "--device", "h200", "--table", path)
    path.write_text(json.dumps({"schema_version": 99, "device": H200.key, "rows": []}))
    fails(2, "has schema 99", "table", "lint", path)


def test_debug_shows_the_traceback() -> None:
    result = run("--debug", "show", "b=1", "--device", "h200")
    assert result.exception is not None and "lacks heads" in str(result.exception)


def test_system_errors_exit_1(tmp_path: Path) -> None:
    fails(1, "Is a directory", "render", PROBLEM, "--device", "h200", "--out", tmp_path)


def test_ctrl_c_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fa4gen.cli.get_device", interrupt)
    fails(130, "everything finished is saved", "show", PROBLEM, "--device", "h200")


def test_show_a_tuned_problem(table: Path) -> None:
    result = run("show", PROBLEM, "--device", "h200", "--table", table)
    assert result.exit_code == 0
    text = result.stdout
    assert "this very problem" in text and str(table) in text and "tile_n=96" in text
    assert "60 samples by cuda on NVIDIA H200 at 1600 MHz" in text
    assert "300 us [299, 301]" in text and "default" in text and "+10.0 %" in text
    assert "+2.0 %: " in text and "tile_n=112" in text
    limits = bound(AttentionProblem.parse(PROBLEM), CONFIG, H200)
    assert f"MMA: {100 * limits.microseconds / 300:.0f} % of its" in text
    assert f"{100 * limits.microseconds * 1980 / 1600 / 300:.0f} % at the 1600 MHz it ran at" in text


def test_show_an_untuned_problem() -> None:
    result = run("show", "b=1 h=2 s=512 d=72", "--device", "h200")
    assert result.exit_code == 0
    assert "default of flash_fwd_sm90" in result.stdout
    assert 'fa4gen tune --problem "b=1 h=2 s=512 d=72"' in result.stderr


def test_render_takes_the_row_and_the_overrides(table: Path, tmp_path: Path) -> None:
    plain = run("render", PROBLEM, "--device", "h200", "--table", table)
    changed = run("render", PROBLEM, "--device", "h200", "--table", table, "--set", "rescale_threshold=8")
    assert "tile_n: 96" in plain.stdout and "rescale_threshold: null" in plain.stdout
    assert "rescale_threshold: 8.0" in changed.stdout
    compile(plain.stdout, "rendered", "exec")
    run("render", PROBLEM, "--device", "h200", "--table", table, "--out", tmp_path / "kernel.py")
    assert (tmp_path / "kernel.py").read_text() == plain.stdout


def test_render_diff(table: Path, tmp_path: Path) -> None:
    base = ("render", PROBLEM, "--device", "h200", "--table", table)
    text = run(*base, "--diff", "rescale_threshold=8 producer_regs=40").stdout
    assert "\n-RESCALE_THRESHOLD = None\n" in text and "\n+RESCALE_THRESHOLD = 8.0\n" in text
    assert "\n+PRODUCER_REGS = 40\n" in text
    assert "\x1b[" not in text, "plain in a pipe"
    run(*base, "--diff", "rescale_threshold=8 producer_regs=40", "--out", tmp_path / "changes.diff")
    assert (tmp_path / "changes.diff").read_text() == text
    same = run(*base, "--diff", "tile_n=96")
    assert same.stdout == "" and "no difference" in same.stderr
    fails(2, "--diff wants KNOB=VALUE", *base, "--diff", "tile_n 64")
    fails(2, "shared memory", *base, "--diff", "kv_stages=8")


def test_render_diff_of_two_problems() -> None:
    base = ("render", "h=4 s=512 d=64", "--device", "b200")
    text = run(*base, "h=8 hk=2 s=512 d=64 lse", "--diff").stdout
    assert "\n-GQA_RATIO = 1\n" in text and "\n+GQA_RATIO = 4\n" in text
    assert "+    mLSE: cute.Tensor,\n" in text and "TILE_N =" not in text
    assert "no difference" in run(*base, "h=8 s=1024 d=64", "--diff").stderr, "one kernel serves every length"
    fails(2, "go together", *base, "h=8 s=512 d=64")
    fails(2, "go together", *base, "--diff")


def test_a_diff_is_coloured_on_a_terminal() -> None:
    text = console.diff_text("--- a\n+++ b\n@@ -1 +1 @@\n same\n-old\n+new\n")
    styles = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert styles == {"--- a\n": "bold", "+++ b\n": "bold", "@@ -1 +1 @@\n": "cyan", "-old\n": "red", "+new\n": "green"}


def test_table_verbs(table: Path, tmp_path: Path) -> None:
    assert "1 rows, 0 findings" in run("table", "lint", table).stdout

    other, merged = tmp_path / "other.json", tmp_path / "merged.json"
    added = make_row("b=1 h=8 s=1024 d=64")
    TunedTable.update(other, H200.key, [added, make_row(config=replace(CONFIG, tile_n=64), median=250.0)])
    text = run("table", "diff", table, other).stdout
    assert "+  b=1 h=8 s=1024 d=64" in text and "300 us -> 250 us" in text and "tile_n=64" in text
    assert run("table", "diff", table, table).stdout == "no difference\n"

    assert "2 rows" in run("table", "merge", table, other, "--out", merged).stdout
    assert len(TunedTable.load(merged).rows) == 2
    text = run("table", "explain", PROBLEM, "--device", "h200", "--table", merged).stdout
    assert "fwd bf16 d=128 causal MHA prefill" in text and "this very problem" in text


def test_lint_reports_a_row_that_cannot_run(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    TunedTable.update(path, H200.key, [make_row(config=replace(CONFIG, kv_stages=8))])
    result = run("table", "lint", path)
    assert result.exit_code == 1 and "shared memory" in result.stderr and "1 findings" in result.stdout


def test_merging_tables_of_two_devices_is_refused(table: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.json"
    TunedTable.update(foreign, "sm_90a-114sm-228kb", [])
    fails(2, "is the table of sm_90a-114sm-228kb", "table", "merge", table, foreign, "--out", tmp_path / "m.json")
    assert not (tmp_path / "m.json").exists()


def test_misses_are_listed_and_cleared(tmp_path: Path) -> None:
    assert run("misses").stdout == "no misses recorded\n"
    (tmp_path / "cache").mkdir()
    record = {"device": H200.key, "problem": "b=1 h=2 s=512 d=72", "calls": 3}
    (tmp_path / "cache" / "misses.jsonl").write_text(json.dumps(record) + "\n")
    assert "b=1 h=2 s=512 d=72" in run("misses", "--clear").stdout
    assert run("misses").stdout == "no misses recorded\n"


def test_doctor(tmp_path: Path) -> None:
    result = run("doctor")
    assert result.exit_code == 0, result.stdout
    assert "nvidia-cutlass-dsl" in result.stdout and str(tmp_path / "cache") in result.stdout
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / f"{H200.key}.json").write_text("{")
    broken = run("doctor")
    assert broken.exit_code == 1 and "not valid JSON" in broken.stdout


def test_numbers_read_well() -> None:
    assert console.us(12.3456) == "12.35 us" and console.us(12345.6) == "12,346 us"
    assert console.percent(1.034) == "+3.4 %"


def test_help_starts_fast() -> None:
    """No heavy library at start; the best of three, on a machine that others use too."""
    command = [sys.executable, "-c", "from fa4gen.cli import main; main()", "--help"]
    times = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.6


def test_export(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tuned").mkdir()
    table.rename(tmp_path / "tuned" / f"{H200.key}.json")
    assert f"rows of {H200.key}" in run("export", "--table", tmp_path / "x.json", "--device", "h200").stdout
    assert make_row().problem in [row.problem for row in TunedTable.load(tmp_path / "x.json").rows]
    run("export", PROBLEM, "--source", tmp_path / "kernel.py", "--device", "h200")
    assert "TILE_N = 96" in (tmp_path / "kernel.py").read_text()
    monkeypatch.setitem(DEVICES, "NVIDIA Untuned", replace(get_device("b200"), name="NVIDIA Untuned", sm_count=7))
    fails(2, "no row to export", "export", "--aot", tmp_path / "aot", "--device", "untuned")
    for arguments in ((), (PROBLEM,), ("--source", tmp_path), (PROBLEM, "--source", tmp_path, "--table", table)):
        fails(2, "say what to export", "export", *arguments)


def test_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a measurer that stands in for a GPU: one input kind is wrong, one hangs."""

    class FakeMeasurer:
        device = H200

        def __init__(self, index: int) -> None:
            assert index == 1

        def verify(
            self, problem: AttentionProblem, artifact: str, kind: str, seed: int, config: FlashFwdSm90Config
        ) -> AccuracyReport | Failure:
            if kind == "strided":
                return Failure(FailureKind.TIMEOUT, "no answer within 30 s")
            wrong = kind == "peaked" and problem.head_dim == 64
            return AccuracyReport(not wrong, "O is wrong" if wrong else "right", 2.0 if wrong else 0.1, 0.0, 1e-3, 64)

        def close(self) -> None:
            pass

    monkeypatch.setattr("fa4gen.measure.cuda.CudaMeasurer", FakeMeasurer)
    monkeypatch.setattr("fa4gen.compile.compile_variant", lambda variant: variant.name)
    result = run("verify", "b=1 h=1 s=64 d=64", "--gpu", "1")
    assert result.exit_code == 1
    assert "O is wrong" in result.stdout and "timeout: no answer" in result.stdout and "2.00" in result.stdout


def test_verify_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    fails(1, "no CUDA device", "verify", "b=1 h=1 s=64 d=64")


def test_bench_table_marks_who_did_not_run_or_is_wrong() -> None:
    ours = Entry("fa4gen", "fa4gen", samples_us=(100.0,), median_us=100.0, interval_us=(99.0, 101.0), tflops=650.0)
    slow = replace(ours, name="fa2", title="flash", median_us=180.0, speedup=1.8, speedup_interval=(1.79, 1.81))
    wrong = replace(slow, name="x", title="other", median_us=90.0, speedup=0.9, note="O is wrong")
    absent = Entry("fa3", "FlashAttention-3", note="not installed")
    with console.out.capture() as captured:
        console.out.print(console.bench_table(BenchResult(PROBLEM, "NVIDIA H200", "row", (ours, slow, absent, wrong))))
    lines = captured.get().splitlines()
    assert [line.split()[0] for line in lines[2:6]] == ["other", "fa4gen", "flash", "FlashAttention-3"]
    assert "O is wrong" in lines[2] and "1.800" in lines[4] and "[1.790, 1.810]" in lines[4]
    assert "not installed" in lines[5]
    right = replace(wrong, note="", tflops=720.0, clock_mhz=1500.0)
    results = [BenchResult(PROBLEM, "NVIDIA H200", "row", (ours, peer, wrong)) for peer in (slow, right)]
    with console.out.capture() as captured:
        console.out.print(console.bench_summary(results))
    head, *lines = captured.get().splitlines()
    assert "geometric mean 1.273, lowest 0.900" in head  # the root of 1.8 x 0.9; a wrong peer does not count
    assert "flash" in lines[1] and "other 720" in lines[2]


def test_bench_refuses_bad_input_before_it_starts() -> None:
    fails(2, "unknown peer 'fa9'", "bench", PROBLEM, "--peers", "fa9")
    fails(2, "unknown word", "bench", PROBLEM, "bogus", "--peers", "none")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to tune"),
        (("--preset", "absent"), "unknown preset 'absent'; known: demo"),
        (("--problem", "b=1"), "lacks heads"),
        (("--shapes", "absent.txt"), "No such file"),
        (("--preset", "demo", "--measure", "replay"), "--measure replay and --grid FILE belong together"),
        (("--preset", "demo", "--grid", "absent.json"), "--measure replay and --grid FILE belong together"),
        (("--preset", "demo", "--measure", "replay", "--grid", "absent.json"), "cannot read grid absent.json"),
        (("--preset", "demo", "--devices", "first"), "--devices wants indices"),
        (("--preset", "demo", "--measure", "model", "--arch", "sm_70"), "unknown arch 'sm_70'"),
        (("--preset", "demo", "--effort", "huge"), "unknown effort 'huge'"),
        (("--preset", "demo", "--measure", "model", "--space", "absent.yaml"), "cannot read absent.yaml"),
        (("--preset", "demo", "--measure", "model", "--record", "grid.json"), "--record keeps measurements"),
        (("--preset", "demo", "--measure", "bound", "--prefilter", "model"), "--prefilter chooses what to measure"),
        (("--measure", "bound", "--from-misses"), "no misses are recorded"),
    ],
)
def test_tune_refuses_bad_input(arguments: tuple[str, ...], message: str) -> None:
    fails(1 if "--shapes" in arguments else 2, message, "tune", *arguments)


def test_tune_shapes_with_the_bound(tmp_path: Path) -> None:
    shapes, table = tmp_path / "shapes.txt", tmp_path / "out.json"
    shapes.write_text(
        "# two, one of them twice\nb=1 h=2 s=512 d=64\n\nb=1 h=2 s=512 d=64  # again\nb=1 h=2 s=1024 d=64\n"
    )
    arguments = ("--shapes", shapes, "--measure", "bound", "--trials", "8", "--out", table)
    result = run("tune", *arguments)
    assert result.exit_code == 0, result.output
    assert "winners predicted by bound for NVIDIA H200" in result.stdout
    rows = TunedTable.load(table).rows
    assert [str(row.problem) for row in rows] == ["b=1 h=2 s=512 d=64", "b=1 h=2 s=1024 d=64"]
    assert {row.source for row in rows} == {Source.PREDICTED}
    assert run("tune", *arguments).stdout == result.stdout  # a second run has nothing left to do


def test_what_was_predicted_never_looks_measured(tmp_path: Path) -> None:
    """From a search for a GPU that nobody here has to every verb that shows its rows."""
    problem, b200 = "b=1 h=2 s=512 d=64", get_device("b200")
    table = tmp_path / "tuned" / f"{b200.key}.json"
    tuned = run(
        "tune", "--problem", problem, "--measure", "bound", "--arch", "sm_100a", "--trials", "6", "--out", table
    )
    assert tuned.exit_code == 0, tuned.output
    assert "winners predicted by bound for NVIDIA B200" in tuned.stdout and "us predicted" in tuned.stderr
    (row,) = TunedTable.load(table).rows
    assert row.source is Source.PREDICTED and row.family == "flash_fwd_sm100"
    assert console.us(row.interval_us[0]) + "," not in tuned.stdout, "a prediction has no interval"

    shown = run("show", problem, "--device", "b200")
    assert 'predicted row "' in shown.stdout and "not measured: by bound for NVIDIA B200" in shown.stdout
    assert "samples" not in shown.stdout and "predicted, not measured: fa4gen tune" in shown.stderr
    explained = run("table", "explain", problem, "--device", "b200").stdout
    assert "source    predicted" in explained and "a call counts as a miss" in explained
    TunedTable(b200.key).save(tmp_path / "empty.json")
    assert "us predicted" in run("table", "diff", tmp_path / "empty.json", table).stdout
    assert "1 rows, 1 predicted" in run("doctor").stdout


def test_tune_replays_a_grid(tmp_path: Path) -> None:
    problem, path = AttentionProblem.parse("b=1 h=2 s=512 d=64"), tmp_path / "grid.json"
    default = FlashFwdSm90Config.default(problem)
    best = replace(default, tile_n=96)
    times = {default: 20.0, best: 15.0, replace(default, tile_n=64): 30.0}
    recorded: dict[FlashFwdSm90Config, Measurement | Failure]
    recorded = {config: Measurement((us, us * 1.01, us * 1.02)) for config, us in times.items()}
    recorded[replace(default, tile_n=80)] = Failure(FailureKind.TIMEOUT, "no answer")
    grid = Grid(H200, "flash_fwd_sm90")
    grid.record(problem, recorded.items(), {})
    grid.save(path)
    result = run("tune", "--problem", str(problem), "--measure", "replay", "--grid", path, "--out", tmp_path / "t.json")
    assert result.exit_code == 0, result.output
    assert "winners by replay grid.json" in result.stdout and "tile_n=96" in result.stdout
    assert "1 timeout" in result.stderr
    (row,) = TunedTable.load(tmp_path / "t.json").rows
    assert row.config == best and row.provenance.measurer.startswith("replay grid.json")
    assert not (tmp_path / "tuned").exists()
    assert "tile_n=96" in run("show", str(problem), "--device", "h200", "--table", tmp_path / "t.json").stdout


def test_tune_backwards_of_a_grid(tmp_path: Path) -> None:
    """``--op bwd`` turns a forward's text into its backward, which a grid of the backward family serves."""
    problem, path = AttentionProblem.parse("b=1 h=2 s=512 d=64 op=bwd deterministic"), tmp_path / "grid.json"
    default = FlashBwdSm90Config.default(problem)
    best = replace(default, tile_order="linear" if default.tile_order != "linear" else "longest_first")
    grid = Grid(H200, "flash_bwd_sm90")
    grid.record(problem, [(default, Measurement((20.0, 20.1))), (best, Measurement((15.0, 15.1)))], {})
    grid.save(path)
    arguments = ("--measure", "replay", "--grid", path, "--out", tmp_path / "t.json")
    result = run("tune", "--problem", "b=1 h=2 s=512 d=64 lse", "--op", "bwd", "--deterministic", *arguments)
    assert result.exit_code == 0, result.output
    (row,) = TunedTable.load(tmp_path / "t.json").rows
    assert row.problem == problem and row.config == best and row.family == "flash_bwd_sm90"
    shown = run("show", str(problem), "--device", "h200", "--table", tmp_path / "t.json").stdout
    assert f"tile_order={best.tile_order}" in shown and "this very problem" in shown
    fails(2, "deterministic belongs to op=bwd", "tune", "--problem", "h=2 s=512 d=64", "--deterministic")


@pytest.mark.parametrize(
    ("text", "op", "deterministic", "want"),
    [
        ("h=2 s=64 d=64 causal lse", None, False, "b=1 h=2 s=64 d=64 causal lse"),
        ("h=2 s=64 d=64 causal lse", "bwd", False, "b=1 h=2 s=64 d=64 op=bwd causal"),
        ("h=2 s=64 d=64 op=bwd", None, True, "b=1 h=2 s=64 d=64 op=bwd deterministic"),
        ("h=2 s=64 d=64 op=bwd deterministic", "bwd", False, "b=1 h=2 s=64 d=64 op=bwd deterministic"),
        ("h=2 s=64 d=64 op=bwd deterministic", "fwd", False, "b=1 h=2 s=64 d=64"),
    ],
)
def test_op_and_deterministic_apply_to_problems(text: str, op: str | None, deterministic: bool, want: str) -> None:
    problem = AttentionProblem.parse(text)
    assert list(map(str, _as_op([problem, problem], op and OpName(op), deterministic))) == [want]


def test_op_applies_to_presets() -> None:
    problems = _as_op(list(get_preset("paper")), OpName.BWD, False)
    assert len(problems) == 36 and {p.op for p in problems} == {"bwd"}


def test_bench_goes_on_after_a_problem_that_nothing_can_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    benched = []

    def bench(problem: AttentionProblem, contestants: Any, **options: Any) -> BenchResult:
        benched.append((str(problem), [peer.title for peer in contestants]))
        if problem.head_dim > 128:
            raise UnsupportedProblem("no config")
        return BenchResult(str(problem), "NVIDIA H200", "row", ())

    monkeypatch.setattr("fa4gen.bench.bench", bench)
    monkeypatch.setattr("fa4gen.measure.cuda.current_device", lambda index: H200)
    monkeypatch.setattr("fa4gen.cli.bench_table", lambda result: result.problem)
    monkeypatch.setattr("fa4gen.cli._compile_ahead", lambda problems, gpu: None)
    shapes, out = ("h=2 s=64 d=192", "h=2 s=64 d=64"), tmp_path / "bench.json"
    result = run("bench", *shapes, "--op", "bwd", "--peers", "none", "--set", "tile_n=64", "--json", out)
    assert result.exit_code == 1 and "cannot run b=1 h=2 s=64 d=192 op=bwd: no config" in result.stderr
    assert benched == [(f"b=1 h=2 s=64 d={d} op=bwd", ["fa4gen with tile_n=64"]) for d in (192, 64)]
    assert len(json.loads(out.read_text())) == 1


def test_interrupted_tuning_keeps_what_is_finished(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted_at_the_second(self: BoundMeasurer, problem: AttentionProblem, *args: Any, **kwargs: Any) -> Any:
        if problem.seqlen_q == 1024:
            raise KeyboardInterrupt
        return measure(self, problem, *args, **kwargs)

    measure = BoundMeasurer.measure
    monkeypatch.setattr(BoundMeasurer, "measure", interrupted_at_the_second)
    problems = ("--problem", "b=1 h=2 s=512 d=64", "--problem", "b=1 h=2 s=1024 d=64")
    result = run("tune", *problems, "--measure", "bound", "--trials", "6", "--out", tmp_path / "t.json")
    assert result.exit_code == 130, result.output
    assert "everything finished is saved" in result.stderr and "b=1 h=2 s=512 d=64" in result.stdout
    assert len(TunedTable.load(tmp_path / "t.json").rows) == 1
