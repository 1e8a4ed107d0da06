"""Wrong flags of `python -m benches.compare`: what was expected, what came."""

from __future__ import annotations

import importlib.util

import pytest

from benches.compare.__main__ import main


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kill", "9@3"], "--kill 9@3: expected a worker below 4"),
        (["--kill", "1@900"], "a step below 100"),
        (["--kill", "1@3", "--kill", "1@4"], "a worker dies only once"),
        (["--kill", "0@3", "--kill", "1@3", "--kill", "2@3"], "at least --expert-parallel 2 survivors of 4"),
        (["--join", "100"], "--join: expected a step below 100, got 100"),
        (["--expert-parallel", "3"], "a divisor of --experts 8 and at most --workers 4, got 3"),
        (["--expert-parallel", "8"], "at most --workers 4, got 8"),
        (["--kill", "1@3", "--mtbf", "9"], "one schedule of failures, got several"),
        (["--join", "3", "--mtbf", "9"], "one schedule of failures, got several"),
        (["--mtbf", "0"], "--mtbf"),
        (["--mtbf", "nan"], "--mtbf"),
        (["--trace", "missing.csv"], "No such file or directory: missing.csv"),
        (["--trace-start", "nan"], "--trace-start"),
        (["--workers", "0"], "--workers"),
        (["--balance", "inf"], "--balance"),
        (["--limit", "-1"], "--limit"),
        (["--held-out", "100000000"], "expected to leave a batch of 24 of"),
        (["--checkpoint-interval", "0"], "--checkpoint-interval"),
    ],
)
def test_wrong_flags_say_what_was_expected(flags, message, capsys):
    assert main([*flags]) == 2
    assert message in capsys.readouterr().err


def test_unknown_candidate_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--candidate", "hope"])
    assert "invalid choice: 'hope'" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("nvidia_resiliency_ext") is not None, reason="it is installed here")
def test_candidate_that_is_not_installed_says_how_to_install_it(capsys):
    assert main(["--candidate", "nvrx"]) == 2
    assert "pip install nvidia-resiliency-ext" in capsys.readouterr().err


def test_folder_that_has_results_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "ds").mkdir()
    flags = ["--candidate", "auto", "--candidate", "ds", "--candidate", "ds"]
    assert main([*flags, "--keep", str(tmp_path)]) == 2
    assert not (tmp_path / "auto").exists(), "that is said before any run"
    assert "expected a folder without ds" in capsys.readouterr().err
