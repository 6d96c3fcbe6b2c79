"""Whole numbers with suffixes."""

import argparse

import pytest

from jaxinfer.cli.human_int import human_int


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("0", 0), ("4096", 4096), ("-1", -1), ("1_000", 1000), ("32K", 32768), ("32k", 32000), ("25.6k", 25600)),
        *(("1M", 2**20), ("1m", 10**6), ("2G", 2**31), ("1.5g", 1_500_000_000), ("1T", 2**40), ("0.001k", 1)),
    ],
)
def test_values(text: str, value: int) -> None:
    assert human_int(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.5K", "1.0001k", "1e3", "10 k", "0x10", "1kk", "1KB"])
def test_refused(text: str) -> None:
    with pytest.raises(ValueError):
        human_int(text)


def test_the_command_line_says_what_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=human_int)
    with pytest.raises(SystemExit):
        parser.parse_args(["--size", "50KB"])
    assert "argument --size: '50KB' is not a whole number such as 4096, 32K" in capsys.readouterr().err
