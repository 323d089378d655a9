"""Does a skip in CI fail, and only there? Does a test leave the environment as it was?"""

from __future__ import annotations

import os

import pytest
from tests.conftest import ALLOWED_SKIPS_IN_CI, forbid_skip


def skipped_report(reason: str) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid="t", location=("t", 1, "t"), keywords={}, outcome="skipped", longrepr=("t", 1, reason), when="setup"
    )


def test_a_skip_in_ci_is_a_failure_that_names_its_reason():
    report = skipped_report("Skipped: no Chromium here")
    forbid_skip(report, in_ci=True)
    assert report.failed
    assert "no Chromium here" in str(report.longrepr)


def test_a_skip_on_the_short_list_is_allowed_in_ci():
    for allowed in ALLOWED_SKIPS_IN_CI:
        report = skipped_report(f"Skipped: {allowed}")
        forbid_skip(report, in_ci=True)
        assert report.skipped


def test_a_skip_elsewhere_stays_a_skip():
    report = skipped_report("Skipped: no Chromium here")
    forbid_skip(report, in_ci=False)
    assert report.skipped


@pytest.mark.parametrize("attempt", [1, 2])
def test_what_one_test_leaves_in_the_environment_no_other_finds(attempt):
    assert "LEFT_BEHIND_BY_A_TEST" not in os.environ
    os.environ["LEFT_BEHIND_BY_A_TEST"] = str(attempt)
