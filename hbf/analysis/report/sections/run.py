"""What was run, and how it went."""

from typing import Any

from scipy import stats

from hbf.analysis.report.drawing import legend, panel
from hbf.analysis.report.page import Drawing, Section, Table, Text
from hbf.analysis.trained_run import TrainedRun
from hbf.evaluation.scores import ACCURACY, ECE, LOSS, NLL, TOP5
from hbf.training.workdir import read_result
from hbf.training.writers import read_metrics

SHOWN = ('model', 'recipe', 'dataset', 'seed', 'params', 'flops_per_image', 'epochs', 'device', 'commit')


def section(subject: TrainedRun) -> Section:
  """The config, the curves, and the result of the test images with its interval."""
  result = _result(subject)
  about = [(name, _written(result[name])) for name in SHOWN if name in result]
  if 'train_seconds' in result:
    about.append(
      ('training', f'{result["train_seconds"] / 60:,.1f} minutes, {result["images_per_second"]:,.0f} images/s')
    )
  numbers = {'evaluated': 'average' if subject.average else 'parameters'}
  numbers |= {key: result[key] for key in (*SHOWN, 'n', 'correct', ACCURACY.name, 'interval') if key in result}
  parts: list[Any] = [Table(('', ''), about, f'Checkpoint of step {subject.restored.step}.')]
  if 'accuracy' in result:
    low, high = result['interval']
    shown = [(score.label, f'{result[score.name]:{score.form}}') for score in (ACCURACY, TOP5, NLL, ECE)]
    shown[0] = (shown[0][0], f'{shown[0][1]} (95% confidence interval: {low:.2f} to {high:.2f})')
    whose = 'average of the parameters at' if subject.average else 'at'
    parts.append(Table(('figure', f'of {result["n"]:,} test images, {whose} the end'), shown))
  else:
    parts.append(Text('The run has no result yet: it is not finished.'))
  if (curves := _curves(subject)) is not None:
    parts.append(curves)
  command = f'python -m hbf eval --workdir={subject.workdir}{" --average" if subject.average else ""}'
  return Section('run', 'The run', parts, numbers, command)


def _result(subject: TrainedRun) -> dict[str, Any]:
  result, config = read_result(subject.workdir, 'n', 'correct'), subject.restored.config
  if result is None:
    return {'model': config.model.name, 'recipe': config.recipe, 'dataset': config.data.name, 'seed': config.seed}
  if subject.average:
    result |= result['average']
  interval = stats.binomtest(result['correct'], result['n']).proportion_ci(method='wilson')
  return result | {'interval': [100 * interval.low, 100 * interval.high]}


def _written(value: Any) -> str:
  return f'{value:,}' if isinstance(value, int | float) else str(value)


def _curves(subject: TrainedRun) -> Drawing | None:
  lines = read_metrics(subject.workdir)
  kinds = {split: [line for line in lines if line['split'] == split] for split in ('train', 'validation')}
  if not kinds['train']:
    return None
  (losses, left), (accuracies, right) = panel(), panel()
  left.plot(*zip(*((line['epoch'], line[LOSS.name]) for line in kinds['train']), strict=True))
  left.set(xlabel='epoch', ylabel=f'training {LOSS.label}')
  for split, of_split in kinds.items():
    if of_split:
      right.plot(*zip(*((line['epoch'], line[ACCURACY.name]) for line in of_split), strict=True), label=split)
  right.set(xlabel='epoch', ylabel=ACCURACY.label)
  legend(right)
  return Drawing(
    [losses, accuracies],
    'Training loss, and accuracy of training batches (augmented) and of what is held out of train.',
  )
