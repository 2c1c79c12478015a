"""Kinds of targets, and the CSV files that list labels or values.

The target of an image is what a network learns to predict for it. A data set has targets of one kind:

| kind of targets | the target of an image | task |
|---|---|---|
| classes | the number of its class | classification |
| labels | K labels, each 0 or 1, uint8 or float32 [K] | multi_label |
| values | K values, float32 [K] | regression |

In an image folder, each split has a file labels.csv or targets.csv, which lists labels or values. Its first column,
`file`, has the path of an image inside the split's folder. Every other column has the numbers of one label or one
value for all images. The first row names the columns.
"""

import collections
import csv
import os
from pathlib import Path

import numpy as np

from hbf.errors import UserError

CLASSES, LABELS, VALUES = 'classes', 'labels', 'values'
CSV = {LABELS: 'labels.csv', VALUES: 'targets.csv'}
TASK = {CLASSES: 'classification', LABELS: 'multi_label', VALUES: 'regression'}  # the task for each kind
FILE = 'file'
MOST_CLASSES = 1_000_000  # a larger label is a mistake, and the names of so many classes would fill the memory
LOST = 1e-3  # largest rounding error of a value in float32, divided by the standard deviation of its column


def check_labels(name: str, labels: np.ndarray) -> np.ndarray:
  """Return labels [n, K] as uint8. Messages call the array `name`.

  Raises:
    UserError: a label is neither 0 nor 1.
  """
  wrong = labels[(labels != 0) & (labels != 1)]
  if len(wrong):
    raise UserError(f'{name} has {wrong[0]:g}: expected 0 or 1 for every label. For task regression, give floats')
  return labels.astype(np.uint8)


def to_values(name: str, values: np.ndarray) -> np.ndarray:
  """Return values [n, K] as float32. Messages call the array `name`.

  Raises:
    UserError: a value is not finite, or loses too many digits in float32.
  """
  with np.errstate(over='ignore'):
    rounded = values.astype(np.float32)
  if not np.isfinite(rounded).all():
    row, column = np.argwhere(~np.isfinite(rounded))[0]
    raise UserError(
      f'{name} has {values[row, column]} in row {row}, column {column}: expected finite numbers below 3.4e38; leave '
      'out this image, or fill in the value'
    )
  wide = values.astype(np.float64)
  # A constant column has no digits to lose. Its deviation, unlike its range, may differ from 0 by rounding.
  lost = (np.abs(rounded - wide).max(axis=0, initial=0) > LOST * wide.std(axis=0)) & (np.ptp(wide, axis=0) > 0)
  if lost.any():
    raise UserError(
      f'{name} loses digits of column {int(np.argmax(lost))} in float32: subtract a constant, such as its mean'
    )
  return rounded


def read_csv(split: Path, kind: str) -> tuple[tuple[str, ...], tuple[str, ...], np.ndarray]:
  """Read the CSV file with the labels or values of a split's images.

  Args:
    split: the folder of the split.
    kind: the kind of targets, LABELS or VALUES.

  Returns:
    The names of the K labels or values; the path of each image within the folder, [n]; and the targets, [n, K].

  Raises:
    UserError: the file is missing, or not as described at the top of this module. The message names the line.
  """
  path = split / CSV[kind]
  try:
    with open(path, newline='', encoding='utf-8-sig') as file:
      lines = [(number, row) for number, row in enumerate(csv.reader(file), 1) if row]
  except FileNotFoundError:
    raise UserError(
      f'{path} does not exist; expected a CSV file with a column {FILE} and a column for each of the {kind}: write '
      'it, or choose another task'
    ) from None
  except (OSError, UnicodeDecodeError, csv.Error) as error:
    raise UserError(f'{path} can not be read ({error}): expected a CSV file in UTF-8') from None
  header = [name.strip() for name in lines[0][1]] if lines else []
  if header[:1] != [FILE] or len(set(header)) != len(header) or len(header) < 2 or not all(header):
    raise UserError(
      f'{path} begins with {",".join(header)!r}: expected {FILE!r} and then the names of the {kind}, all different'
    )
  if not lines[1:]:
    raise UserError(f'{path} lists no image; expected a line for each: add them')
  vectors = np.array([_numbers(f'line {number} of {path}', row, len(header)) for number, row in lines[1:]])
  files = tuple(_inside(path, row[0].strip()) for _, row in lines[1:])
  if len(set(files)) != len(files):
    twice = collections.Counter(files).most_common(1)[0][0]
    raise UserError(f'{path} lists {twice} twice; expected each image once: remove a line')
  wrong = ~np.isin(vectors, (0, 1)) if kind == LABELS else ~np.isfinite(vectors)
  if wrong.any():
    row, column = np.argwhere(wrong)[0]
    number, cells = lines[1 + row]
    expected = '0 or 1 for every label' if kind == LABELS else 'finite numbers'
    raise UserError(f'line {number} of {path} has {cells[1 + column]}: expected {expected}; mend the line')
  return tuple(header[1:]), files, vectors.astype(np.uint8) if kind == LABELS else to_values(str(path), vectors)


def _inside(path: Path, listed: str) -> str:
  """Return the shortest form of a path that the CSV file `path` lists, so that an image has one path only.

  Raises:
    UserError: the path is absolute, or leads out of the folder of the CSV file.
  """
  file = os.path.normpath(listed)
  if os.path.isabs(file) or file.split(os.sep)[0] == os.pardir:
    raise UserError(
      f'{path} lists {listed}, which is outside of {path.parent}; expected the path of an image inside it: '
      'mend the line'
    )
  return file


def _numbers(where: str, row: list[str], columns: int) -> list[float]:
  """Return the numbers after the first column of a row. `columns` is the required number of columns."""
  if len(row) != columns:
    raise UserError(f'{where} has {len(row)} columns; expected {columns}, as in the first line: mend the line')
  try:
    return [float(cell) for cell in row[1:]]
  except ValueError:
    wrong = next(cell for cell in row[1:] if not _is_number(cell))
    raise UserError(f'{where} has {wrong!r}; expected a number in every column after {FILE}: mend the line') from None


def _is_number(cell: str) -> bool:
  try:
    float(cell)
  except ValueError:
    return False
  return True
