"""Results as tables for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from hbf.evaluation.scores import SCORES
from hbf.markdown import table

# Format and unit of a value by its key.
FORMATS = {score.name: (score.form, score.unit) for score in SCORES}
FORMATS |= dict.fromkeys(('average_precision', 'precision', 'recall'), ('.2f', '%'))
FORMATS |= {'train_operations': ('.3g', ''), 'train_seconds': ('.2f', 's'), 'compile_seconds': ('.2f', 's')}
MOST_CLASSES = 20  # if there are more, only the hardest classes are shown


def print_result(result: Mapping[str, Any], title: str, console: Console) -> None:
  """Print the numbers and texts of a result, one in each row, with units. Leave out lists and dicts."""
  scalars = {key: value for key, value in result.items() if isinstance(value, str | int | float)}
  _print(
    title, table(('name', 'value'), [(key, _format_value(key, value)) for key, value in scalars.items()]), console
  )


def print_classes(summary: Mapping[str, Any], classes: Sequence[str], console: Console) -> None:
  """Print for each class its accuracy, and the other class that is most often predicted for its examples.

  If there are more than MOST_CLASSES classes, print only the MOST_CLASSES with the lowest accuracy.

  Args:
    summary: the details of a split, from `hbf.evaluation.classification.detail`, with `confusion`.
    classes: the name of each class.
    console: the console to print to.
  """
  rows = []
  for i, (row, accuracy) in enumerate(zip(summary['confusion'], summary['per_class'], strict=True)):
    wrong = [0 if j == i else count for j, count in enumerate(row)]
    worst = max(range(len(row)), key=wrong.__getitem__)
    taken_for = f'{classes[worst]} ({wrong[worst]})' if wrong[worst] else ''
    rows.append((classes[i], str(sum(row)), '' if accuracy is None else f'{accuracy:.1f}%', taken_for))
  title = 'classes'
  if len(rows) > MOST_CLASSES:
    accuracies = [101.0 if accuracy is None else accuracy for accuracy in summary['per_class']]
    rows = [rows[i] for i in sorted(range(len(rows)), key=accuracies.__getitem__)[:MOST_CLASSES]]
    title = f'the {MOST_CLASSES} of {len(classes)} classes with the lowest accuracy; the JSON has all'
  _print(title, table(('class', 'n', 'accuracy', 'most often taken for'), rows), console)


def print_parts(scores: Mapping[str, Mapping[str, Any]], part: str, console: Console) -> None:
  """Print the scores of each label or target, one in each row.

  Args:
    scores: a dict of scores for each label or target, such as `per_label` of `hbf.evaluation.multi_label.detail`.
    part: the word 'label' or 'target', for the title and the first column.
    console: the console to print to.
  """
  columns = [*next(iter(scores.values()))]
  rows = [
    (name, *('' if row[key] is None else _format_value(key, row[key]) for key in columns))
    for name, row in scores.items()
  ]
  _print(f'{part}s', table((part, *columns), rows), console)


def _format_value(key: str, value: str | int | float) -> str:
  form, unit = FORMATS.get(key, ('.2f', ''))
  text = f'{value:,{form}}' if isinstance(value, float) else f'{value:,}' if isinstance(value, int) else value
  return f'{text} {unit}'.strip()


def _print(title: str, shown: str, console: Console) -> None:
  say(console, f'{title}:\n\n{shown}\n')


def say(console: Console, text: str) -> None:
  """Print a text unchanged. By default, Rich would break long lines, and take `[/` in a folder's name for markup."""
  console.print(text, highlight=False, markup=False, soft_wrap=True)
