"""Shared parts of the benchmarks: alternating timings, the machine's matmul rate, a table and a JSON file."""

import argparse
import json
import pathlib
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from hbf.errors import UserError, choose, in_one_line
from hbf.markdown import cell, table
from hbf.models.flops import PRODUCTS, count_flops
from hbf.training.machine import commit, device_name, versions
from hbf.training.workdir import replace_text

Thunk = Callable[[], Any]
THREADS = 8  # threads that compile


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
  """Help with the default values that there are, and with the lines of the description as they are."""

  def _get_help_string(self, action: argparse.Action) -> str | None:
    return action.help if action.default is None else super()._get_help_string(action)


def parser(description: str | None) -> argparse.ArgumentParser:
  """Return a parser with the flags that every benchmark has."""
  flags = argparse.ArgumentParser(description=description, formatter_class=_Help)
  flags.add_argument('--rounds', type=positive, default=10, help='number of timings of each program')
  flags.add_argument('--out', type=pathlib.Path, help='JSON file; default runs/benchmarks/NAME.json')
  return flags


def launch(main: Callable[[], None]) -> NoReturn:
  """Run a benchmark and end the process. A mistake of the user gives one line instead of a traceback."""

  def status() -> int:
    main()
    return 0

  sys.exit(in_one_line(status)())


def positive(text: str) -> int:
  """Parse the number of a flag, which must be 1 or more."""
  if (number := int(text)) < 1:
    raise argparse.ArgumentTypeError(f'{text} is below 1')
  return number


def numbers(text: str) -> list[int]:
  """Parse the numbers of a flag, such as 64,256. Each must be 1 or more."""
  return [positive(part) for part in text.split(',')]


def names(what: str, known: Iterable[str]) -> Callable[[str], list[str]]:
  """Return the type of a flag that takes some of the known names, such as a,b. `what` is the word for one of them."""
  return checked(lambda name: choose(what, name, dict.fromkeys(known)))


def checked(check: Callable[[str], Any]) -> Callable[[str], list[str]]:
  """Return the type of a flag that takes names, such as a,b. `check` raises UserError for a wrong name."""

  def parse(text: str) -> list[str]:
    found = text.split(',')
    try:
      for name in found:
        check(name)
    except UserError as error:
      raise argparse.ArgumentTypeError(str(error)) from None
    return found

  return parse


def alternate(thunks: Mapping[str, Thunk], rounds: int) -> dict[str, list[float]]:
  """Return the seconds of every thunk in every round.

  Every thunk runs once first, to compile. In each round, all thunks run once, one after another, so that other load
  on the machine affects all alike. A thunk returns the array to wait for.
  """
  seconds: dict[str, list[float]] = {name: [] for name in thunks}
  for thunk in thunks.values():
    jax.block_until_ready(thunk())
  for _ in range(rounds):
    for name, thunk in thunks.items():
      begin = time.perf_counter()
      jax.block_until_ready(thunk())
      seconds[name].append(time.perf_counter() - begin)
  return seconds


def compiled(function: Callable, *args: Any) -> tuple[Thunk, int]:
  """Return a thunk that calls the compiled function with these arrays, and its temporary memory in bytes."""
  executable = jax.jit(function).lower(*args).compile()
  memory: Any = executable.memory_analysis()
  return lambda: executable(*args), memory.temp_size_in_bytes


def attempt(about: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
  """Return the row that `measure` gives. If it fails, return a row with the first line of the error."""
  try:
    return {**about, **measure()}
  except Exception as error:  # compilers and devices raise errors of any type
    return {**about, 'error': failure(error)}


def failure(error: Exception) -> str:
  """Return the type and the first line of an error."""
  return f'{type(error).__name__}: {error}'.splitlines()[0]


def filled(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Return the rows, each with the columns of all rows. A value that a row lacks is ''."""
  columns = dict.fromkeys(column for row in rows for column in row)
  return [{column: row.get(column, '') for column in columns} for row in rows]


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
  """Return the ratio of two numbers for each round."""
  return [a / b for a, b in zip(numerator, denominator, strict=True)]


def spread(values: Sequence[float], digits: int = 2) -> str:
  """Return the median and, in parentheses, the quartiles as a text."""
  low, middle, high = statistics.quantiles(list(values) * 2, n=4, method='inclusive')
  return f'{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})'


def matmul(size: int, dtype: Any) -> tuple[Thunk, float]:
  """Return a thunk that multiplies two square matrices, and the number of its floating-point operations."""
  a, b = jax.random.normal(jax.random.key(0), (2, size, size), dtype)
  product = jax.jit(jnp.matmul)
  return lambda: product(a, b), 2.0 * size**3


def matmul_flops(function: Callable, *args: Any) -> float:
  """Count the floating-point operations of all matrix products in a call of a function with arrays or shapes."""
  return float(count_flops(function, *args, costs=PRODUCTS))


def report(name: str, title: str, rows: Sequence[Mapping[str, Any]], out: pathlib.Path | None) -> None:
  """Print the rows as a table, and write them as JSON with the facts about the machine."""
  measured = {'title': title, **measured_on(), 'rows': list(rows)}
  print(format_report(measured))
  save(name, measured, out)


def measured_on() -> dict[str, Any]:
  """Return the command, the device, the commit and the versions.

  The command has no --out, and paths are cut to their names, because both are places on this machine.
  """
  script, *flags = sys.argv
  pairs = zip(['', *flags], flags, strict=False)
  kept = [flag for before, flag in pairs if not flag.startswith('--out=') and '--out' not in (before, flag)]
  named = [re.sub(r'(^|=)/\S*/', r'\1', flag) for flag in kept]
  command = shlex.join(['python', '-m', f'benchmarks.{pathlib.Path(script).stem}', *named])
  return {'command': command, 'device': device_name(), 'commit': commit(), 'versions': versions()}


def save(name: str, measured: Mapping[str, Any], out: pathlib.Path | None) -> None:
  """Write the JSON file of a benchmark, or replace it in one step."""
  path = out or pathlib.Path('runs/benchmarks') / f'{name}.json'
  path.parent.mkdir(parents=True, exist_ok=True)
  replace_text(path, json.dumps(measured, indent=1, ensure_ascii=False) + '\n')


def format_report(measured: Mapping[str, Any], columns: Sequence[str] = ()) -> str:
  """Return the title and the table that `report` prints, with all columns or only these."""
  columns = columns or list(measured['rows'][0])
  rows = [[cell(row[column]) for column in columns] for row in measured['rows']]
  return f'{measured["title"]}; {measured["device"]}:\n\n{table(columns, rows)}'
