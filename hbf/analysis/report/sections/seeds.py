"""Section on several seeds of one network: means and spreads of the numbers of their pages."""

import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from hbf.analysis.report.page import PageTable, Paragraph, Section
from hbf.comparison.statistics import SEEDS as FEWEST
from hbf.comparison.statistics import student_half
from hbf.errors import UserError
from hbf.training.workdir import MEASURED, config_differences, load_config, read_json

FILE = 'explain.json'
FAULTS = {'dead': 'dead', 'constant': 'constant', 'low_share': 'low-share', 'doubled': 'doubled'}
COUNTED = ('interventions', 'relevance', 'centers')  # sections whose numbers depend on a number of images


class SeedRun(NamedTuple):
  """A run and the numbers of its page.

  Attributes:
    workdir: the run folder.
    numbers: the numbers of each section by its name, as in explain.json, but with NaN in place of null.
  """

  workdir: pathlib.Path
  numbers: Mapping[str, Any]

  @classmethod
  def of(cls, workdir: pathlib.Path, stored: Mapping[str, Any]) -> 'SeedRun':
    """Return a run with the numbers of its explain.json, which has null for a number that is not finite."""
    return cls(workdir, _with_nan(stored))

  @property
  def seed(self) -> int:
    """The seed of the run."""
    return int(load_config(self.workdir).seed)


def read_seed_runs(workdir: pathlib.Path, others: Sequence[str], average: bool) -> list[SeedRun]:
  """Read the numbers on the pages of other runs, which may differ from a run only in the seed.

  They may also differ in keys that do not change the learned parameters, such as data.workers.

  Args:
    workdir: the folder of the run.
    others: folders of the other runs.
    average: True if the page of the run is about the moving average of the parameters.

  Raises:
    UserError: a folder is not a run folder, its config differs in more than that, or two runs have the same seed.
      Or a folder has no page about its run alone, or the page is not about the parameters that `average` asks for.
  """
  found = []
  seeds = {load_config(workdir).seed: workdir}
  for folder in map(pathlib.Path, others):
    if differ := _differences(workdir, folder):
      raise UserError(
        f'{folder} differs from {workdir} in more than its seed ({differ}): give runs with the same config'
      )
    if (seed := load_config(folder).seed) in seeds:
      raise UserError(f'{folder} has seed {seed} like {seeds[seed]}: give runs with different seeds')
    seeds[seed] = folder
    numbers = read_json(folder / FILE, f'write it again by `hbf explain --workdir={folder}`', 'run')
    if numbers is None or 'first' in numbers['run']:
      raise UserError(f'{folder} has no page of this run alone: write it first by `hbf explain --workdir={folder}`')
    wanted = 'average' if average else 'parameters'
    if (evaluated := numbers['run'].get('evaluated')) != wanted:
      raise UserError(f'the page of {folder} is about the {evaluated}, and this one about the {wanted}: explain both')
    found.append(SeedRun.of(folder, numbers))
  return found


def _with_nan(value: Any) -> Any:
  """Return a value of explain.json with NaN in place of None."""
  if isinstance(value, dict):
    return {key: _with_nan(of) for key, of in value.items()}
  if isinstance(value, list):
    return [_with_nan(of) for of in value]
  return math.nan if value is None else value


def _differences(workdir: pathlib.Path, folder: pathlib.Path) -> str:
  """Describe the differences of two runs' configs in keys that change the learned parameters. '' if there are none.

  The seed is left out, and so are keys that may be measured, such as data.mean: data.input changes their last digits.
  """
  other, own = load_config(folder), load_config(workdir).to_dict()
  own['seed'] = other.seed
  own['data'] |= {key: () for key in MEASURED if key in own['data']}
  return config_differences(other, ConfigDict(own))


def section(runs: Sequence[SeedRun]) -> Section:
  """Return the section: the mean and the spread of each quantity over the runs.

  There are at least two runs. The first one is the run of the page.
  """
  unlike = _incomparable(runs)
  each = [quantities({name: z for name, z in run.numbers.items() if name not in unlike}) for run in runs]
  names = [name for name in each[0] if all(name in found for found in each)]
  values = {name: np.array([found[name] for found in each]) for name in names}
  numbers: dict[str, Any] = {'runs': [run.workdir.name for run in runs], 'seeds': [run.seed for run in runs]}
  numbers['values'] = {name: _summary(of_runs) for name, of_runs in values.items()}
  enough = len(runs) >= FEWEST
  interval = ['95% interval'] if enough else []
  header = ['', 'mean', 'standard deviation', *interval, *(f'seed {run.seed}' for run in runs)]
  rows = [[name, *_cells(of_runs, enough)] for name, of_runs in values.items()]
  about = 'The interval is Student’s, over the seeds.' if enough else f'Fewer than {FEWEST} runs give no interval.'
  caption = (
    f'Means and standard deviations over {len(runs)} runs of this network with different seeds, on the same data. '
    f'{about} Units of different runs do not correspond, so totals over the units are compared.'
  )
  parts: list[Any] = [PageTable(header, rows, caption)]
  if unlike:
    left = ', '.join(unlike)
    said = f'The pages of these runs used different numbers of images. So these sections are left out: {left}.'
    parts.append(Paragraph(said))
  steps = [run.numbers['run'].get('step') for run in runs]
  if len({*steps}) > 1:
    each_step = ', '.join(f'{run.seed} of step {step or "unknown"}' for run, step in zip(runs, steps, strict=True))
    parts.append(Paragraph(f'The pages are about checkpoints of different steps: seed {each_step}.'))
  command = 'hbf explain --workdir=RUN --seed_run=RUN_OF_ANOTHER_SEED'
  return Section('seeds', 'Several seeds', parts, numbers, command)


def _incomparable(runs: Sequence[SeedRun]) -> list[str]:
  """Return the names of the sections for which the pages used different numbers of images or windows."""

  def counts(run: SeedRun, name: str) -> list[Any]:
    return [run.numbers.get(name, {}).get(key) for key in ('images', 'windows')]

  return [name for name in COUNTED if any(counts(run, name) != counts(runs[0], name) for run in runs)]


def _summary(values: np.ndarray) -> dict[str, Any]:
  """Return statistics of the values of S seeds, [S].

  They are the 'mean', the standard 'deviation', 'each' (a list of the values) and 'half': half of the length of
  Student's 95% interval, or None for fewer than `FEWEST` values.
  """
  half = student_half(values) if len(values) >= FEWEST else None
  return {'mean': float(values.mean()), 'deviation': float(values.std(ddof=1)), 'half': half, 'each': values.tolist()}


def _cells(values: np.ndarray, enough: bool) -> list[str]:
  digits = 1 if np.abs(values).max() >= 10 else 3
  mean = f'{values.mean():.{digits}f}'
  interval = [f'± {student_half(values):.{digits}f}'] if enough else []
  return [mean, f'{values.std(ddof=1):.{digits}f}', *interval, *(f'{value:.{digits}f}' for value in values)]


def quantities(numbers: Mapping[str, Any]) -> dict[str, float]:
  """Return the numbers of a page that can be compared between seeds. The keys are the names that readers see.

  Args:
    numbers: the numbers of each section, as in explain.json. A section adds nothing if it is missing, or if the model
      lacks what it describes.
  """
  scores = {'accuracy': 'test accuracy, %', 'token_nll': 'test loss, nats a token'}
  found = {said: numbers['run'][name] for name, said in scores.items() if name in numbers['run']}
  found |= _of_silencing(numbers.get('interventions', {}))
  relevance = numbers.get('relevance', {})
  areas = {
    'area': 'area below the curve, most relevant patches first',
    'area_random': 'area below the curve, patches at random',
    'lost_over_vote': 'lost logit over vote of the strongest voter',
  }
  found |= {said: relevance[name] for name, said in areas.items() if name in relevance}
  blocks = [value for name, value in numbers.get('centers', {}).items() if name.startswith('block')]
  for fault, said in FAULTS.items():
    if blocks and all(fault in block for block in blocks):
      found[f'{said} centers, all blocks'] = sum(block[fault] for block in blocks)
  return {name: float(value) for name, value in found.items()}


def _of_silencing(numbers: Mapping[str, Any]) -> dict[str, float]:
  """Return the numbers of the section on interventions. The keys are the names that readers see.

  They are changes of the loss, and areas below curves. A curve shows the answer's probability against the share of
  silenced units.
  """
  found = {f'area below the curve, {name} first': area['mean'] for name, area in numbers.get('area', {}).items()}
  if (random := found.pop('area below the curve, random first', None)) is not None:
    found['area below the curve, units at random'] = random
  for name, less in numbers.get('area_below_random', {}).items():
    found[f'area for random order minus area for {name}'] = less['mean']
  if silenced := [_loss(effect) for effect in numbers.get('silenced', {}).values()]:
    found['change of the loss without one unit, greatest'] = max(silenced)
    found['change of the loss without one unit, mean of those tried'] = float(np.mean(silenced))
  draws: dict[str, list[float]] = {}
  for name, effect in numbers.get('controls', {}).items():
    draws.setdefault(re.sub(r', draw \d+$', '', name), []).append(_loss(effect))
  return found | {f'change of the loss, {name}': float(np.mean(losses)) for name, losses in draws.items()}


def _loss(effect: Mapping[str, Any]) -> float:
  """Return the mean change of the loss from `effect`, an entry of explain.json.

  For images, an entry has the changes of loss, accuracy and answers. For texts, it has the change of the loss alone.
  """
  return float(effect.get('loss', effect)['mean'])
