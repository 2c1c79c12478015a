"""Tables and picture of the numbers that `hbf.analysis.optimization_study` measures."""

import pathlib
from collections.abc import Mapping
from typing import Any


def tables(measured: Mapping[str, Any]) -> str:
  """Return Markdown."""
  return ''


def draw(measured: Mapping[str, Any], path: pathlib.Path) -> None:
  """Write a PNG."""
