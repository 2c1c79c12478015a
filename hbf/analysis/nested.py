"""Accuracy by the number of centers, from one run: python -m hbf.analysis.nested --workdir runs/nested.

The first centers of every block are taken by themselves, as training with stage2.nested lets any number of them work.
"""

import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from absl import logging

matplotlib.use('Agg')
import matplotlib.pyplot as plt

from hbf import markdown
from hbf.arguments import Parser
from hbf.errors import UserError, in_one_line
from hbf.evaluation.scores import ACCURACY
from hbf.models.build import count_parameters, flops_per_example
from hbf.models.nested import first_centers
from hbf.training.evaluate import restore
from hbf.training.experiment import make_evaluator, make_splits
from hbf.training.machine import keep_freed_memory
from hbf.training.sharding import batch_sharding
from hbf.training.workdir import write_json


def curve(
  workdir: pathlib.Path, checkpoint: str, counts: Sequence[int], average: bool = False, **moved: str
) -> list[dict[str, Any]]:
  """Test figures of the networks of the first centers.

  Args:
    workdir: of a run whose stage 2 is hyperbf.
    checkpoint: 'latest', 'best' or a step.
    counts: of centers, in each stage 2; none: 1, 2, 4, … and all.
    average: takes the moving average of the parameters in their place.
    **moved: as in `hbf.training.evaluate.evaluate_workdir`.

  Returns:
    For each count: centers, params, flops_per_image, n, correct, accuracy, nll.

  Raises:
    UserError: the run has no such checkpoint, or not so many centers.
  """
  restored = restore(workdir, checkpoint, average=average, **moved)
  config, task = restored.config, restored.task
  cuts = [first_centers(config.model, restored.params, count) for count in counts or _powers(config.model)]
  test = task.open(make_splits(task, config.data.validation)['test'], batch_sharding(restored.mesh))
  rows = []
  for cut, params in cuts:
    model = task.network(cut)
    summary = make_evaluator(config, task, model, restored.mesh)(params, test).summary
    about = {
      'centers': cut.stage2.centers,
      'params': count_parameters(model, task.shape),
      'flops_per_image': flops_per_example(model, task.shape),
    }
    rows.append(about | {name: summary[name] for name in ('n', 'correct', 'accuracy', 'nll')})
  return rows


def _powers(model: Any) -> list[int]:
  """1, 2, 4, … and all centers; a model without centers is refused by what takes them."""
  centers = model.stage2.get('centers', 1)
  return sorted({2**i for i in range(centers.bit_length())} | {centers})


def _centers(row: Mapping[str, Any]) -> int:
  """Return the number of centers; rows of stored results may spell the key in the British way."""
  return row['centers'] if 'centers' in row else row['centres']


def table(rows: Sequence[dict[str, Any]]) -> str:
  """Markdown."""
  cells = [
    (str(_centers(row)), f'{row["params"]:,}', f'{row["flops_per_image"] / 1e6:,.1f}', f'{row["accuracy"]:.2f}')
    for row in rows
  ]
  return markdown.table(('centers', 'parameters', 'MFLOP', ACCURACY.label), cells)


def draw(rows: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
  """Writes a PNG of accuracy by centers."""
  score, axis = plt.subplots(figsize=(6, 4), layout='constrained')
  axis.plot([_centers(row) for row in rows], [row['accuracy'] for row in rows], 'o-')
  axis.set_xscale('log', base=2)
  axis.set(xlabel='centers in each stage 2', ylabel=f'test {ACCURACY.label}')
  axis.grid(alpha=0.3)
  score.savefig(path, dpi=120, metadata={'Software': None})
  plt.close(score)


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = Parser('hbf.analysis.nested', __doc__.split('\n')[0])
  parser.add_run('of a run with stage 2 hyperbf')
  parser.add_argument('--average', action='store_true', help='take the moving average of the parameters')
  parser.add_argument('--counts', default='', help='of centers, such as 16,64,256; default: powers of two and all')
  flags = parser.parse_args(arguments)
  keep_freed_memory()
  logging.set_verbosity(logging.ERROR)  # Orbax warns of what is meant
  counts = [_count(text) for text in filter(None, flags.counts.split(','))]
  moved = {'dir': flags.data_dir, 'root': flags.data_root}
  rows = curve(flags.workdir, flags.checkpoint, counts, flags.average, **moved)
  about = {'checkpoint': flags.checkpoint, 'average': flags.average, 'split': 'test'}
  write_json(flags.workdir / 'nested.json', {**about, 'rows': rows})
  draw(rows, flags.workdir / 'nested.png')
  print(table(rows))
  return 0


def _count(text: str) -> int:
  if not text.isdecimal():
    raise UserError(f'--counts takes numbers such as 16,64,256, not {text!r}')
  return int(text)


if __name__ == '__main__':
  sys.exit(main())
