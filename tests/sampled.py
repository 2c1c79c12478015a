"""Parameters of tests with many cases, most of which are left to the slow tests."""

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], every: int = 3) -> list[Any]:
  """Return all cases, and mark all but each `every`-th one as slow. A tuple has the values of several parameters."""

  def slow(case):
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)

  return [slow(case) if number % every else case for number, case in enumerate(cases)]
