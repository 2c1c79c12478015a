"""Accuracy for growing numbers of centers, from one run: python -m hbf.analysis.nested --workdir runs/nested.

A smaller network is the network of the run, but every block has only the first centers of its stage 2. The run
should be trained with model.stage2.nested.
"""

import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from hbf import markdown
from hbf.arguments import Parser
from hbf.comparison.figures import plt, write_png
from hbf.errors import UserError, in_one_line
from hbf.evaluation.scores import ACCURACY
from hbf.models.build import count_parameters, flops_per_example
from hbf.models.nested import first_centers
from hbf.training.experiment import make_evaluator, make_splits
from hbf.training.machine import keep_freed_memory
from hbf.training.restore import check_classifies, restore
from hbf.training.sharding import batch_sharding
from hbf.training.workdir import write_json


def curve(
  workdir: pathlib.Path, checkpoint: str, counts: Sequence[int], average: bool = False, **moved: str
) -> list[dict[str, Any]]:
  """Measure a trained network on the test images for some numbers of centers.

  Stage 2 of every block keeps only its first centers.

  Args:
    workdir: folder of a run of task classification whose stage 2 is hyperbf.
    checkpoint: 'latest', 'best' or a step.
    counts: numbers of centers to keep in stage 2 of each block. If empty: 1, 2, 4, … and all.
    average: True to take the moving average of the parameters, False to take the parameters themselves.
    **moved: new values of the config keys `data.dir` and `data.root`, as arguments `dir` and `root`, if the data have
      moved since training.

  Returns:
    A row for each count. It has the keys centers, params (number of parameters), flops_per_image, n (number of test
    images), correct (number of right answers), accuracy and nll.

  Raises:
    UserError: the run is of another task, has no such checkpoint or no centers, or a count exceeds the number of
      centers of a block.
  """
  check_classifies(workdir, 'the curve')
  restored = restore(workdir, checkpoint, average=average, **moved)
  config, task = restored.config, restored.task
  cuts = [first_centers(config.model, restored.params, count) for count in counts or _powers(config.model)]
  splits = make_splits(task, config.data.validation)
  test = task.open(splits['test'], batch_sharding(restored.mesh))
  rows = []
  for cut, params in cuts:
    model = task.make_model(cut)
    summary = make_evaluator(config, task, model, restored.mesh, splits)(params, test).summary
    about = {
      'centers': cut.stage2.centers,
      'params': count_parameters(model, task.shape),
      'flops_per_image': flops_per_example(model, task.shape),
    }
    rows.append(about | {name: summary[name] for name in ('n', 'correct', 'accuracy', 'nll')})
  return rows


def _powers(model: Any) -> list[int]:
  """Return the powers of two up to the number of centers of a block, and this number itself."""
  centers = model.stage2.get('centers', 1)  # 1 if there are no centers: then `first_centers` raises an error
  return sorted({2**i for i in range(centers.bit_length())} | {centers})


def _centers(row: Mapping[str, Any]) -> int:
  """Return the number of centers in a row of results. In old files, its key is 'centres'."""
  return row['centers'] if 'centers' in row else row['centres']


def table(rows: Sequence[dict[str, Any]]) -> str:
  """Return the rows of `curve` as a Markdown table."""
  cells = [
    (str(_centers(row)), f'{row["params"]:,}', f'{row["flops_per_image"] / 1e6:,.1f}', f'{row["accuracy"]:.2f}')
    for row in rows
  ]
  return markdown.table(('centers', 'parameters', 'MFLOP', ACCURACY.label), cells)


def draw(rows: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
  """Write a PNG of the accuracy against the number of centers, from the rows of `curve`."""
  figure, axis = plt.subplots(figsize=(6, 4), layout='constrained')
  axis.plot([_centers(row) for row in rows], [row['accuracy'] for row in rows], 'o-')
  axis.set_xscale('log', base=2)
  axis.set(xlabel='centers in each stage 2', ylabel=f'test {ACCURACY.label}')
  axis.grid(alpha=0.3)
  write_png(figure, path, dpi=120)


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
  """Run the command and return its exit status."""
  parser = Parser('hbf.analysis.nested', __doc__.split('\n')[0])
  parser.add_run('of a run with stage 2 hyperbf')
  parser.add_argument('--average', action='store_true', help='take the moving average of the parameters')
  parser.add_argument(
    '--counts', default='', help='numbers of centers, such as 16,64,256; default: powers of two and all'
  )
  flags = parser.parse_args(arguments)
  keep_freed_memory()
  logging.set_verbosity(logging.ERROR)  # hides warnings of Orbax about intended behavior
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
    raise UserError(f'--counts has {text!r}, which is no number: give numbers such as 16,64,256')
  return int(text)


if __name__ == '__main__':
  sys.exit(main())
