"""What is compared: arms (a model with its options on a data set) times seeds, and where their runs lie."""

import dataclasses
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from hbf.cli import read_config
from hbf.errors import UserError
from hbf.models.build import count_parameters, flops_per_example
from hbf.models.matching import TOLERANCE, match_parameters, match_steps, units_of
from hbf.tasks.registry import TASKS
from hbf.tasks.task import Task
from hbf.training.experiment import Plan, make_plan, training_operations
from hbf.training.workdir import damaged, differences, read_json, write_json


@dataclasses.dataclass(frozen=True)
class Comparison:
  """What is asked for.

  Attributes:
    configs: as --config of train.py, without a model: 'configs/cifar10.py:recipe=small'.
    arms: 'MODEL' or 'LABEL: MODEL key=value …', keys as after --config.; the first is the reference for differences
      and parameters.
    seeds: of the runs, all different.
    overrides: '--config.KEY=VALUE' for all arms.
    published: the test figure that others report, accuracy in percent of images, by 'data/label'.
    match: give each arm the parameters of its group's first, to within 1%, through the number of its units; arms
      that come as close with the units they have keep them.
    like: an arm, as in arms, whose parameters and operations all get instead of their group's first's; '': none.
    operations: of the training of each arm. 'match' gives each arm those of its group's first, and a number such as
      '1.8e14' gives each arm that many, through train.epochs, to within 0.5%. '' leaves the epochs alone. An arm that
      sets train.epochs itself keeps its own.
    parameters: most parameters that an arm may have; 0: no limit.
    space: what `tune` draws for each arm: 'KEY=LOW..HIGH', 'KEY=A|B', or 'LABEL: KEY=…' for one arm alone; see
      `hbf.comparison.space`.
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
  """One row of a comparison.

  Attributes:
    group: arms of one config file are compared with each other; the file's name.
    label: names the arm among those of its group.
    arguments: of train.py, all but the seed and the workdir.
    published: the first figure of its task, on the test split, that others report, or None.
    task: of its config, by name.
  """

  group: str
  label: str
  arguments: tuple[str, ...]
  published: float | None = None
  task: str = 'classification'  # what all were before there was another

  @property
  def kind(self) -> type[Task]:
    """Its task."""
    return TASKS[self.task]

  def run(self, seed: int) -> str:
    """Name of the folder of a run."""
    return f'{self.group}-{self.label}-{seed}'

  def config(self, seed: int) -> ConfigDict:
    """What train.py reads of the arguments.

    Raises:
      UserError: one of them is wrong.
    """
    return read_config([*self.arguments, f'--config.seed={seed}'])


@dataclasses.dataclass(frozen=True)
class Grid:
  """Every arm is run with every seed.

  Attributes:
    arms: those of a group are compared with its first.
    seeds: of the runs.
  """

  arms: tuple[Arm, ...] = ()
  seeds: tuple[int, ...] = ()

  def runs(self) -> list[tuple[Arm, int]]:
    """Seed by seed, so that an early look compares all arms."""
    return [(arm, seed) for seed in self.seeds for arm in self.arms]

  def union(self, other: 'Grid') -> 'Grid':
    """Arms and seeds of both; an arm of the other's takes the place of the one of its name."""
    arms = {(arm.group, arm.label): arm for arm in (*self.arms, *other.arms)}
    return Grid(tuple(arms.values()), tuple(sorted({*self.seeds, *other.seeds})))

  def save(self, workdir: pathlib.Path) -> None:
    """Writes grid.json."""
    write_json(workdir / 'grid.json', dataclasses.asdict(self))

  @classmethod
  def load(cls, workdir: pathlib.Path) -> 'Grid':
    """Read grid.json.

    Raises:
      UserError: there is none, or it is damaged.
    """
    path, cure = workdir / 'grid.json', 'restore it from a copy, or choose another --workdir'
    stored = read_json(path, cure, 'arms', 'seeds')
    if stored is None:
      raise UserError(f'{workdir} is not a comparison (no grid.json): give the --workdir you compared with')
    try:
      arms = tuple(Arm(**{**arm, 'arguments': tuple(arm['arguments'])}) for arm in stored['arms'])
      return cls(arms, tuple(stored['seeds']))
    except (KeyError, TypeError) as error:
      raise damaged(path, str(error), cure) from error

  @classmethod
  def stored(cls, workdir: pathlib.Path) -> 'Grid':
    """The grid of a comparison, empty where there is nothing yet.

    Raises:
      UserError: something else is there.
    """
    left = {'.lock', 'grid.json.tmp'}  # of a call that was killed at its start
    empty = not workdir.exists() or (workdir.is_dir() and {path.name for path in workdir.iterdir()} <= left)
    if not empty and not (workdir / 'grid.json').is_file():
      raise UserError(f'{workdir} exists and is not a comparison: choose another --workdir, or remove it')
    return cls() if empty else cls.load(workdir)


def with_arms(preset: Comparison, arms: Sequence[str]) -> Comparison:
  """A preset with these arms in place of its own, all of them if there are none.

  An arm of the preset is named by its label. Parameters stay those of the preset's first, so that an arm that is run
  by itself is the one that stands beside the others.
  """
  if not arms or not preset.arms:
    return dataclasses.replace(preset, arms=tuple(arms) or preset.arms)
  own = {label_of(arm): arm for arm in preset.arms}
  chosen = tuple(own.get(arm, arm) for arm in arms)
  others = own.keys() - {label_of(arm) for arm in chosen}
  space = tuple(line for line in preset.space if line.partition(':')[0] not in others)
  return dataclasses.replace(preset, arms=chosen, like=preset.arms[0], space=space)


def make_grid(asked: Comparison, before: Grid = Grid()) -> Grid:
  """The grid of some config files × some arms.

  Args:
    asked: what it shall be.
    before: what the same folder holds already: a group's first arm there is the one whose parameters others get,
      unless asked.like names another.

  Raises:
    UserError: something of it is wrong, or a data set isn't there.
  """
  if not asked.configs or not asked.arms or not asked.seeds:
    raise UserError('a comparison needs a config, an arm and a seed at least')
  _refuse_twice('seed', asked.seeds)
  result: list[Arm] = []
  for config in asked.configs:
    group = pathlib.Path(config.partition(':')[0]).stem
    if any(arm.group == group for arm in result):
      raise UserError(f'two configs are called {group}: rename a file, or compare them in two folders')
    arms = [_parse_arm(arm, config, asked.overrides) for arm in asked.arms]
    _refuse_twice('arm', [arm.label for arm in arms])
    known = Grid(tuple(arm for arm in before.arms if arm.group == group))
    first = known.union(Grid(tuple(arms))).arms[0]
    if asked.like:
      first = _parse_arm(asked.like, config, asked.overrides)
    for arm in _checked(arms, first, asked):
      stored = next((other.published for other in known.arms if other.label == arm.label), None)
      published = asked.published.get(f'{group}/{arm.label}', stored)
      result.append(dataclasses.replace(arm, published=published))
  return Grid(tuple(result), tuple(asked.seeds))


def with_own_epochs(asked: Comparison) -> list[str]:
  """Return the labels of the arms that set train.epochs, whose operations are therefore not matched."""
  own = [arm for arm in asked.arms if asked.operations and re.search(r'\strain\.epochs=', arm)]
  return [label_of(arm) for arm in own]


def label_of(arm: str) -> str:
  """Return the label of an arm in words, 'LABEL: MODEL key=value …' or 'MODEL'."""
  return arm.partition(':')[0].strip()


def parse_seeds(text: str) -> tuple[int, ...]:
  """Seeds from a list such as '0,1,2'; none from ''.

  Raises:
    UserError: not of this form.
  """
  if not re.fullmatch(r'(\d+(,\d+)*)?', text):
    raise UserError(f"--seeds={text} is not a list of numbers; expected such as '0,1,2'")
  return tuple(map(int, filter(None, text.split(','))))


def check_runs(grid: Grid, workdir: pathlib.Path) -> None:
  """Refuses a folder that has a run of another config where one of the grid's belongs.

  Raises:
    UserError: naming the run and the keys that differ.
  """
  for arm, seed in grid.runs():
    run = workdir / arm.run(seed)
    if differ := differences(run, arm.config(seed)):
      raise UserError(f'{run} holds a run of another config ({differ}): choose another --workdir, or remove it')


def _parse_arm(text: str, config: str, overrides: Sequence[str]) -> Arm:
  head, colon, rest = text.partition(':')
  label = head.strip()
  model, *options = rest.split() if colon else [label]
  if not re.fullmatch(r'[\w.+]+(-[\w.+]+)*', label):
    raise UserError(
      f"arm {text!r} needs a label of letters, digits, '.', '+', '_' and '-': 'LABEL: MODEL key=value …'"
    )
  if wrong := [option for option in options if '=' not in option]:
    raise UserError(f"arm {text!r}: {wrong[0]!r} is not key=value; an arm is 'LABEL: MODEL key=value …'")
  path, colon, arguments = config.partition(':')
  if re.search(r'(^|,)model=', arguments):
    raise UserError(f'config {config!r} names a model: arms do that, --arm=MODEL')
  given = f'--config={path}:' + ','.join(filter(None, [f'model={model}', arguments]))
  return Arm(pathlib.Path(path).stem, label, (given, *overrides, *(f'--config.{option}' for option in options)))


def _checked(arms: Sequence[Arm], first: Arm, asked: Comparison) -> list[Arm]:
  """Return the arms with the parameters and the operations that were asked for; all their configs are sound."""
  plans = {arm: make_plan(arm.config(0)) for arm in dict.fromkeys([first, *arms])}
  budget = plans[first].parameters
  far = [arm for arm in arms if asked.match and abs(plans[arm].parameters - budget) > TOLERANCE * budget]
  sized = [_matched(arm, plans[arm], budget) if arm in far else arm for arm in arms]
  plans |= {arm: make_plan(arm.config(0)) for arm in sized if arm not in plans}
  for arm in sized:
    if 0 < asked.parameters < (count := plans[arm].parameters):
      raise UserError(
        f'{arm.group} {arm.label} has {count:,} parameters, and the comparison allows {asked.parameters:,}: choose '
        'a smaller width or depth'
      )
  if asked.operations:
    operations = _operations(asked.operations, plans[first])
    own = with_own_epochs(asked)
    sized = [arm if arm.label in own else _lengthened(arm, plans[arm], operations) for arm in sized]
  return [dataclasses.replace(arm, task=plans[first].config.task) for arm in sized]


def _matched(arm: Arm, plan: Plan, budget: int) -> Arm:
  task = plan.task
  model = match_parameters(plan.config.model, budget, lambda part: count_parameters(task.network(part), task.shape))
  units = (f'--config.model.{option}={count}' for option, count in units_of(model).items())
  return dataclasses.replace(arm, arguments=(*arm.arguments, *units))


def _operations(asked: str, first: Plan) -> float:
  """Return the operations that each arm's training takes."""
  if asked == 'match':
    return training_operations(flops_per_example(first.model, first.task.shape), first.clock)
  if not re.fullmatch(r'\d+(\.\d+)?(e\d+)?', asked) or not float(asked):
    raise UserError(f"operations {asked!r} are no number: expected 'match' or a number such as 1.8e14")
  return float(asked)


def _lengthened(arm: Arm, plan: Plan, operations: float) -> Arm:
  """Return the arm with the epochs that take so many operations."""
  clock = plan.clock
  step = training_operations(flops_per_example(plan.model, plan.task.shape), clock) / clock.steps
  try:
    steps = match_steps(step, operations)
  except UserError as error:
    raise UserError(f'{arm.group} {arm.label}: {error}') from None
  if steps == clock.steps:
    return arm
  return dataclasses.replace(arm, arguments=(*arm.arguments, f'--config.train.epochs={clock.epochs_of(steps)}'))


def _refuse_twice(what: str, names: Sequence[Any]) -> None:
  twice = [name for i, name in enumerate(names) if name in names[:i]]
  if twice:
    raise UserError(f'{what} {twice[0]!r} is given twice')
