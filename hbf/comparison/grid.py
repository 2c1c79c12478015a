"""The grid of a comparison: every arm with every seed, and the folders of these runs.

An arm is a model with its options. A group is all arms on one config, such as all models on CIFAR-10.
"""

import collections
import dataclasses
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from hbf.config.command_line import read_config
from hbf.config.defaults import LARGEST_SEED
from hbf.errors import UserError
from hbf.files import is_draft
from hbf.models.build import count_parameters, flops_per_example
from hbf.models.matching import TOLERANCE, match_parameters, match_steps, units_of
from hbf.tasks.registry import TASKS
from hbf.tasks.task import Task
from hbf.training.experiment import Plan, gradients_per_step, make_plan, training_operations
from hbf.training.workdir import CURE, FREE, damaged, read_json, write_json


@dataclasses.dataclass(frozen=True)
class Comparison:
  """The request for a comparison, or for a search (`hbf.comparison.tune`).

  Attributes:
    configs: values of --config without a model, such as 'configs/cifar10.py:recipe=small'. The arms on one config are
      a group.
    arms: texts 'MODEL' or 'LABEL: MODEL key=value …', where a key is a config key such as model.heads. The first arm
      is the reference: the report has the differences of all other arms from it.
    seeds: seeds of the runs, all different.
    overrides: flags '--config.KEY=VALUE' for all arms.
    published: test scores that others report, by 'group/label'. For images, a score is the accuracy in percent.
    match: True to change the number of units (centers or hidden units) of each arm, so that its number of parameters
      is within 1% of the reference's. An arm that is already within 1% keeps its units.
    like: another arm, written as in `arms`, whose parameters and operations are matched instead of the reference's.
      '': none.
    operations: number of training operations of each arm, such as '1.8e14', or 'match' for the number of the
      reference. The key train.epochs is set so that training takes this number, to within 0.5%. '': train.epochs is
      not changed. An arm that sets train.epochs itself keeps its value.
    parameters: greatest number of parameters of an arm, within 1%. 0: there is no limit. With `match`, all arms get
      fewer units if the first arm has more parameters than this.
    space: distributions of config keys for `hbf.comparison.tune`: 'KEY=LOW..HIGH', 'KEY=A|B', or 'LABEL: KEY=…' for
      one arm (`hbf.comparison.space`).
  """

  configs: tuple[str, ...] = ()
  arms: tuple[str, ...] = ()
  seeds: tuple[int, ...] = (0, 1, 2)
  overrides: tuple[str, ...] = ()
  published: Mapping[str, float] = dataclasses.field(default_factory=dict)
  match: bool = True
  like: str = ''
  operations: str = ''
  parameters: int = 0
  space: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Arm:
  """An arm of a comparison: a model with its options, on one config.

  Attributes:
    group: name of the config, such as 'cifar10'. Arms of one group are compared with each other.
    label: name of the arm in its group.
    arguments: arguments of `hbf train` without the seed and the workdir.
    published: the test score that others report, a value of the first of the task's `scores`. None: there is none.
    task: name of the config's task.
  """

  group: str
  label: str
  arguments: tuple[str, ...]
  published: float | None = None
  task: str = 'classification'  # old grids have no task

  @property
  def kind(self) -> type[Task]:
    """The subclass of `Task` that implements the arm's task."""
    return TASKS[self.task]

  def run_name(self, seed: int) -> str:
    """Return the name of the folder for the run of this arm with a seed."""
    return f'{self.group}-{self.label}-{seed}'

  def config(self, seed: int) -> ConfigDict:
    """Return the config of this arm's run with a seed, as `hbf train` reads it from the arguments.

    Raises:
      UserError: an argument is wrong.
    """
    return read_config([*self.arguments, f'--config.seed={seed}'])


@dataclasses.dataclass(frozen=True)
class Grid:
  """The runs of every arm with every seed.

  Attributes:
    arms: the arms of all groups. An arm is compared with the first arm of its group.
    seeds: seeds of the runs.
  """

  arms: tuple[Arm, ...] = ()
  seeds: tuple[int, ...] = ()

  def runs(self) -> list[tuple[Arm, int]]:
    """Return all runs, seed by seed, so that a report before the end can already compare all arms."""
    return [(arm, seed) for seed in self.seeds for arm in self.arms]

  def union(self, other: 'Grid') -> 'Grid':
    """Return the arms and seeds of both grids. An arm of `other` replaces an arm of the same group and label."""
    arms = {(arm.group, arm.label): arm for arm in (*self.arms, *other.arms)}
    return Grid(tuple(arms.values()), tuple(sorted({*self.seeds, *other.seeds})))

  def save(self, workdir: pathlib.Path) -> None:
    """Write the grid to grid.json in a comparison folder."""
    write_json(workdir / 'grid.json', dataclasses.asdict(self))

  @classmethod
  def load(cls, workdir: pathlib.Path) -> 'Grid':
    """Read the grid from grid.json in a comparison folder.

    Raises:
      UserError: grid.json is missing or damaged.
    """
    path = workdir / 'grid.json'
    stored = read_json(path, CURE, 'arms', 'seeds')
    if stored is None:
      raise UserError(f'{workdir} is not a comparison (no grid.json): give the --workdir of a comparison')
    try:
      arms = tuple(Arm(**{**arm, 'arguments': tuple(arm['arguments'])}) for arm in stored['arms'])
      return cls(arms, tuple(stored['seeds']))
    except (KeyError, TypeError) as error:
      raise damaged(path, str(error), CURE) from error

  @classmethod
  def stored(cls, workdir: pathlib.Path) -> 'Grid':
    """Return the grid of a comparison folder. If the folder is empty or missing, return an empty grid.

    Raises:
      UserError: the folder holds files but no comparison, or grid.json is damaged.
    """

    def left(path: pathlib.Path) -> bool:  # by a call that was killed at its start
      return path.name == '.lock' or is_draft(path, 'grid.json')

    empty = not workdir.exists() or (workdir.is_dir() and all(map(left, workdir.iterdir())))
    if not empty and not (workdir / 'grid.json').is_file():
      raise UserError(f'{workdir} exists and is not a comparison: choose another --workdir, or remove it')
    return cls() if empty else cls.load(workdir)


def with_arms(preset: Comparison, arms: Sequence[str]) -> Comparison:
  """Return a preset with other arms, or with its own arms if none are given.

  Parameters and operations are matched to the same arm of the preset in any case. So an arm's numbers of units and
  epochs do not depend on the other arms that are run, nor on those that the folder already has.

  Args:
    preset: the preset.
    arms: the new arms. The label alone is enough for an arm of the preset.
  """
  if not preset.arms:
    return dataclasses.replace(preset, arms=tuple(arms))
  own = {label_of(arm): arm for arm in preset.arms}
  chosen = tuple(own.get(arm, arm) for arm in arms) or preset.arms
  others = own.keys() - {label_of(arm) for arm in chosen}
  space = tuple(line for line in preset.space if line.partition(':')[0] not in others)
  return dataclasses.replace(preset, arms=chosen, like=preset.like or preset.arms[0], space=space)


def published_for(preset: Comparison, request: Comparison) -> dict[str, float]:
  """Return the published scores of a preset that belong beside a request: those of arms with the preset's options."""
  free = tuple(f'--config.{key}=' for key in FREE)
  changed = [override for override in request.overrides[len(preset.overrides) :] if not override.startswith(free)]
  if changed or (request.match, request.operations) != (preset.match, preset.operations):
    return {}
  known = {(_group_of(config), config.partition(':')[2]) for config in preset.configs}
  groups = {_group_of(config) for config in request.configs if (_group_of(config), config.partition(':')[2]) in known}
  labels = {label_of(arm) for arm in request.arms if arm in preset.arms}
  own = {f'{group}/{label}' for group in groups for label in labels}
  return {name: score for name, score in preset.published.items() if name in own}


def make_grid(request: Comparison, before: Grid = Grid()) -> Grid:
  """Return the grid with every arm of a request on every config of the request.

  Args:
    request: the requested comparison. If its `like` is given, parameters and operations are matched to that arm, and
      otherwise to the reference of the group.
    before: the grid of the folder so far. The first arm of a group in this grid stays the reference of the group.

  Raises:
    UserError: the request is wrong, or a data set is missing.
  """
  if not request.configs or not request.arms or not request.seeds:
    raise UserError('a comparison needs at least one config, one arm and one seed')
  _refuse_duplicates('seed', request.seeds)
  epochs = [override for override in request.overrides if override.startswith('--config.train.epochs=')]
  if epochs and request.operations not in ('', 'match'):
    raise UserError(
      f'each arm gets {request.operations} training operations, and {epochs[-1]} sets another length: leave it out, '
      'or add --operations=none'
    )
  result: list[Arm] = []
  for config in request.configs:
    group = _group_of(config)
    if any(arm.group == group for arm in result):
      raise UserError(f'two configs are called {group}: rename a file, or compare them in two folders')
    arms = [_parse_arm(arm, config, request.overrides) for arm in request.arms]
    _refuse_duplicates('arm', [arm.label for arm in arms])
    known = Grid(tuple(arm for arm in before.arms if arm.group == group))
    refuse_other_config(config, known)
    first = known.union(Grid(tuple(arms))).arms[0]
    if request.like:
      first = _parse_arm(request.like, config, request.overrides)
    for arm in _match_arms(arms, first, request):
      stored = next((other.published for other in known.arms if other.label == arm.label), None)
      published = request.published.get(f'{group}/{arm.label}', stored)
      result.append(dataclasses.replace(arm, published=published))
  folders = collections.Counter(arm.run_name(request.seeds[0]) for arm in before.union(Grid(tuple(result))).arms)
  if shared := [name for name, count in folders.items() if count > 1]:
    raise UserError(f'two arms would have the run {shared[0]}: rename a config or an arm, or compare in two folders')
  return Grid(tuple(result), tuple(request.seeds))


def arms_with_own_epochs(request: Comparison) -> list[str]:
  """Return the labels of the arms that have their own value of train.epochs.

  The training operations of these arms are not matched. If the request does not set `operations`, the list is empty.
  """
  own = [arm for arm in request.arms if request.operations and re.search(r'\strain\.epochs=', arm)]
  return [label_of(arm) for arm in own]


def arms_with_other_units(request: Comparison, grid: Grid) -> dict[str, str]:
  """Return the arms that state a number of units and get another one, to match parameters.

  Args:
    request: the requested comparison.
    grid: its grid.

  Returns:
    For each of these arms, as it is written in the request, a text such as 'model.stage2.hidden=7 becomes 66'.
  """
  units = {arm.label: units_of(arm.config(0).model) for arm in grid.arms}
  return {
    arm: f'model.{option}={given} becomes {count}'
    for arm in request.arms
    for option, count in units[label_of(arm)].items()
    for given in re.findall(rf'\smodel\.{re.escape(option)}=(\d+)', arm)[-1:]
    if int(given) != count
  }


def _group_of(config: str) -> str:
  return pathlib.Path(config.partition(':')[0]).stem


def label_of(arm: str) -> str:
  """Return the label of an arm that is written as 'LABEL: MODEL key=value …' or 'MODEL'."""
  return arm.partition(':')[0].strip()


def parse_seeds(text: str) -> tuple[int, ...]:
  """Parse seeds from a list such as '0,1,2'. '' gives no seeds.

  Raises:
    UserError: the form is wrong, or a seed is too large.
  """
  if not re.fullmatch(r'(\d+(,\d+)*)?', text):
    raise UserError(f"--seeds={text} is not a list of numbers: expected a list such as '0,1,2'")
  seeds = tuple(map(int, filter(None, text.split(','))))
  if wrong := [seed for seed in seeds if seed > LARGEST_SEED]:
    raise UserError(f'--seeds={text} has the seed {wrong[0]}: expected numbers from 0 to {LARGEST_SEED}')
  return seeds


def _parse_arm(text: str, config: str, overrides: Sequence[str]) -> Arm:
  head, colon, rest = text.partition(':')
  label = head.strip()
  model, *options = (rest.split() or ['']) if colon else [label]
  if not re.fullmatch(r'[\w.+]+(-[\w.+]+)*', label):
    raise UserError(
      f"arm {text!r} needs a label of letters, digits, '.', '+', '_' and '-': 'LABEL: MODEL key=value …'"
    )
  if not model:
    raise UserError(f"arm {text!r} names no model: give 'LABEL: MODEL key=value …'")
  if wrong := [option for option in options if '=' not in option]:
    raise UserError(f"arm {text!r} is wrong: {wrong[0]!r} is not key=value. Give 'LABEL: MODEL key=value …'")
  path, _, arguments = config.partition(':')
  if re.search(r'(^|,)model=', arguments):
    raise UserError(f'config {config!r} names a model: give models with --arm=MODEL')
  keys = (*overrides, *(f'--config.{option}' for option in options))
  if seeds := [key for key in keys if re.match(r'--?config\.seed=', key)]:
    raise UserError(f'arm {label} has {seeds[0]}, but the seeds of the runs come from --seeds: leave {seeds[0]} out')
  given = f'--config={path}:' + ','.join(filter(None, [f'model={model}', arguments]))
  return Arm(_group_of(config), label, (given, *keys))


def refuse_other_config(
  config: str, known: Grid, remedy: str = 'give the same config, or choose another --workdir'
) -> None:
  """Check that a config has the arguments, such as recipe=small, of the stored arms of its group.

  Args:
    config: the config.
    known: the arms of its group that the folder already has.
    remedy: the end of the error message.

  Raises:
    UserError: the arguments differ in more than the model.
  """

  def arguments(text: str) -> set[str]:
    return {part for part in text.partition(':')[2].split(',') if part and not part.startswith('model=')}

  for flag in (argument for arm in known.arms for argument in arm.arguments if argument.startswith('--config=')):
    if arguments(flag) != arguments(config):
      raise UserError(
        f'the folder has arms of {flag.removeprefix("--config=")}, and --config={config} differs in more than the '
        f'model: {remedy}'
      )


def _match_arms(arms: Sequence[Arm], first: Arm, request: Comparison) -> list[Arm]:
  """Return the arms, matched to the arm `first` in parameters and operations as requested.

  Raise UserError if a config is wrong, or if an arm has more parameters than the request allows, by more than 1%.
  """
  plans = {arm: make_plan(arm.config(0)) for arm in dict.fromkeys([first, *arms])}
  size = plans[first].parameters
  budget = min(size, request.parameters or size)
  unmatched = [arm for arm in arms if request.match and abs(plans[arm].parameters - budget) > TOLERANCE * budget]
  sized = [_match_parameters(arm, plans[arm], budget) if arm in unmatched else arm for arm in arms]
  plans |= {arm: make_plan(arm.config(0)) for arm in sized if arm not in plans}
  for arm in sized:
    if 0 < request.parameters * (1 + TOLERANCE) < (count := plans[arm].parameters):
      raise UserError(
        f'{arm.group} {arm.label} has {count:,} parameters, and the comparison allows {request.parameters:,}: choose '
        'a smaller width or depth'
      )
  if request.operations:
    operations = _operations(request.operations, plans[first])
    own = arms_with_own_epochs(request)
    sized = [arm if arm.label in own else _match_operations(arm, plans[arm], operations) for arm in sized]
  return [dataclasses.replace(arm, task=plans[first].config.task) for arm in sized]


def _match_parameters(arm: Arm, plan: Plan, budget: int) -> Arm:
  """Return the arm with the number of units that brings its number of parameters within 1% of `budget`.

  `plan` has the parts of the arm's run that do not depend on the examples (`hbf.training.experiment.Plan`).
  """
  task = plan.task
  model = match_parameters(
    plan.config.model, budget, lambda part: count_parameters(task.make_model(part), task.shape)
  )
  units = (f'--config.model.{option}={count}' for option, count in units_of(model).items())
  return dataclasses.replace(arm, arguments=(*arm.arguments, *units))


def _operations(text: str, first: Plan) -> float:
  """Return the number of training operations of each arm, from the value `text` of `Comparison.operations`.

  `first` is the plan (`hbf.training.experiment.Plan`) of the arm whose operations 'match' stands for.
  """
  if text == 'match':
    return _training_operations(first)
  if not re.fullmatch(r'\d+(\.\d+)?(e\d+)?', text) or not 0 < float(text) < math.inf:
    raise UserError(f"operations is {text!r}: expected 'match' or a number such as 1.8e14")
  return float(text)


def _training_operations(plan: Plan) -> float:
  """Return the floating-point operations of training, for the plan of a run."""
  flops = flops_per_example(plan.model, plan.task.shape)
  return training_operations(flops, plan.clock, plan.teacher_flops, gradients_per_step(plan.config))


def _match_operations(arm: Arm, plan: Plan, operations: float) -> Arm:
  """Return the arm with the number of epochs for which training takes the given number of operations."""
  clock = plan.clock
  step = _training_operations(plan) / clock.steps
  try:
    steps = match_steps(step, operations)
  except UserError as error:
    raise UserError(f'{arm.group} {arm.label}: {error}') from None
  if steps == clock.steps:
    return arm
  return dataclasses.replace(arm, arguments=(*arm.arguments, f'--config.train.epochs={clock.epochs_of(steps)}'))


def _refuse_duplicates(what: str, names: Sequence[Any]) -> None:
  twice = [name for i, name in enumerate(names) if name in names[:i]]
  if twice:
    raise UserError(f'{what} {twice[0]!r} is given twice: give each {what} once')
