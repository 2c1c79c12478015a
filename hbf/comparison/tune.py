"""A fair search for the best options of each arm: equal numbers of trials, and a choice on held-out examples.

An arm is a model with its options (`hbf.comparison.grid`). A trial is a run of an arm with random values from a space
of options (`hbf.comparison.space`), or with values that Optuna proposes (`hbf.comparison.proposals`).

References: Dodge et al. 2019, "Show Your Work" (the expected best result against the number of trials); Tang et al.
2020, "Showing Your Work Doesn't Always Work" (its unbiased estimate).
"""

import dataclasses
import itertools
import math
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import Console

from hbf.comparison.curves import draw_expected
from hbf.comparison.devices import Device
from hbf.comparison.grid import Arm, Comparison, Grid, arms_with_own_epochs, label_of, make_grid, refuse_other_config
from hbf.comparison.proposals import RANDOM, RANDOM_SEARCH, STUDY, Draws, Method, Proposals, Studies, check_optuna
from hbf.comparison.runs import NOT_RUN, run_all
from hbf.comparison.space import Option, corners, parse_space
from hbf.comparison.stored import (
  StoredRuns,
  check_requested_data,
  check_runs,
  check_same_data,
  open_runs,
  refuse_packed,
)
from hbf.errors import UserError, choose
from hbf.evaluation.scores import Score
from hbf.files import is_draft
from hbf.markdown import table
from hbf.models.matching import units_of
from hbf.tasks.registry import TASKS
from hbf.training.workdir import (
  CURE,
  check_kinds,
  check_place,
  damaged,
  held,
  in_use,
  read_json,
  write_json,
)
from hbf.training.writers import lines_with, validation_scores

FIRST_SEED = 1000  # seed of trial 0; the seeds of a comparison start at 0
HELD_OUT = '--config.data.validation='
TUNING = pathlib.PurePath('tuning.json')
PRUNED = 'pruned after'  # in the reason why such a trial has no result
LEFT = {'.lock', STUDY, f'{STUDY}-journal'}  # left by a call that was killed at its start


@dataclasses.dataclass(frozen=True)
class Trial:
  """A run of an arm with options that a search has chosen.

  Attributes:
    label: label of the arm.
    number: index of the trial within its arm. If the distribution of a key is the same in several arms, their random
      trials with the same index have the same value of the key.
    seed: seed of the run. It follows from `number`, and is the same in all arms.
    options: values by config key.
    held_out: value of the first of the task's `scores` on held-out examples, at the end of training. None without a
      result.
    loss: last training loss in the log. None without a result, or if all steps were skipped (`optimizer.skip`).
    failed: reason why there is no result. '' if there is a result.
    arm: the requested arm, 'LABEL: MODEL key=value …'.
    like: the arm to which the number of parameters is matched, and the training operations if the request says so.
    group: name of the config.
    task: name of the config's task.
    run: name of the run's folder.
    arguments: arguments of `hbf train` without the seed and the workdir.
    sampler: the sampler of the search (`hbf.comparison.proposals.Method`).
    prune: True if the search stops bad trials.
  """

  label: str
  number: int
  seed: int
  options: dict[str, str]
  held_out: float | None
  loss: float | None
  failed: str
  arm: str
  like: str
  group: str
  task: str
  run: str
  arguments: tuple[str, ...]
  sampler: str = RANDOM
  prune: bool = False

  @property
  def ranks(self) -> Score:
    """The score that decides which trial is better: the first of the task's `scores`."""
    return TASKS[self.task].scores[0]

  @property
  def diverged(self) -> bool:
    """True if training diverged. Such a trial is not repeated, because it would diverge again."""
    return 'training diverged' in self.failed

  @property
  def pruned(self) -> bool:
    """True if the search stopped the trial because it was bad. Such a trial is not continued."""
    return PRUNED in self.failed

  @property
  def settled(self) -> bool:
    """True if the trial has a result, has diverged or was stopped for good, so that it is not run again."""
    return not self.failed or self.diverged or self.pruned

  def measured(self, runs: StoredRuns) -> 'Trial':
    """Return the trial with the scores from its logs, or with the reason why it has no result."""
    if failed := runs.failure(self.run):
      return dataclasses.replace(self, held_out=None, loss=None, failed=failed)
    lines = runs.metrics(self.run)
    evaluations = lines_with(lines, 'validation', self.ranks.name)
    if not evaluations:
      raise damaged(
        f'the log of {self.run}', 'no held-out score', 'remove this run folder, and give the command again'
      )
    held_out = evaluations[-1][self.ranks.name]
    if not math.isfinite(held_out):  # of outputs that overflow; a comparison with it would have no meaning
      return dataclasses.replace(self, held_out=None, loss=None, failed=f'training diverged: its score is {held_out}')
    losses = [line['loss'] for line in lines_with(lines, 'train', 'loss')]
    return dataclasses.replace(self, held_out=held_out, loss=losses[-1] if losses else None, failed='')


class _Trials(Grid):
  """The grid of a search. Its i-th arm is a trial, which is run with the i-th seed only."""

  def runs(self) -> list[tuple[Arm, int]]:
    return list(zip(self.arms, self.seeds, strict=True))


def tune(
  request: Comparison, count: int, workdir: pathlib.Path, devices: Sequence[Device], method: Method = RANDOM_SEARCH
) -> bool:
  """Run the missing trials of every arm, and report all trials of the folder.

  Without Optuna, the options of all trials are drawn before the first trial starts. Optuna proposes the
  next trial of each arm only after the earlier trials of all arms have ended.

  Args:
    request: the arms, the space and the config.
    count: number of trials for each arm.
    workdir: folder of the search.
    devices: devices for the runs, one run at a time for each entry.
    method: the method of the search.

  Returns:
    False if a requested trial failed for another reason than divergence. Otherwise True, also if a signal stopped the
    search.

  Raises:
    UserError: the request is wrong, the folder holds another search or trials on other data, or Optuna is missing.
  """
  check_place(workdir)
  check_optuna(method, workdir)
  refuse_packed(workdir)
  before = _read(workdir)
  if before and (before[0].sampler, before[0].prune) != method:
    raise UserError(
      f'{workdir} has a search with --sampler={before[0].sampler} and --{"" if before[0].prune else "no"}prune: give '
      'the same flags, or choose another --workdir'
    )
  space, draws = _check_request(request, count)
  # Everything is checked before a file is written.
  numbers = range(1 if method.needs_optuna else count)
  if method.needs_optuna:
    _check_corners(request, space, before)
  drawn = _make_trials(request, draws, numbers, before, method, workdir)
  check_requested_data(drawn[1], check_same_data(_grid_of(before), workdir))
  console = Console(stderr=True)
  for label in arms_with_own_epochs(request):
    console.print(f'{label} sets train.epochs itself: its training operations are not matched', soft_wrap=True)
  ours: set[str] = set()
  with held(workdir):
    proposals: Proposals = draws
    batches: Iterable[tuple[list[Trial], _Trials]] = [drawn]
    if method.needs_optuna:
      studies = Studies(workdir, method, space, count, drawn[0][0].ranks, FIRST_SEED)
      proposals = studies
      batches = (_make_trials(request, studies, [number], before, method, workdir) for number in range(count))
    for trials, grid in batches:
      ours |= {trial.run for trial in trials}
      finished = _run_batch(trials, grid, proposals, workdir, devices, console)
      if not finished:
        break
    _report(_read(workdir), workdir, write=True)
  return not finished or all(trial.settled for trial in _read(workdir) if trial.run in ours)


def _run_batch(
  trials: Sequence[Trial],
  grid: '_Trials',
  proposals: Proposals,
  workdir: pathlib.Path,
  devices: Sequence[Device],
  console: Console,
) -> bool:
  """Run those of the trials that are not settled (`Trial.settled`). Then report the settled ones to `proposals`.

  Return False if a signal ended the call. `grid` has a run for each of the trials.
  """
  by_run = {trial.run: trial for trial in (*_read(workdir), *trials)}
  measured = _write(sorted(by_run.values(), key=lambda trial: trial.number), workdir)
  settled = {trial.run for trial in measured if trial.settled}
  left = [(arm, seed) for arm, seed in grid.runs() if arm.run_name(seed) not in settled]
  todo = _Trials(tuple(arm for arm, _ in left), tuple(seed for _, seed in left))
  finished = not left or run_all(todo, workdir, devices, console, _watch(trials, proposals, workdir))
  ours = {trial.run for trial in trials}
  for trial in _write(_read(workdir), workdir):
    if trial.run in ours and trial.settled:
      if trial.prune:  # the median needs the whole curve
        proposals.report(trial.label, trial.number, [*validation_scores(workdir / trial.run, trial.ranks).values()])
      proposals.settle(trial.label, trial.number, trial.held_out)
  return finished


def _watch(trials: Sequence[Trial], proposals: Proposals, workdir: pathlib.Path) -> Callable[[str], str]:
  """Return the function `prune` for `run_all`: it takes the name of a run, and returns why to stop it, or ''."""
  by_run, seen = {trial.run: trial for trial in trials}, dict.fromkeys((trial.run for trial in trials), 0)

  def prune(run: str) -> str:
    trial, log = by_run[run], workdir / run / 'metrics.jsonl'
    size = log.stat().st_size if trial.prune and log.exists() else 0
    if size == seen[run]:
      return ''
    seen[run] = size
    values = [*validation_scores(workdir / run, trial.ranks).values()]
    proposals.report(trial.label, trial.number, values)
    if not values or not proposals.prunes(trial.label, trial.number):
      return ''
    return f'{PRUNED} {len(values)} evaluations: its best held-out score is worse than the median of finished trials'

  return prune


def report(workdir: pathlib.Path) -> None:
  """Write tuning.json and tuning.png again from the logs, and print the best trial of each arm.

  While another process searches in the folder, nothing is written: the search adds trials to tuning.json itself.
  """
  _report(_read(workdir), workdir, write=not in_use(workdir))


def _report(stored: Sequence[Trial], workdir: pathlib.Path, write: bool) -> None:
  trials = _write(stored, workdir) if write else _measured(stored, workdir)
  ranks = trials[0].ranks
  if write:
    name = 'expected best' if trials[0].sampler == RANDOM else 'best'
    draw_expected(_expected(trials), ranks, workdir / TUNING.with_suffix('.png'), name)
  rows = []
  for label, arm_trials in _by_label(trials).items():
    best = _best(arm_trials)
    scores = ('–',) * 3
    if best:
      loss = '–' if best.loss is None else f'{best.loss:.3f}'
      scores = (f'{best.held_out:{ranks.form}}', loss, _joined(best.options))
    counts = [sum(trial.settled for trial in arm_trials), sum(trial.diverged for trial in arm_trials)]
    counts += [sum(trial.pruned for trial in arm_trials)] * trials[0].prune
    rows.append((label, *map(str, counts), *scores))
  pruned = ('pruned',) * trials[0].prune
  header = ('model', 'trials', 'diverged', *pruned, f'held-out {ranks.label}', 'training loss', 'options')
  missing = [f'- {trial.run}: {trial.failed}' for trial in trials if not trial.settled]
  parts = [f'{trials[0].group}, the best trial of each arm:', table(header, rows)]
  parts += ['Without a result:', '\n'.join(missing)] if missing else []
  sys.stdout.write('\n\n'.join(parts) + '\n')


def with_best(request: Comparison, path: pathlib.Path) -> Comparison:
  """Return the request, in which each arm also has the options of its best trial.

  Args:
    request: a comparison of arms of the search. None of its seeds may be the seed of a trial.
    path: path of the tuning.json that the search wrote.

  Raises:
    UserError: an arm was not searched, arms have different numbers of trials, or a trial used a seed of the request.
  """
  if not path.is_file():
    raise UserError(f'{path} is not there: give the tuning.json that --tune wrote')
  arms = _by_label(load_trials(path))
  if used := {trial.seed for trials in arms.values() for trial in trials} & {*request.seeds}:
    raise UserError(f'a trial of {path} used seed {min(used)}: give --seeds that no trial used')
  texts = {}
  like = [request.like] if label_of(request.like) in arms else []  # an arm that was not searched keeps its options
  for text in dict.fromkeys((*request.arms, *like)):
    label = label_of(text)
    trials = choose(f'arm of {path}', label, arms)
    if trials[0].arm != text:
      raise UserError(f'arm {label} is {text!r} here and {trials[0].arm!r} in {path}: run --tune with the new arm')
    best = _best(trials)
    if best is None:
      raise UserError(f'arm {label} has no finished trial in {path}: run --tune again')
    texts[text] = _with_options(text, label, best.options)
  settled = {label: sum(trial.settled for trial in arms[label]) for label in map(label_of, texts)}
  if len({*settled.values()}) > 1:
    counts = ', '.join(f'{label} {count}' for label, count in settled.items())
    raise UserError(f'the arms of {path} have different numbers of trials ({counts}): run --tune again with all arms')
  return dataclasses.replace(
    request, arms=tuple(texts[text] for text in request.arms), like=texts.get(request.like, request.like)
  )


def expected_best(values: Sequence[float], score: Score) -> list[float]:
  """Return the expected best result of 1, 2, … n trials.

  Take the best of k values, for every way to choose k of the n values. The result for k trials is the mean of these
  best values.

  Args:
    values: results of n independent trials.
    score: the kind of score, which says if greater or smaller values are better.
  """
  ordered, n = sorted(values, reverse=score.better is min), len(values)
  return [
    sum(math.comb(rank, size - 1) * value for rank, value in enumerate(ordered)) / math.comb(n, size)
    for size in range(1, n + 1)
  ]


def _check_request(request: Comparison, count: int) -> tuple[tuple[Option, ...], Draws]:
  """Check the numbers of arms, trials and configs, and the space. Return the space and random draws from it."""
  if count < 1 or not request.arms:
    raise UserError('a search needs at least one arm and one trial: give --arm, and --tune=1 or more')
  space = parse_space(request.space)
  if not space:
    raise UserError('a search needs a space: give --space=KEY=LOW..HIGH or --space=KEY=A|B, or a preset that has one')
  if len(request.configs) != 1:
    raise UserError(f'a search takes one config, but {len(request.configs)} were given: give one --config')
  labels = [*map(label_of, request.arms)]
  if unknown := [option.label for option in space if option.label and option.label not in labels]:
    raise UserError(f'the space has an option of arm {unknown[0]}: the arms are {", ".join(labels)}')
  if request.operations and any(option.key == 'train.epochs' for option in space):
    raise UserError(
      f'the space has train.epochs, and every trial gets {request.operations} operations: leave it out, or add '
      '--operations=none'
    )
  return space, Draws(space, count)


def _check_corners(request: Comparison, space: Sequence[Option], before: Sequence[Trial]) -> None:
  """Check every choice and both ends of every range for each arm, because later proposals are not known yet.

  Raises:
    UserError: see `_make_grid`.
  """
  texts = [
    _with_options(text, f'{label_of(text)}-c{index}', options)
    for text in request.arms
    for index, options in enumerate(corners(space, label_of(text)))
  ]
  _make_grid(request, texts, before)


def _make_trials(
  request: Comparison,
  proposals: Proposals,
  numbers: Iterable[int],
  before: Sequence[Trial],
  method: Method,
  workdir: pathlib.Path,
) -> tuple[list[Trial], _Trials]:
  """Return the trials `numbers` of every arm, ordered by index, and the grid (arms and seeds) of their runs.

  Raises:
    UserError: the request is wrong, or a folder of a run in `workdir` belongs to another run. See also `_make_grid`.
  """
  labels = [*map(label_of, request.arms)]
  drawn = [
    (text, label, number, proposals.options(label, number))
    for number in numbers
    for text, label in zip(request.arms, labels, strict=True)
  ]
  texts = [_with_options(text, _label(label, number), arm_trials) for text, label, number, arm_trials in drawn]
  grid, like = _make_grid(request, texts, before)
  seeds = tuple(FIRST_SEED + number for _, _, number, _ in drawn)
  trials = [
    Trial(
      label=label,
      number=number,
      seed=seed,
      options=arm_trials,
      held_out=None,
      loss=None,
      failed=NOT_RUN,
      arm=text,
      like=like,
      group=arm.group,
      task=arm.task,
      run=arm.run_name(seed),
      arguments=arm.arguments,
      **method._asdict(),
    )
    for (text, label, number, arm_trials), arm, seed in zip(drawn, grid.arms, seeds, strict=True)
  ]
  runs = _Trials(grid.arms, seeds)
  check_runs(runs, workdir)
  return trials, runs


def _make_grid(request: Comparison, texts: Sequence[str], before: Sequence[Trial]) -> tuple[Grid, str]:
  """Return the grid of the arms `texts`, and the arm to which they are matched.

  `before` holds the trials that the folder already has. The reference arm of these trials stays the reference arm.
  The request must have the same config as these trials.

  Raises:
    UserError: the request is wrong, holds no examples out, or has another config.
  """
  like = request.like or (before[0].like if before else request.arms[0])
  given = any(override.startswith(HELD_OUT) for override in request.overrides)
  overrides = request.overrides if given else (*request.overrides, f'{HELD_OUT}0.1')
  grid = make_grid(
    dataclasses.replace(request, like=like, arms=tuple(texts), overrides=overrides, seeds=(FIRST_SEED,))
  )
  sizes = {'model.expansion'}
  for config in (arm.config(0) for arm in grid.arms):
    sizes |= {f'model.{option}' for option in units_of(config.model)}
    if not (config.data.validation or config.data.get('validation_split')):
      raise UserError('a search chooses on held-out examples: set data.validation to more than 0')
  if wrong := [option.key for option in parse_space(request.space) if request.match and option.key in sizes]:
    raise UserError(
      f'the space has {wrong[0]}, but the parameters of each trial are matched by its number of units: leave it out, '
      'or add --nomatch'
    )
  if before and before[0].group != grid.arms[0].group:
    raise UserError(
      f'the folder has a search on {before[0].group}, not on {grid.arms[0].group}: choose another --workdir'
    )
  for config in request.configs:
    refuse_other_config(config, _grid_of(before))
  return grid, like


def _grid_of(trials: Sequence[Trial]) -> _Trials:
  """Return the runs of trials."""
  arms = (Arm(trial.group, _label(trial.label, trial.number), trial.arguments, task=trial.task) for trial in trials)
  return _Trials(tuple(arms), tuple(trial.seed for trial in trials))


def _label(arm: str, number: int) -> str:
  """Return the label of a trial, which is an arm of its own."""
  return f'{arm}-t{number:02}'


def _with_options(text: str, label: str, options: Mapping[str, str]) -> str:
  """Return an arm's text 'LABEL: MODEL key=value …' with another label and more options."""
  head, _, rest = text.partition(':')
  return f'{label}: {(rest or head).strip()} {_joined(options)}'


def _joined(options: Mapping[str, str]) -> str:
  return ' '.join(f'{key}={value}' for key, value in options.items())


def _by_label(trials: Sequence[Trial]) -> dict[str, list[Trial]]:
  labels = dict.fromkeys(trial.label for trial in trials)
  return {label: [trial for trial in trials if trial.label == label] for label in labels}


def _best(trials: Sequence[Trial]) -> Trial | None:
  """Return the finished trial with the best score, or None if no trial is finished.

  If several trials are equal, return the first of them.
  """
  finished = [trial for trial in trials if trial.held_out is not None]
  best = trials[0].ranks.better((trial.held_out for trial in finished), default=None)
  return next((trial for trial in finished if trial.held_out == best), None)


def _expected(trials: Sequence[Trial]) -> dict[str, list[float]]:
  """Return the best score of 1, 2, … trials, for each label of an arm.

  If the sampler is random, it is the expected best score (`expected_best`). With another sampler, later trials depend
  on the earlier ones, so their order matters. Then it is the best score so far. A diverged or stopped trial counts as
  a trial with the worst result of the arm.
  """
  expected = {}
  for label, arm_trials in _by_label(trials).items():
    ranks = arm_trials[0].ranks
    if values := [trial.held_out for trial in arm_trials if trial.held_out is not None]:
      worst = min(values) if ranks.better is max else max(values)
      filled = [worst if trial.held_out is None else trial.held_out for trial in arm_trials if trial.settled]
      random = arm_trials[0].sampler == RANDOM
      expected[label] = expected_best(filled, ranks) if random else [*itertools.accumulate(filled, ranks.better)]
  return expected


def _measured(trials: Sequence[Trial], workdir: pathlib.Path) -> list[Trial]:
  """Return the trials with their scores from the logs."""
  runs = open_runs(workdir)
  return [trial.measured(runs) for trial in trials]


def _write(trials: Sequence[Trial], workdir: pathlib.Path) -> list[Trial]:
  """Write tuning.json from the logs, and return the trials with their scores."""
  measured = _measured(trials, workdir)
  best = {label: found for label, arm_trials in _by_label(measured).items() if (found := _best(arm_trials))}
  stored = {
    'figure': measured[0].ranks.name,
    'best': {label: {'trial': trial.number, 'options': trial.options} for label, trial in best.items()},
    'expected_best' if measured[0].sampler == RANDOM else 'best_so_far': _expected(measured),
    'trials': [dataclasses.asdict(trial) for trial in measured],
  }
  write_json(workdir / TUNING, stored)
  return measured


def _read(workdir: pathlib.Path) -> list[Trial]:
  """Return the trials of a folder. Return [] if the folder is empty or missing.

  Raises:
    UserError: the folder holds files, but no search.
  """
  if (workdir / TUNING).is_file():
    return load_trials(workdir / TUNING)
  if workdir.exists() and (
    not workdir.is_dir() or {path.name for path in workdir.iterdir() if not is_draft(path, TUNING.name)} - LEFT
  ):
    raise UserError(f'{workdir} exists and is not a search: choose another --workdir, or remove it')
  return []


def load_trials(path: pathlib.Path) -> list[Trial]:
  """Return the trials that a tuning.json holds.

  Raises:
    UserError: the file is damaged.
  """
  stored = read_json(path, CURE, 'trials')
  try:
    trials = [
      Trial(**{**trial, 'arguments': tuple(trial['arguments'])}) for trial in (stored or {'trials': []})['trials']
    ]
  except (KeyError, TypeError) as error:
    raise damaged(path, str(error), CURE) from error
  texts = ('label', 'failed', 'arm', 'like', 'group', 'task', 'run')
  for trial in trials:
    check_kinds(vars(trial), path, CURE, number=int, seed=int, options=dict, **dict.fromkeys(texts, str))
    choose('task', trial.task, TASKS)
  if not trials:
    raise damaged(path, 'it has no trials', CURE)
  return trials
