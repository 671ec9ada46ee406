"""A recommendation needs every check; what is missing is named."""

from __future__ import annotations

import pytest

from browndwarf.errors import CheckFailed
from browndwarf.quality.gate import GateReport
from browndwarf.quality.lossless import Settings, check_lossless
from quality.fake_decoders import PROMPTS, FakeArms


async def test_only_a_setup_with_both_checks_is_recommended() -> None:
    settings = Settings(n_max=3, tokens=60)
    good = await check_lossless(FakeArms(), PROMPTS, settings)
    bad = await check_lossless(FakeArms(broken=True), PROMPTS, settings)
    GateReport(lossless=good, smoke_passed=True).require()
    for report in (
        GateReport(lossless=bad, smoke_passed=True),
        GateReport(lossless=good, smoke_passed=False),
        GateReport(lossless=good),
        GateReport(smoke_passed=True),
    ):
        assert not report.passed
        with pytest.raises(CheckFailed):
            report.require()


def test_what_was_not_checked_is_in_the_header() -> None:
    assert GateReport().header == [
        "checked: nothing; not checked: losslessness, two-turn smoke test"
    ]
    assert GateReport(speculative=False, smoke_passed=True).header == [
        "checked: two-turn smoke test"
    ]
    assert GateReport(speculative=False, smoke_passed=True).passed
