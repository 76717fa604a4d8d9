"""The search as a whole: seeds, failures, resuming after a kill, several measurers, Ctrl-C, recording."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from tune_fakes import H200, PROBLEM, FakeCompiler, FakeMeasurer, Landscape

from fa4gen.config import FAMILIES, FlashFwdSm90Config
from fa4gen.errors import CacheError, Fa4genError, MeasureError, UsageError
from fa4gen.measure.base import Failure, FailureKind, Source
from fa4gen.measure.model import BoundMeasurer
from fa4gen.measure.replay import Grid, ReplayMeasurer
from fa4gen.problem import AttentionProblem
from fa4gen.search_space import Knob, SearchSpace
from fa4gen.tune.effort import QUICK
from fa4gen.tune.known_bad import KnownBad
from fa4gen.tune.ledger import open_storage
from fa4gen.tune.objective import Bench
from fa4gen.tune.result import TuneResult
from fa4gen.tune.study import Observer, Settings, nearby_winners, tune_problem, tune_problems

EFFORT = replace(QUICK, trials=12)
DEFAULT = FlashFwdSm90Config.default(PROBLEM)
SPACE = SearchSpace.load(FAMILIES["flash_fwd_sm90"])
LANDSCAPE = Landscape(1)


class Recorder(Observer):
    def __init__(self) -> None:
        self.started: list[tuple[int, int]] = []
        self.trials: list = []
        self.done: list[int] = []
        self.best: list[float | None] = []
        self.rounds: list[int] = []
        self.finished: list = []
        self.errors: list = []

    def on_start(self, problem, done, total):
        self.started.append((done, total))

    def on_trial(self, problem, done, total, trial, best_us):
        self.trials.append(trial)
        self.done.append(done)
        self.best.append(best_us)

    def on_round(self, problem, done, total, running):
        self.rounds.append(done)

    def on_finish(self, problem, result, trials):
        self.finished.append((result, list(trials)))

    def on_error(self, problem, error):
        self.errors.append((problem, error))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(EFFORT, storage=tmp_path / "study.journal")


@pytest.fixture
def known_bad(tmp_path: Path) -> KnownBad:
    return KnownBad(tmp_path / "bad.json")


def bench(known_bad: KnownBad, *measurers, compiler=None, **options) -> Bench:
    return Bench(measurers or (FakeMeasurer(LANDSCAPE),), compiler, known_bad, **options)


def test_finds_a_winner_and_reports_on_the_way(settings, known_bad) -> None:
    measurer, seen = FakeMeasurer(LANDSCAPE), Recorder()
    result = tune_problem(PROBLEM, bench(known_bad, measurer), settings, observer=seen)
    assert seen.started == [(0, 12)] and seen.done == list(range(1, 13))
    assert [t.config for t in seen.trials] == measurer.measured[:12]
    assert len({t.config for t in seen.trials}) == 12 and seen.trials[0].config == DEFAULT
    assert all(a >= b for a, b in zip(seen.best, seen.best[1:], strict=False))
    assert seen.rounds == list(range(1, result.provenance["rounds"] + 1))
    assert seen.finished == [(result, seen.trials)]
    assert LANDSCAPE(result.config) < LANDSCAPE(DEFAULT)
    assert result.median_us == pytest.approx(LANDSCAPE(result.config), rel=0.01)
    assert result.interval_us[0] <= result.median_us <= result.interval_us[1]
    assert result.default_us == pytest.approx(LANDSCAPE(DEFAULT), rel=0.01)
    assert LANDSCAPE(result.runner_up) / LANDSCAPE(result.config) - 1 == pytest.approx(result.runner_up_gap, abs=0.01)
    assert (result.problem, result.device, result.family) == (PROBLEM, H200, "flash_fwd_sm90")
    assert result.source is Source.MEASURED
    assert result.samples >= QUICK.race_samples * QUICK.min_rounds
    assert result.provenance["trials"] == 12 and result.provenance["clock_mhz"] == 1500.0


def test_result_is_plain_data_and_a_row(settings, known_bad) -> None:
    result = tune_problem(PROBLEM, bench(known_bad, provenance={"driver": "580.1"}), settings)
    assert TuneResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    row = result.row()
    assert (row.problem, row.config, row.runner_up.config) == (PROBLEM, result.config, result.runner_up)
    assert row.median_us == pytest.approx(result.median_us, abs=1e-3)
    assert (row.provenance.measurer, row.provenance.driver, row.provenance.samples) == ("fake", "580.1", result.samples)


def test_the_same_seed_makes_the_same_search(tmp_path, known_bad) -> None:
    def configs(name: str, seed: int, compiler=None) -> list:
        measurer = FakeMeasurer(LANDSCAPE, needs_artifact=compiler is not None)
        settings = Settings(EFFORT, seed, storage=tmp_path / name)
        tune_problem(PROBLEM, bench(known_bad, measurer, compiler=compiler), settings)
        return measurer.measured[:12]

    assert configs("a", 3) == configs("b", 3) != configs("c", 4)
    assert configs("d", 3, FakeCompiler()) == configs("e", 3, FakeCompiler())


def test_seeds_come_after_the_default_if_they_can_run(settings, known_bad) -> None:
    good = replace(DEFAULT, tile_n=64)
    cannot = replace(DEFAULT, tile_m=256, tile_n=256)
    elsewhere = replace(DEFAULT, tile_n=72)
    measurer = FakeMeasurer(LANDSCAPE)
    tune_problem(PROBLEM, bench(known_bad, measurer), settings, seeds=[cannot, elsewhere, good, DEFAULT])
    assert measurer.measured[:2] == [DEFAULT, good]
    assert not {cannot, elsewhere} & set(measurer.measured)


def test_compiles_ahead_and_measures_in_order(settings, known_bad) -> None:
    compiler, measurer = FakeCompiler(), FakeMeasurer(LANDSCAPE, needs_artifact=True)
    ahead: list[int] = []
    measure = measurer.measure

    def spy(*args, **options):
        if len(measurer.measured) < 12:
            ahead.append(len(compiler.submitted) - len(measurer.measured) - 1)
        return measure(*args, **options)

    measurer.measure = spy
    tune_problem(PROBLEM, bench(known_bad, measurer, compiler=compiler), settings)
    assert ahead == [4] * 8 + [3, 2, 1, 0]
    assert compiler.submitted[:12] == measurer.measured[:12]


def test_code_that_spills_or_serialises_is_not_measured_unless_asked(tmp_path, known_bad) -> None:
    facts = lambda c: {"spill_store_bytes": 64, "spill_load_bytes": 8} if c.kv_stages == 3 else {}  # noqa: E731
    serial = lambda c: {"wgmma_serialized": True} if c.kv_stages == 4 else facts(c)  # noqa: E731

    def run(keep: bool):
        measurer, seen = FakeMeasurer(LANDSCAPE, needs_artifact=True), Recorder()
        settings = Settings(replace(EFFORT, trials=30), storage=tmp_path / f"{keep}")
        here = bench(known_bad, measurer, compiler=FakeCompiler(serial), keep_slow_code=keep)
        result = tune_problem(PROBLEM, here, settings, observer=seen)
        return measurer, seen, result

    measurer, seen, result = run(keep=False)
    assert {c.kv_stages for c in measurer.measured} == {2}
    messages = Counter(t.outcome.result.message for t in seen.trials if isinstance(t.outcome.result, Failure))
    assert set(messages) == {"ptxas spills 72 B a thread", "ptxas serialises its wgmma instructions"}
    assert result.provenance["failures"] == {"infeasible": sum(messages.values())}
    assert {t.outcome.facts["spill_store_bytes"] for t in seen.trials if t.config.kv_stages == 3} == {64}
    measurer, seen, _ = run(keep=True)
    assert {c.kv_stages for c in measurer.measured} > {2}
    assert not any(isinstance(t.outcome.result, Failure) for t in seen.trials)


@pytest.mark.parametrize("kind", [FailureKind.TIMEOUT, FailureKind.CRASHED, FailureKind.WRONG])
def test_a_bad_config_costs_one_trial_and_is_never_tried_again(tmp_path, kind) -> None:
    bad = replace(DEFAULT, tile_n=64)
    for run in range(3):
        measurer = FakeMeasurer(LANDSCAPE, failures=lambda c: kind if c == bad else None, needs_artifact=True)
        here = bench(KnownBad(tmp_path / "bad.json"), measurer, compiler=FakeCompiler())
        settings = Settings(EFFORT, storage=tmp_path / f"study{run}")
        result = tune_problem(PROBLEM, here, settings, seeds=[bad])
        assert measurer.measured.count(bad) == (run == 0)
        assert result.provenance["failures"] == ({kind.value: 1} if run == 0 else {})
        assert result.provenance["trials"] == 12


def test_trials_store_everything_in_the_study(settings, known_bad) -> None:
    measurer = FakeMeasurer(
        LANDSCAPE, failures=lambda c: FailureKind.LAUNCH if c.kv_stages == 3 else None, needs_artifact=True
    )
    here = bench(known_bad, measurer, compiler=FakeCompiler())
    tune_problem(PROBLEM, here, replace(settings, effort=replace(EFFORT, trials=25)))
    (study,) = optuna.get_all_study_summaries(open_storage(settings.storage))
    assert str(PROBLEM) in study.study_name and H200.key in study.study_name
    states = Counter(t.state.name for t in trials(settings.storage))
    assert set(states) == {"COMPLETE", "FAIL"} and states.total() == 25
    for trial in trials(settings.storage):
        outcome = trial.user_attrs["outcome"]
        assert trial.user_attrs["config"]["tile_m"] == trial.params["tile_m"]
        assert outcome["facts"]["registers"] == 168
        if trial.state.name == "COMPLETE":
            assert len(outcome["result"]["samples_us"]) == QUICK.samples
            assert (outcome["result"]["clock_mhz"], outcome["result"]["power_w"]) == (1500.0, 600.0)
        else:
            assert outcome["result"] == {"kind": "launch", "message": "a launch of the fake"}


def test_running_again_measures_nothing_and_more_effort_goes_on(settings, known_bad) -> None:
    first = tune_problem(PROBLEM, bench(known_bad), settings)
    again, seen = FakeMeasurer(LANDSCAPE), Recorder()
    assert tune_problem(PROBLEM, bench(known_bad, again), settings, observer=seen) == first
    assert again.measured == [] and seen.started == [(12, 12)] and len(seen.finished[0][1]) == 12
    more = Recorder()
    settings = replace(settings, effort=replace(EFFORT, trials=15))
    tune_problem(PROBLEM, bench(known_bad, again), settings, observer=more)
    assert more.started == [(12, 15)] and more.done == [13, 14, 15]


def test_times_that_cannot_be_compared_do_not_mix(settings, known_bad) -> None:
    tune_problem(PROBLEM, bench(known_bad), settings)
    other_space = replace(SPACE, knobs=(replace(SPACE.knobs[0], choices=(128, 192)), *SPACE.knobs[1:]))
    for change in ({"space": other_space}, {}):
        measurer, seen = FakeMeasurer(LANDSCAPE), Recorder()
        measurer.name = "fake" if change else "other"
        tune_problem(PROBLEM, bench(known_bad, measurer), replace(settings, **change), observer=seen)
        assert seen.started == [(0, 12)]


SEARCH = """
import sys
from dataclasses import replace
from pathlib import Path
from tune_fakes import PROBLEM, FakeMeasurer, Landscape
from fa4gen.tune import EFFORTS, Bench, KnownBad, Settings, tune_problem

folder, delay_s = Path(sys.argv[1]), float(sys.argv[2])
measurer = FakeMeasurer(Landscape(1), delay_s=delay_s, log=folder / "log")
settings = Settings(replace(EFFORTS["quick"], trials=12, race_samples=7), storage=folder / "study.journal")
tune_problem(PROBLEM, Bench([measurer], None, KnownBad(folder / "bad.json")), settings)
"""


def search(folder: Path, delay_s: float) -> subprocess.Popen[bytes]:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parents[1]), str(here)])
    return subprocess.Popen(
        [sys.executable, "-c", SEARCH, str(folder), str(delay_s)],
        env=os.environ | {"PYTHONPATH": path},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job may have it ignored
    )


def measured(folder: Path) -> list[str]:
    """Digests of the configs measured by trials, not by the race, over all processes."""
    log = folder / "log"
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return [digest for digest, samples in lines if int(samples) == QUICK.samples]


def wait_for(condition, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)


def trials(storage_file: Path) -> list[optuna.trial.FrozenTrial]:
    storage = open_storage(storage_file)
    (study,) = optuna.get_all_study_summaries(storage)
    return optuna.load_study(study_name=study.study_name, storage=storage).trials


def wait_until_measuring(folder: Path, done: int, process: subprocess.Popen[bytes]) -> None:
    """Returns in the middle of the measurement after the first ``done``."""

    def measuring() -> bool:
        if len(measured(folder)) < done:
            return False
        states = Counter(t.state.name for t in trials(folder / "study.journal"))
        return states["COMPLETE"] == done and states["RUNNING"] == 1

    wait_for(measuring, process)


def counted(folder: Path) -> list[dict]:
    """Parameters of the trials that count, in order."""
    return [t.params for t in trials(folder / "study.journal") if "outcome" in t.user_attrs]


def test_kill_9_and_run_again_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """Killed twice in the middle of a measurement, it ends where an undisturbed search ends."""
    disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
    for folder in (disturbed, undisturbed):
        folder.mkdir()
    for kill_after in (4, 8):
        process = search(disturbed, 0.5)
        wait_until_measuring(disturbed, kill_after, process)
        process.kill()
        process.wait()
    assert search(disturbed, 0.0).wait(60) == 0
    assert search(undisturbed, 0.0).wait(60) == 0
    assert measured(disturbed) == measured(undisturbed)
    assert len(set(measured(disturbed))) == len(measured(disturbed)) == 12
    assert counted(disturbed) == counted(undisturbed)
    assert not {t.state.name for t in trials(disturbed / "study.journal")} & {"RUNNING", "WAITING"}


def test_ctrl_c_saves_what_is_finished_and_leaves_nothing_running(tmp_path: Path) -> None:
    process = search(tmp_path, 0.5)
    wait_until_measuring(tmp_path, 4, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0
    states = Counter(t.state.name for t in trials(tmp_path / "study.journal"))
    assert states == {"COMPLETE": 5}  # the measurement that ran was finished
    assert search(tmp_path, 0.0).wait(60) == 0
    assert len(set(measured(tmp_path))) == len(measured(tmp_path)) == len(counted(tmp_path)) == 12


def test_an_interrupt_puts_back_what_was_compiled_ahead(settings, known_bad) -> None:
    measurer = FakeMeasurer(LANDSCAPE, needs_artifact=True)
    compiler = FakeCompiler()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    class Stopper(Observer):
        def on_trial(self, problem, done, total, trial, best_us):
            if done == 3:
                stop()

    here = bench(known_bad, measurer, compiler=compiler)
    with pytest.raises(KeyboardInterrupt):
        tune_problem(PROBLEM, here, settings, observer=Stopper())
    states = Counter(t.state.name for t in trials(settings.storage))
    assert states["COMPLETE"] == 3 and states["RUNNING"] == 0 and states["WAITING"] == 4
    tune_problem(PROBLEM, here, settings)
    assert len(set(measurer.measured[:12])) == 12 and compiler.submitted[:7] == measurer.measured[:7]


def test_a_trial_told_but_not_ended_is_not_made_again(settings, known_bad) -> None:
    """Killed between the outcome and the end of its trial."""
    tune_problem(PROBLEM, bench(known_bad), settings)
    lines = settings.storage.read_text().splitlines()
    last = max(i for i, line in enumerate(lines) if '"outcome"' in line)
    settings.storage.write_text("\n".join(lines[: last + 1]) + "\n")
    measurer, seen = FakeMeasurer(LANDSCAPE), Recorder()
    tune_problem(PROBLEM, bench(known_bad, measurer), settings, observer=seen)
    assert seen.started == [(12, 12)] and seen.trials == []
    assert Counter(t.state.name for t in trials(settings.storage)) == {"COMPLETE": 12}


def test_a_torn_last_line_of_the_journal_is_mended(settings, known_bad) -> None:
    tune_problem(PROBLEM, bench(known_bad), settings)
    with settings.storage.open("a") as file:
        file.write('{"op_code": 4, "worker')
    seen = Recorder()
    more = replace(settings, effort=replace(EFFORT, trials=14))
    tune_problem(PROBLEM, bench(known_bad), more, observer=seen)
    assert seen.started == [(12, 14)]
    tune_problem(PROBLEM, bench(known_bad), more, observer=seen)
    assert seen.started[1:] == [(14, 14)]


def test_a_file_that_is_no_journal(tmp_path, known_bad) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\nworld\n")
    with pytest.raises(UsageError, match=r"notes.txt is no study file, or damaged"):
        tune_problem(PROBLEM, bench(known_bad), Settings(EFFORT, storage=path))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot open study file"):
        open_storage(tmp_path / "file" / "study.journal")
    with pytest.raises(UsageError, match="cannot open study storage nosuchdb://x"):
        open_storage("nosuchdb://x")


def test_a_database_instead_of_a_journal(tmp_path, known_bad) -> None:
    settings = Settings(EFFORT, storage=f"sqlite:///{tmp_path}/study.db")
    measurer, seen = FakeMeasurer(LANDSCAPE), Recorder()
    result = tune_problem(PROBLEM, bench(known_bad, measurer), settings)
    assert tune_problem(PROBLEM, bench(known_bad, measurer), settings, observer=seen) == result
    assert seen.started == [(12, 12)]


def test_several_measurers_share_the_trials(settings, known_bad) -> None:
    measurers = [FakeMeasurer(LANDSCAPE, delay_s=0.05, needs_artifact=True) for _ in range(3)]
    seen = Recorder()
    here = bench(known_bad, *measurers, compiler=FakeCompiler())
    result = tune_problem(PROBLEM, here, replace(settings, effort=replace(EFFORT, trials=24)), observer=seen)
    assert seen.done == list(range(1, 25))
    assert len({t.config for t in seen.trials}) == 24
    others = [set(m.measured) for m in measurers[1:]]
    assert all(others) and not others[0] & others[1]
    race = measurers[0].measured[-result.provenance["rounds"] :]
    assert set(race) <= {t.config for t in seen.trials}  # the race runs on one device


def test_an_error_of_one_measurer_stops_all_and_keeps_the_trials(settings, known_bad) -> None:
    good, broken = FakeMeasurer(LANDSCAPE, delay_s=0.02), FakeMeasurer(LANDSCAPE, delay_s=0.02)

    def fail(*args, **options):
        raise MeasureError("the device is gone")

    broken.measure = fail
    with pytest.raises(MeasureError, match="the device is gone"):
        tune_problem(PROBLEM, bench(known_bad, good, broken), settings)
    states = Counter(t.state.name for t in trials(settings.storage))
    assert states["RUNNING"] == 0 and states["COMPLETE"] < 12
    seen = Recorder()
    tune_problem(PROBLEM, bench(known_bad), settings, observer=seen)
    assert seen.started == [(states["COMPLETE"], 12)] and seen.done[-1] == 12


def test_a_full_disk_under_the_artifact_cache_is_no_trial(settings, known_bad) -> None:
    class Full(FakeCompiler):
        def submit(self, variant):
            future = super().submit(variant)
            if len(self.submitted) > 6:
                future = type(future)()
                future.set_exception(CacheError("cannot write the artifact cache"))
            return future

    measurer = FakeMeasurer(LANDSCAPE, needs_artifact=True)
    with pytest.raises(CacheError):
        tune_problem(PROBLEM, bench(known_bad, measurer, compiler=Full()), settings)
    states = Counter(t.state.name for t in trials(settings.storage))
    assert states["COMPLETE"] == 6 and states["RUNNING"] == 0
    tune_problem(PROBLEM, bench(known_bad, measurer, compiler=FakeCompiler()), settings)
    assert len(set(measurer.measured[:12])) == 12


def test_a_study_that_cannot_be_written_is_one_clear_error(settings, known_bad, monkeypatch) -> None:
    storage = settings.open_storage()
    append = type(storage._backend).append_logs
    calls = []

    def full(backend, logs):
        calls.append(logs)
        if len(calls) > 30:
            raise OSError(28, "No space left on device")
        append(backend, logs)

    monkeypatch.setattr(type(storage._backend), "append_logs", full)
    with pytest.raises(Fa4genError, match=r"cannot write the study: .*No space left"):
        tune_problem(PROBLEM, bench(known_bad), replace(settings, storage=storage))
    monkeypatch.undo()
    seen = Recorder()
    tune_problem(PROBLEM, bench(known_bad), settings, observer=seen)
    assert seen.started[0][0] > 0 and seen.done[-1] == 12


def test_compile_errors_are_trials_and_all_of_them_an_error(settings, known_bad) -> None:
    compiler = FakeCompiler(lambda config: {"error": f"ptxas is unhappy with {config.tile_m}"})
    measurer = FakeMeasurer(LANDSCAPE, needs_artifact=True)
    with pytest.raises(MeasureError, match=r"no config could be measured .*: 12 compile; the first: ptxas is unhappy"):
        tune_problem(PROBLEM, bench(known_bad, measurer, compiler=compiler), settings)
    assert measurer.measured == []


def test_nothing_feasible(settings, known_bad) -> None:
    fixed = {"tile_m": 256, "tile_n": 256}
    knobs = tuple(Knob(k.name, (fixed[k.name],), fixed[k.name]) if k.name in fixed else k for k in SPACE.knobs)
    with pytest.raises(MeasureError, match="no config of the space can run"):
        tune_problem(PROBLEM, bench(known_bad), replace(settings, space=replace(SPACE, knobs=knobs)))
    with pytest.raises(UsageError, match="is empty: there is nothing to tune"):
        tune_problem(replace(PROBLEM, seqlen_k=0), bench(known_bad), settings)


def test_a_config_that_fails_in_the_race_is_out(settings, known_bad) -> None:
    measurer = FakeMeasurer(LANDSCAPE, needs_artifact=True)
    here = bench(known_bad, measurer, compiler=FakeCompiler())
    best = tune_problem(PROBLEM, here, settings).config
    failing = FakeMeasurer(LANDSCAPE, needs_artifact=True)
    failing.failures = lambda c: FailureKind.CRASHED if c == best and failing.measured.count(c) > 1 else None
    here = bench(known_bad, failing, compiler=FakeCompiler())
    result = tune_problem(PROBLEM, here, replace(settings, storage=settings.storage.with_name("other")))
    assert result.config != best
    assert known_bad.get(here.variant(PROBLEM, best)).kind is FailureKind.CRASHED


def test_the_budget_ends_the_search_early(settings, known_bad) -> None:
    measurer, seen = FakeMeasurer(LANDSCAPE, delay_s=0.05), Recorder()
    effort = replace(EFFORT, trials=1000, max_rounds=1000)
    result = tune_problem(
        PROBLEM, bench(known_bad, measurer), replace(settings, effort=effort, budget_s=0.5), observer=seen
    )
    assert 1 <= len(seen.trials) <= 10
    assert result.provenance["rounds"] == QUICK.min_rounds


def test_replay_searches_recorded_configs_only_and_records(tmp_path, settings, known_bad) -> None:
    first = replace(settings, record=tmp_path / "grid.json.gz", effort=replace(EFFORT, trials=30))
    measurer = FakeMeasurer(LANDSCAPE, failures=lambda c: FailureKind.WRONG if c.kv_stages == 4 else None)
    tune_problem(PROBLEM, bench(known_bad, measurer), first)
    grid = Grid.load(first.record)
    assert set(grid.problems[PROBLEM].trials) == set(measurer.measured)
    assert any(isinstance(r, Failure) for r in grid.problems[PROBLEM].trials.values())
    replay, seen = ReplayMeasurer(first.record), Recorder()
    result = tune_problem(PROBLEM, bench(known_bad, replay), settings, observer=seen)
    assert len(seen.trials) == 12 and {t.config for t in seen.trials} <= set(measurer.measured)
    assert not any(getattr(t.outcome.result, "kind", None) is FailureKind.INFEASIBLE for t in seen.trials)
    assert result.provenance["measurer"] == replay.name
    whole = Recorder()
    tune_problem(PROBLEM, bench(known_bad, replay), replace(settings, effort=QUICK), observer=whole)
    assert whole.done[-1] == 30  # all there is
    with pytest.raises(UsageError, match="holds no time for"):
        tune_problem(replace(PROBLEM, batch=1), bench(known_bad, replay), settings)
    other = BoundMeasurer(replace(H200, sm_count=114))
    with pytest.raises(UsageError, match=r"records flash_fwd_sm90 on sm_90a-132sm-228kb: name another file"):
        tune_problem(PROBLEM, bench(known_bad, other), first)


def test_predictions_are_marked(settings, known_bad) -> None:
    result = tune_problem(PROBLEM, bench(known_bad, BoundMeasurer(H200)), settings)
    assert result.source is Source.PREDICTED and result.row().source is Source.PREDICTED
    assert result.row().provenance.measurer == "bound"


def test_problems_seed_each_other_and_one_without_result_does_not_stop_the_rest(settings, known_bad) -> None:
    near, far, failing = (
        AttentionProblem.parse(f"b=8 h=16 {text} causal") for text in ("s=2048 d=128", "s=512 d=64", "s=64 d=128")
    )
    measurer, seen = FakeMeasurer(LANDSCAPE, needs_artifact=False), Recorder()
    measure = measurer.measure

    def selective(problem, *args, **options):
        if problem == failing:
            return Failure(FailureKind.LAUNCH, "no")
        return measure(problem, *args, **options)

    measurer.measure = selective
    known = replace(DEFAULT, tile_n=64)
    results = tune_problems(
        [PROBLEM, failing, near, far], bench(known_bad, measurer), settings, known=[(near, known)], observer=seen
    )
    assert [r.problem for r in results] == [PROBLEM, near, far]
    assert [p for p, _ in seen.errors] == [failing]
    assert measurer.measured[1] == known
    of_near = next(trials for result, trials in seen.finished if result.problem == near)
    seeds = list(dict.fromkeys([FlashFwdSm90Config.default(near), known, results[0].config]))
    assert [t.config for t in of_near[: len(seeds)]] == seeds


def test_nearby_winners_are_of_the_same_dims_nearest_first() -> None:
    def winner(text: str, tile_n: int):
        return AttentionProblem.parse(text), replace(DEFAULT, tile_n=tile_n)

    winners = [
        winner("b=8 h=16 s=16384 d=128 causal", 32),
        winner("b=8 h=16 s=8192 d=128 causal", 48),
        winner("b=8 h=16 s=4096 d=128", 64),
        winner("b=8 h=16 s=2048 d=128 causal", 48),
        winner("b=8 h=16 s=4096 d=64 causal", 80),
    ]
    assert [c.tile_n for c in nearby_winners(PROBLEM, winners, 132)] == [48, 32, 64]
    assert [c.tile_n for c in nearby_winners(PROBLEM, winners, 132, count=1)] == [48]


def test_a_bench_closes_what_it_was_given(known_bad) -> None:
    measurer, compiler = FakeMeasurer(LANDSCAPE, needs_artifact=True), FakeCompiler()
    with bench(known_bad, measurer, compiler=compiler):
        pass
    with pytest.raises(KeyboardInterrupt), bench(known_bad, measurer, compiler=compiler):
        raise KeyboardInterrupt
    assert measurer.closed == 2 and compiler.closed == [False, True]


def test_a_bench_must_fit(known_bad) -> None:
    with pytest.raises(UsageError, match="needs measurers of one kind of device, got: none"):
        Bench((), None, known_bad)
    with pytest.raises(UsageError, match=r"bound on NVIDIA H200 .*, fake on NVIDIA H200"):
        Bench((FakeMeasurer(LANDSCAPE), BoundMeasurer(H200)), None, known_bad)
    with pytest.raises(UsageError, match="needs compiled kernels, and there is no compiler"):
        Bench((FakeMeasurer(LANDSCAPE, needs_artifact=True),), None, known_bad)
