"""Section on the config and the results of a run."""

import pathlib
from typing import Any

from scipy import stats

from hbf.analysis.report.drawing import legend, panel
from hbf.analysis.report.page import Drawing, PageTable, Paragraph, Section
from hbf.analysis.trained_run import TrainedRun
from hbf.evaluation.scores import ACCURACY, ECE, LOSS, NLL, TOP5
from hbf.training.workdir import read_result
from hbf.training.writers import lines_with, read_metrics

SHOWN = {
  'model': 'model',
  'recipe': 'recipe',
  'dataset': 'data set',
  'seed': 'seed',
  'params': 'parameters',
  'flops_per_image': 'FLOP per image',
  'epochs': 'epochs',
  'device': 'device',
  'commit': 'commit',
}


def section(run: TrainedRun) -> Section:
  """Return the section: the config, the learning curves and the test scores. The accuracy has a 95% interval."""
  result = _result(run)
  about = [(label, _format(result[name])) for name, label in SHOWN.items() if name in result]
  if 'train_seconds' in result:
    about.append(
      ('training', f'{result["train_seconds"] / 60:,.1f} minutes, {result["images_per_second"]:,.0f} images/s')
    )
  numbers: dict[str, Any] = {'evaluated': 'average' if run.average else 'parameters', 'step': run.restored.step}
  numbers |= {key: result[key] for key in (*SHOWN, 'n', 'correct', ACCURACY.name, 'interval') if key in result}
  parts: list[Any] = [PageTable(('', ''), about, f'Checkpoint of step {run.restored.step}.')]
  if 'accuracy' in result:
    low, high = result['interval']
    shown = [(score.label, f'{result[score.name]:{score.form}}') for score in (ACCURACY, TOP5, NLL, ECE)]
    shown[0] = (shown[0][0], f'{shown[0][1]} (95% confidence interval: {low:.2f} to {high:.2f})')
    average = ', moving average of the parameters' if run.average else ''
    parts.append(PageTable(('score', f'{result["n"]:,} test images, end of training{average}'), shown))
  else:
    parts.append(Paragraph('The run has no result yet, because it is not finished.'))
  if (curves := _curves(run)) is not None:
    parts.append(curves)
  command = f'hbf eval --workdir={_shown(run.workdir)}{" --average" if run.average else ""}'
  return Section('run', 'The run', parts, numbers, command)


def _shown(workdir: pathlib.Path) -> str:
  """Return the path of a run folder relative to the current folder.

  If the run folder is not inside the current folder, return its name alone. A page shows no absolute path, because
  users give pages to others.
  """
  current, folder = pathlib.Path.cwd().resolve(), workdir.resolve()
  return str(folder.relative_to(current)) if folder.is_relative_to(current) else folder.name


def _result(run: TrainedRun) -> dict[str, Any]:
  result, config = read_result(run.workdir, 'n', 'correct'), run.restored.config
  if result is None:
    return {'model': config.model.name, 'recipe': config.recipe, 'dataset': config.data.name, 'seed': config.seed}
  if run.average:
    result |= result['average']
  interval = stats.binomtest(result['correct'], result['n']).proportion_ci(method='wilson')
  return result | {'interval': [100 * interval.low, 100 * interval.high]}


def _format(value: Any) -> str:
  return f'{value:,}' if isinstance(value, int | float) else str(value)


def _curves(run: TrainedRun) -> Drawing | None:
  lines = read_metrics(run.workdir)
  kinds = {split: lines_with(lines, split, ACCURACY.name) for split in ('train', 'validation')}
  if not kinds['train']:
    return None
  (losses, left), (accuracies, right) = panel(), panel()
  left.plot(*zip(*((line['epoch'], line[LOSS.name]) for line in kinds['train']), strict=True))
  left.set(xlabel='epoch', ylabel=f'training {LOSS.label}')
  for split, split_lines in kinds.items():
    if split_lines:
      right.plot(*zip(*((line['epoch'], line[ACCURACY.name]) for line in split_lines), strict=True), label=split)
  right.set(xlabel='epoch', ylabel=ACCURACY.label)
  legend(right)
  held_out = ' and on the validation images' if kinds['validation'] else ''
  return Drawing(
    [losses, accuracies],
    f'Left: training loss. Right: accuracy on training batches (augmented){held_out}.',
  )
