"""Print the tables of README.md and docs/ from the logs in this folder: python -m results.table."""

import collections
import json
import pathlib
import statistics
from typing import Any

import numpy as np

from benchmarks.common import format_report
from benchmarks.hardware import rows as hardware
from benchmarks.scaling import SIZES
from benchmarks.scaling import rows as scaling
from hbf.analysis.nested import table as nested_centers
from hbf.analysis.report.attack_report import table as attacks
from hbf.analysis.report.corruption_report import table as corruptions
from hbf.analysis.report.dead_units_report import table as dead_units
from hbf.analysis.report.edit_report import table as edits
from hbf.analysis.report.few_shot_report import tables as few_shot
from hbf.analysis.report.memory_report import table as memories
from hbf.analysis.report.optimization_report import tables as optimization
from hbf.analysis.report.outlier_report import table as outliers
from hbf.analysis.report.starts_report import table as starts
from hbf.analysis.report.text_edit_report import table as text_edits
from hbf.analysis.token_order import table as mixing
from hbf.comparison import tune
from hbf.comparison.grid import Grid
from hbf.comparison.held_out import held_out_table
from hbf.comparison.statistics import difference_of_pairs
from hbf.comparison.stored import open_runs
from hbf.comparison.table import markdown, read_rows
from hbf.evaluation.scores import ACCURACY, NLL
from hbf.markdown import cell, table
from hbf.training.workdir import flatten

ROOT = pathlib.Path(__file__).parent
COMPARISONS = (
  'small',
  'claim-three-seeds',
  'claim-controls',
  'claim-tuned',
  'claim-h100',
  'claim-positional',
  'claim-five',
  'claim-seeds',
  'claim-gelu',
  'claim-normalized',
  'claim-gated',
  'claim-patch2',
  'resolutions',
  'resolutions-seeds',
  'resolutions-controls',
  'resolutions-free',
  'resolutions-short',
  'resolutions-short-seed',
  'resolutions-short-vit',
  'resolutions-cifar100',
  'resolutions-cifar100-vit',
  'resolutions-tiny',
  'resolutions-tiny-vit',
  'resolutions-tiny-vit-seeds',
  'resolutions-window',
  'claim-blocks',
  'claim-all',
  'claim-linear',
  'claim-cifar100',
  'laptop',
  'rivals',
  'rivals-best',
  'rivals-muon',
  'rivals-blocks',
  'rivals-gmlp',
  'text',
  'text-muon',
  'text-muon-nanogpt',
  'text-long',
  'text-masked',
)
# Tables of pairs of runs: two models and, for each comparison, the folders of their runs. Both runs of a pair have
# the same seed, data, recipe and operations.
PAIRED = {
  ('hyperbf', 'vit-swiglu'): tuple(
    (name, name)
    for name in ('claim-three-seeds', 'claim-h100', 'claim-blocks', 'claim-all', 'claim-linear', 'claim-cifar100')
  ),
  ('positional', 'vit-swiglu'): (('claim-positional', 'claim-h100'), ('claim-five', 'claim-five')),
  ('positional', 'hyperbf'): (('claim-positional', 'claim-h100'),),
  ('positional-2-2', 'vit-swiglu'): (
    ('resolutions-seeds', 'claim-h100'),
    ('resolutions-seeds', 'claim-seeds'),
    ('resolutions-cifar100', 'claim-cifar100'),
  ),
  ('positional-2-2', 'vit-gelu'): (('resolutions-seeds', 'claim-gelu'),),
  ('positional-2-2', 'vit-normalized'): (('resolutions-seeds', 'claim-normalized'),),
  ('positional-2-2', 'gated-softmax'): (('resolutions-seeds', 'claim-gated'),),
  ('vit-gelu', 'vit-normalized'): (('claim-gelu', 'claim-normalized'),),
  ('vit-gelu', 'gated-softmax'): (('claim-gelu', 'claim-gated'),),
  ('positional-4-2', 'vit-4-2'): (
    ('resolutions-tiny', 'resolutions-tiny-vit'),
    ('resolutions-tiny', 'resolutions-tiny-vit-seeds'),
  ),
  ('positional-2-2', 'vit-2-2'): (
    ('resolutions-seeds', 'resolutions-window'),
    ('resolutions-cifar100', 'resolutions-cifar100-vit'),
  ),
  ('vit-2-2', 'vit-swiglu'): (
    ('resolutions-window', 'claim-h100'),
    ('resolutions-cifar100-vit', 'claim-cifar100'),
  ),
  ('hyperbf', 'gmlp'): (('rivals-blocks', 'rivals-gmlp'),),
  ('positional-2-2', 'hyperbf'): (('resolutions-cifar100', 'claim-cifar100'),),
  ('positional-2-2', 'positional'): (('resolutions-seeds', 'claim-positional'),),
  ('convolution-gaussian-2-2', 'positional-2-2'): (
    ('resolutions-controls', 'resolutions-controls'),
    ('resolutions-free', 'resolutions-seeds'),
  ),
}
RATES = ('rates', 'rivals-rates', 'laptop-rates', 'laptop-rates-6', 'text-rates', 'text-trials')
SEARCHES = ('search', 'search-patch8', 'search-width256')
TUNED = ('claim-tune', 'text-muon-tune', 'rivals-muon-tune', 'rivals-blocks-tune', 'rivals-gmlp-tune')
# True if the table has a row for each block.
EXPLAINED = {'cifar10-laptop-1': True, 'cifar10-laptop-2': False, 'cifar10-small-0': False}
WINDOWS = ((100, 175), (200, 300), (300, 352))  # windows of steps in the runs of a search
TRIAL_WINDOWS = ((200, 300), (300, 400), (500, 600), (950, 1050))  # windows of steps in the trials of stage 2
HELD_OUT = (NLL, ACCURACY)
# The studies of hbf.analysis, by the name of their folder and of the file in it.
STUDIES = {
  'dead-units': dead_units,
  'memory': memories,
  'edit': edits,
  'text-edit': text_edits,
  'few-shot': few_shot,
  'starts': starts,
  'optimization': optimization,
  'corruptions': corruptions,
}
_STEP = ('model', 'width', 'batch', 'parameters', 'images/s', 'time / vit-gelu', 'of matmul rate', 'temporary MB')
_PEERS = ('width', 'batch', 'model', 'images/s', 'time / HyperBF')
_PARTS = ('part', 'forward, ms', 'backward, ms', 'share, %', 'estimate, ms', 'time / estimate')
_PARTS_AND_PRODUCTS = (*_PARTS[:4], 'products, ms', *_PARTS[4:])
BENCHMARKS = {
  'step': _STEP,
  'step-laptop': _STEP,
  'step-one-core': _STEP,
  'step-256': _STEP,
  'peers': _PEERS,
  'parts': _PARTS,
  'parts-vit': _PARTS,
  'parts-192': _PARTS_AND_PRODUCTS,
  'parts-768': _PARTS_AND_PRODUCTS,
  'compile': (),
  'linear-convergence': (),
  'linear-time': (),
  'bound': (),
  'coverage': (),
  'augmentation': (),
  'input': (),
  'chaos': (),
  'nanogpt-loss': (),
  'nanogpt': (),
  'h100-step': (),
  'h100-models': ('model', 'parameters', 'step, ms', 'images/s', 'time / vit', 'of matmul rate', 'temporary MB'),
  'h100-correctness': (),
  'serve': (),
}


def comparison(name: str) -> str:
  """Return the table of a comparison."""
  folder = ROOT / name
  return markdown(read_rows(Grid.load(folder), folder)).strip()


def pairs(models: tuple[str, str], folders: tuple[tuple[str, str], ...]) -> str:
  """Return the accuracies of each pair of runs, and the mean difference on each data set.

  The interval of a mean is that of `hbf.comparison.statistics.difference_of_pairs`.

  Args:
    models: the labels of the two models.
    folders: for each comparison, the folder of the first model's runs and that of the other's. Runs whose seed only
      one of them has are left out.
  """
  header, lines = ('data', 'comparison', 'seed', *models, 'difference', '95% interval'), []
  outcomes = collections.defaultdict(list)  # of each pair of a data set, for the two models and n images, [2, n]
  for names in folders:
    ours, theirs = (_outcomes(name, model) for name, model in zip(names, models, strict=True))
    for group, seed in (key for key in ours if key in theirs):
      pair = np.array([ours[group, seed], theirs[group, seed]])
      first, other = pair.mean(axis=1)
      outcomes[group].append(pair)
      name = ', '.join(dict.fromkeys(names))
      lines.append((group, name, str(seed), f'{first:.2f}', f'{other:.2f}', f'{first - other:+.2f}', ''))
  for group, found in outcomes.items():
    first, other = np.mean(found, axis=(0, 2))
    ahead = difference_of_pairs(np.array(found)[:, 0] - np.array(found)[:, 1])
    bounds = '' if ahead.low is None else f'{ahead.low:+.2f} … {ahead.high:+.2f}'  # one pair has no interval
    means = (f'{first:.2f}', f'{other:.2f}', f'{ahead.estimate:+.2f}', bounds)
    lines.append((f'**{group}, mean**', f'all {len(found)}', '', *means))
  return table(header, lines)


def _outcomes(name: str, label: str) -> dict[tuple[str, int], np.ndarray]:
  """Return the scores of the test examples for the runs of an arm, by data set and seed, each [n]."""
  grid, runs = Grid.load(ROOT / name), open_runs(ROOT / name)
  (arm,) = (arm for arm in grid.arms if arm.label == label)
  return {(arm.group, seed): arm.kind.example_scores(runs.predictions(arm.run_name(seed))) for seed in grid.seeds}


def rates(name: str) -> str:
  """Return the held-out scores of a search for learning rates."""
  folder = ROOT / name
  return held_out_table(Grid.load(folder), folder)


def search(name: str) -> str:
  """Return a table with a row for each change of a model and each seed: training losses and held-out scores.

  A training loss is the mean over a window of steps. All runs of a seed see the same batches, so these means are
  comparable.
  """
  runs = open_runs(ROOT / name)
  kept = {run: runs.config(run) for run in runs.names()}
  configs = {run: flatten(config.to_dict()) for run, config in kept.items() if config}
  # A change is listed relative to the first config of the search, or to ViT's.
  bases = {'hyperbf': configs['base-0'], 'vit': configs['vit-0']}
  labels = [f'held-out {score.label}' for score in HELD_OUT]
  header = ('model', 'change', 'seed', *(f'steps {a + 1}–{b}' for a, b in WINDOWS), *labels)
  rows = []
  for run, config in configs.items():
    lines = runs.metrics(run)
    losses = _losses(lines)
    means = [_mean([loss for step, loss in losses.items() if a < step <= b]) for a, b in WINDOWS]
    last = [line for line in lines if line['split'] == 'validation'][-1:] if means[-1] else []
    scores = [''.join(f'{line[score.name]:{score.form}}' for line in last) for score in HELD_OUT]
    base = bases.get(config['model.name'], bases['hyperbf'])
    rows.append((*_change(config, base), str(config['seed']), *means, *scores))
  rows.sort(key=lambda row: (row[2], row[3]))  # a stable sort: equal rows keep the order of their names
  full = [i for i in range(len(header)) if any(row[i] for row in rows)]
  header, *rows = [tuple(row[i] for i in full) for row in [header, *rows]]
  return table(header, rows)


def trials(name: str) -> str:
  """Return the training losses of trials that were stopped early, for the windows of steps that each completed."""
  rows = []
  for trial in json.loads((ROOT / name / 'trials.json').read_text()):
    losses = _losses(open_runs(ROOT / trial['comparison']).metrics(trial['run']))
    windows = [[losses[step] for step in losses if a < step <= b and b in losses] for a, b in TRIAL_WINDOWS]
    rows.append((trial['stage 2'], *map(_mean, windows)))
  return table(('stage 2', *(f'steps {a + 1}–{b}' for a, b in TRIAL_WINDOWS)), rows)


def tuned(name: str) -> str:
  """Return the held-out scores of a search by `hbf compare --tune`: a row for each draw, and a column for each arm.

  A draw gives all arms the same values of the options that all have. The options that only some arms have are columns
  of these arms. A trial without a result, because it diverged, was pruned or has not run, is a dash.
  """
  draws: dict[int, dict[str, tune.Trial]] = {}
  for trial in tune.load_trials(ROOT / name / tune.TUNING):
    if trial.held_out is not None:
      draws.setdefault(trial.number, {})[trial.label] = trial
  arms = {label: trial for trials in draws.values() for label, trial in trials.items()}
  shared = [key for key in next(iter(arms.values())).options if all(key in trial.options for trial in arms.values())]
  own = {label: [key for key in trial.options if key not in shared] for label, trial in arms.items()}

  def short(key: str) -> str:
    return key.rpartition('.')[2].replace('_', ' ')

  def cells(label: str, trial: tune.Trial | None) -> list[str]:
    if trial is None:
      return ['–'] * (len(own[label]) + 1)
    return [*(trial.options[key] for key in own[label]), f'{trial.held_out:{trial.ranks.form}}']

  header = ['trial', *map(short, shared)]
  for label, keys in own.items():
    header += [*(f'{label}: {short(key)}' for key in keys), label]
  rows = []
  for number, trials in sorted(draws.items()):
    first, *_ = trials.values()
    scores = (text for label in arms for text in cells(label, trials.get(label)))
    rows.append([str(number), *(first.options[key] for key in shared), *scores])
  return table(header, rows)


def _losses(lines: list[dict[str, Any]]) -> dict[int, float]:
  """Return the training loss by step."""
  return {line['step']: line['loss'] for line in lines if line['split'] == 'train'}


def _mean(values: list[float]) -> str:
  return f'{statistics.fmean(values):.3f}' if values else ''


def benchmark(name: str, columns: tuple[str, ...]) -> str:
  """Return the title and the table of a benchmark, or of each of its parts. `columns` is () for all columns."""
  measured = json.loads((ROOT / 'benchmarks' / f'{name}.json').read_text())
  parts = [{**measured, **part} for part in measured.get('parts', [measured]) if 'rows' in part]
  return '\n\n'.join(format_report(part, columns) for part in parts)


def growth() -> str:
  """Return the milliseconds of every part at every size, from benchmarks.growth."""
  measured = json.loads((ROOT / 'benchmarks' / 'growth.json').read_text())
  sizes = sorted({row['size'] for row in measured['rows']})
  milliseconds = {(row['part'], row['size']): cell(row['ms']) for row in measured['rows']}
  parts = dict.fromkeys(row['part'] for row in measured['rows'])
  rows = [(part, *(milliseconds[part, size] for size in sizes)) for part in parts]
  columns = ('ms', *(f'{size:,} {measured["rows"][0]["of"]}' for size in sizes))
  return f'{measured["title"]}; {measured["device"]}:\n\n{table(columns, rows)}'


def explained(name: str, every: bool) -> str:
  """Return the scores of one run, or of two, on other data sets' images and on corrupted images.

  Args:
    name: name of the file that `hbf explain` wrote.
    every: True for a row for each block.
  """
  found = json.loads((ROOT / 'explain' / f'{name}.json').read_text())

  def sections(section: str) -> list[Any]:
    return [found[section][one] for one in ('first', 'other')] if 'pair' in found else [found[section]]

  runs = sections('run')
  names = [f'{run["model"]}, seed {run["seed"]}' for run in runs]
  title = ' and '.join(f'{name} ({run["accuracy"]:.2f}%)' for name, run in zip(names, runs, strict=True))
  parts = [f'{runs[0]["dataset"]}, recipe {runs[0]["recipe"]}: {title}; {found["device"]}:']
  parts.append(_outside(names, sections('outliers'), every))
  parts.append(_corrupted(names, sections('corrupted')))
  if matched := found.get('pair', {}).get('matched'):
    counterparts = [(block, f'{z["correlation"]:.2f}', f'{z["by_chance"]:.2f}') for block, z in matched.items()]
    parts.append(table(('block', "centers' correlation with their counterparts", 'by chance'), counterparts))
  return '\n\n'.join(parts)


def explained_seeds(name: str) -> str:
  """Return the numbers of several seeds. `name` is that of the file that `hbf explain --seed_run=…` wrote."""
  found = json.loads((ROOT / 'explain' / f'{name}.json').read_text())
  run, seeds = found['run'], found['seeds']
  title = f'{run["dataset"]}, recipe {run["recipe"]}: {run["model"]}, seeds {", ".join(map(str, seeds["seeds"]))}'
  lines = [
    (label, f'{z["mean"]:.3g}', f'± {z["half"]:.2g}', ', '.join(f'{one:.3g}' for one in z['each']))
    for label, z in seeds['values'].items()
  ]
  return f'{title}; {found["device"]}:\n\n' + table(('number', 'mean', '95% interval', 'each seed'), lines)


def _outside(names: list[str], outside: list[dict[str, Any]], every: bool) -> str:
  """Return the table of how well runs separate other data sets' images."""
  rows = [
    (other, score, *(cell for run in outside for cell in _separation(run[other].get(score))))
    for other in outside[0]
    for score in outside[0][other]
    if score != 'images' and (every or 'block' not in score)
  ]
  columns = [f'{name}: {score}' for name in names for score in ('AUROC, %', 'FPR95, %')]
  return table(('images', 'score', *columns), rows)


def _corrupted(names: list[str], corrupted: list[dict[str, Any]]) -> str:
  """Return the table of the errors of runs for each group of corruptions."""
  groups = [
    (group, *(f'{100 - run["accuracy_of_groups"][group]:.1f}' for run in corrupted))
    for group in corrupted[0]['accuracy_of_groups']
  ]
  none = ('none', *(f'{100 - run["accuracy_clean"]:.1f}' for run in corrupted))
  means = (
    'all',
    *('{:.1f} ({:.1f}–{:.1f})'.format(run['mean_corruption_error'], *run['interval']) for run in corrupted),
  )
  return table(('corruption', *(f'{run}: error, %' for run in names)), [none, *groups, means])


def _separation(found: dict[str, Any] | None) -> tuple[str, str]:
  """Return AUROC and FPR95 with their intervals, or two empty cells."""
  if not found:
    return '', ''
  auroc, fpr95 = ('{value:.1f} ({low:.1f}–{high:.1f})'.format(**found[name]) for name in ('auroc', 'fpr95'))
  return auroc, fpr95


def _change(config: dict[str, Any], base: dict[str, Any]) -> tuple[str, str]:
  """Return the model, and the options that differ from the base."""
  free = {'seed', 'model.name', 'data.dir', 'data.mean', 'data.std'}
  keys = [key for key in base if key in config and key not in free and config[key] != base[key]]
  return config['model.name'], ', '.join(f'{key.removeprefix("model.")}={config[key]}' for key in keys)


def main() -> None:
  """Print all tables."""
  parts = [*map(comparison, COMPARISONS), *(pairs(*item) for item in PAIRED.items())]
  parts += [*map(rates, RATES), *map(search, SEARCHES), *map(tuned, TUNED), trials('search-stage2')]
  parts += [report(json.loads((ROOT / name / f'{name}.json').read_text())) for name, report in STUDIES.items()]
  for name, report in (('outliers', outliers), ('attacks', attacks)):
    shown, _ = report(json.loads((ROOT / 'outliers' / f'{name}.json').read_text())).split('\n\n')
    parts.append(shown)  # without the notes
  nested = json.loads((ROOT / 'rivals' / 'cifar10-hyperbf-nested-0-nested.json').read_text())
  parts.append(nested_centers(nested['rows']))
  parts.append(mixing(json.loads((ROOT / 'text' / 'shakespeare-hyperbf-0-mixing.json').read_text())))
  parts += [explained(name, every) for name, every in EXPLAINED.items()]
  parts.append(explained_seeds('cifar10-small-seeds'))
  parts += [
    *(benchmark(name, columns) for name, columns in BENCHMARKS.items()),
    growth(),
    hardware(ROOT / 'hardware'),
    *(scaling(ROOT / 'scaling', size) for size in SIZES),
  ]
  print('\n\n'.join(parts))


if __name__ == '__main__':
  main()
