"""Comparison of starts, growth and replacement of HyperBF centers with ordinary training by AdamW and Muon.

python -m hbf.analysis.starts_study                    # trains 16 small networks on CIFAR-10: 15 minutes of a core
python -m hbf.analysis.starts_study --report           # draws the table and the picture again, from stored numbers

All runs are ordinary runs of `hbf.training.loop.train` with the same batches. An arm may change the parameters before
the first step, or the training state after half of the steps. docs/research/starts.md explains the results.
"""

import contextlib
import dataclasses
import functools
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from ml_collections import ConfigDict
from rich.console import Console

from hbf.analysis import starts
from hbf.analysis.agop import agop, agop_operations
from hbf.analysis.report.starts_report import draw, table
from hbf.analysis.study import Record, Study
from hbf.config.datasets import cifar10
from hbf.config.resolve import resolve
from hbf.data.augment.batches import normalize
from hbf.data.datasets import Dataset
from hbf.data.images.arrays import ArraySource
from hbf.data.pipeline.host import read_many
from hbf.data.pipeline.order import evenly_spaced
from hbf.errors import UserError, in_one_line
from hbf.evaluation.scores import ACCURACY
from hbf.models.classifier import ImageClassifier
from hbf.tasks.classification import Classification
from hbf.training.checkpoints import Checkpoints
from hbf.training.convert import write, write_state
from hbf.training.experiment import Experiment, prepare
from hbf.training.loop import train
from hbf.training.machine import commit
from hbf.training.programs import make_init
from hbf.training.sharding import with_sharding
from hbf.training.state import TrainState

SIZES = {'model.width': 48, 'model.depth': 2, 'model.patch': 8}
TRAINING = {'train.epochs': 2.0, 'data.validation': 0.1, 'evaluate.every': '0.25epochs', 'checkpoint.every': '100%'}
MUON = {'optimizer.name': 'muon', 'optimizer.learning_rate': 12e-3}
SEEN = 500  # training images that set a start
SEARCHED = 1_000  # training images among which the hardest are searched
HARDEST = 0.1  # their fraction
SHORT = 0.1  # fraction of the steps after which the AGOP is measured
REPLACED = 0.25  # fraction of the centers


@dataclasses.dataclass(frozen=True)
class Arm:
  """A way to train.

  Attributes:
    name: the name of the arm in tables.
    optimizer: values of config keys that select the optimizer. {}: the optimizer of recipe laptop, AdamW.
    start: the change before the first step: 'kmeans' or 'tokens' (`hbf.analysis.starts.three_phases`), 'agop' (metric
      from the AGOP), or '' (no change).
    change: the change after half of the steps: 'grow' (more centers), 'replace' (new centers in place of the least
      used), or '' (no change).
    hardest: True if new centers are drawn from tokens of the images with the highest loss, False if from tokens of
      all images.
  """

  name: str
  optimizer: dict[str, Any] = dataclasses.field(default_factory=lambda: MUON)
  start: str = ''
  change: str = ''
  hardest: bool = True


ARMS = (
  Arm('AdamW', {}),
  Arm('Muon'),
  Arm('three phases, k-means', start='kmeans'),
  Arm('three phases, random tokens', start='tokens'),
  Arm('metric from the AGOP', start='agop'),
  Arm('growth at the highest loss', change='grow'),
  Arm('growth at random tokens', change='grow', hardest=False),
  Arm('replacement of the least used', change='replace'),
)


class Cost(NamedTuple):
  """The cost of a computation.

  Attributes:
    operations: floating-point operations.
    seconds: seconds of processor time, without compilation.
  """

  operations: float = 0.0
  seconds: float = 0.0

  def plus(self, other: 'Cost', times: float = 1.0) -> 'Cost':
    """Return this cost plus `times` times the other cost."""
    return Cost(self.operations + times * other.operations, self.seconds + times * other.seconds)


class Leg(NamedTuple):
  """A part of a run.

  Attributes:
    first: the number of steps of the run before this part.
    last: the number of steps of the run at the end of this part.
    step: the cost of a step.
    held_out: the accuracy on held-out images in percent, by step.
    result: the content of result.json. None if the run was stopped before its last step.
  """

  first: int
  last: int
  step: Cost
  held_out: dict[int, float]
  result: dict[str, Any] | None


def run_leg(experiment: Experiment, workdir: pathlib.Path, first: int = 0, until: int | None = None) -> Leg:
  """Begin or continue the run in a folder, and return the part that was trained.

  Args:
    experiment: the experiment.
    workdir: the run folder.
    first: the number of steps that the run has taken before.
    until: the number of steps in all, after which the run is stopped. None: it goes on to its last step.
  """
  ends: dict[int, float] = {}
  held_out: dict[int, float] = {}

  def watch(step: int, metrics: Any, state: TrainState) -> bool:
    del state
    ends[step] = time.process_time()
    if 'validation' in metrics:
      held_out[step] = metrics['validation'][ACCURACY.name]
    return until is not None and step >= until

  console, one = Console(stderr=True, quiet=True), jax.devices()[:1]
  result = train(experiment.config, workdir, console, one, dataset=experiment.task.dataset, callbacks=[watch])
  if result is None and (until is None or until > max(ends, default=0)):
    raise UserError('a signal stopped the training: run the command again')
  # The median leaves out steps after which the network was evaluated or saved.
  seconds = float(np.median(np.diff([*ends.values()]) / np.diff([*ends])))
  operations = 3.0 * experiment.flops_per_unit * experiment.config.train.batch_size
  return Leg(first, max(ends), Cost(operations, seconds), held_out, result)


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
  """Call a function twice, and return its value and the processor time of the second call, which compiles nothing."""
  function()
  begin = time.process_time()
  return function(), time.process_time() - begin


class Images(NamedTuple):
  """Training images: normalized [n, height, width, channels], and labels int [n]."""

  inputs: np.ndarray
  labels: np.ndarray


def read_images(experiment: Experiment, most: int) -> Images:
  """Return at most `most` training images, evenly spaced and not transformed."""
  source, data = experiment.splits['train'], experiment.config.data
  images, labels = read_many(source, evenly_spaced(len(source), most), experiment.task.shape)
  return Images(np.asarray(normalize(jnp.asarray(images), data.mean, data.std)), np.asarray(labels))


def classifier(experiment: Experiment) -> ImageClassifier:
  """Return the network of an experiment."""
  assert isinstance(experiment.model, ImageClassifier)
  return experiment.model


def changed_start(arm: Arm, experiment: Experiment, folder: pathlib.Path) -> tuple[dict[str, Any], Cost]:
  """Return the parameters with which an arm starts, and the cost of making them.

  For the start 'agop', a short run in `folder` gives the AGOP. The cost includes this run.
  """
  model, params, seed = classifier(experiment), starts.initial_params(experiment), experiment.config.seed
  images, shape = read_images(experiment, SEEN), experiment.task.shape
  if arm.start != 'agop':
    made, seconds = timed(lambda: starts.three_phases(model, params, *images, arm.start, seed))
    return made, Cost(starts.phases_operations(model, params, shape, len(images.labels), arm.start), seconds)
  leg = run_leg(experiment, folder / 'short', until=max(2, round(SHORT * experiment.clock.steps)))
  trained = restored_state(experiment, folder / 'short').params

  def with_metric() -> dict[str, Any]:
    return starts.with_agop_metric(model, params, agop(model, trained, images.inputs), images.inputs)

  made, seconds = timed(with_metric)
  passes = model.trunk.depth * experiment.flops_per_unit  # to scale the metric of each block
  cost = Cost(len(images.labels) * (agop_operations(model, params, shape) + passes), seconds)
  return made, cost.plus(leg.step, leg.last)


def restored_state(experiment: Experiment, workdir: pathlib.Path) -> TrainState:
  """Return the training state in the newest checkpoint of a run."""
  first = next(experiment.inputs['train'].stacks(experiment.order, 0, [1], experiment.steps_per_call))
  shapes = jax.eval_shape(make_init(experiment, experiment.objective), experiment.inputs['train'].resident, first, {})
  with contextlib.closing(Checkpoints(workdir / 'checkpoints', read_only=True)) as checkpoints:
    return checkpoints.restore_newest(with_sharding(shapes, experiment.mesh)).state


def changed_state(arm: Arm, before: Experiment, state: TrainState, size: int) -> tuple[TrainState, Cost]:
  """Return the state in which an arm continues after half of the steps, and the cost of the change.

  Args:
    arm: the arm.
    before: the experiment that trained for the first half of the steps.
    state: its state after these steps.
    size: number of centers of a block after the change.
  """
  model, images = classifier(before), read_images(before, SEARCHED)
  old = starts.centers_of(model).centers
  stay = old if arm.change == 'grow' else old - round(REPLACED * old)

  def change() -> TrainState:
    seen = starts.seen(model, state.params, images.inputs)
    losses = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(seen.logits), jnp.asarray(images.labels))
    count = max(1, round(HARDEST * len(losses))) if arm.hardest else len(losses)
    rows = np.argsort(-np.asarray(losses), kind='stable')[:count]
    kept = starts.most_used(model, state.params, seen.points, stay)
    new = starts.draw_tokens(seen.points, rows, size - stay, before.config.seed)
    return starts.with_new_centers(state, kept, new)

  changed, seconds = timed(change)
  # The responses are computed a second time.
  return changed, Cost(2.0 * len(images.labels) * before.flops_per_unit, seconds)


def make_experiment(config: ConfigDict, dataset: Any = None, changes: Mapping[str, Any] | None = None) -> Experiment:
  """Return the experiment of a config on one device. `changes` gives new values of config keys.

  If `dataset` is None, the experiment opens the data set that the config names.
  """
  changed = config.copy_and_resolve_references()
  changed.update_from_flattened_dict(dict(changes or {}))
  return prepare(changed, devices=jax.devices()[:1], dataset=dataset)


def in_memory(dataset: Dataset) -> Dataset:
  """Return the data set with all its images in memory."""
  read = {
    name: ArraySource(*read_many(source, np.arange(len(source)), dataset.image_shape))
    for name, source in dataset.splits.items()
  }
  return dataclasses.replace(dataset, splits=read)


def run_arm(arm: Arm, config: ConfigDict, seed: int, dataset: Dataset | None = None) -> dict[str, Any]:
  """Train an arm with one seed. Return a row of the study's results.

  Args:
    arm: the arm.
    config: the config that all arms share. The arm's optimizer replaces the optimizer of the config.
    seed: seed of the parameters and of the order of the images.
    dataset: the data set. None: the one that the config names.
  """
  config = resolve(config)
  config.update_from_flattened_dict({**arm.optimizer, 'seed': seed})
  with tempfile.TemporaryDirectory() as name:
    return _run_arm(arm, config, pathlib.Path(name), dataset)


def _run_arm(arm: Arm, config: ConfigDict, folder: pathlib.Path, dataset: Dataset | None) -> dict[str, Any]:
  experiment = make_experiment(config, dataset)
  size, legs = config.model.stage2.centers, []
  costs = [Cost()]
  if arm.start:
    params, costs[0] = changed_start(arm, experiment, folder)
    write(folder / 'run', experiment, params)
  if arm.change:
    half = {'model.stage2.centers': size // 2} if arm.change == 'grow' else {}
    first = make_experiment(config, experiment.task.dataset, half)
    legs.append(run_leg(first, folder / 'first', until=experiment.clock.steps // 2))
    state, cost = changed_state(arm, first, restored_state(first, folder / 'first'), size)
    write_state(folder / 'run', experiment, state)
    costs.append(cost)
  legs.append(run_leg(experiment, folder / 'run', legs[-1].last if legs else 0))
  return row_of(arm, experiment, legs, costs)


def row_of(arm: Arm, experiment: Experiment, legs: Sequence[Leg], costs: Sequence[Cost]) -> dict[str, Any]:
  """Return the row of a run in the study's results.

  Args:
    arm: the arm.
    experiment: the run.
    legs: the parts of the run: two if the arm changes the state after half of the steps, otherwise one.
    costs: for each part, the cost of the change before it.
  """
  curve, total, changes = [], Cost(), Cost()
  for leg, cost in zip(legs, costs, strict=True):
    total, changes = total.plus(cost), changes.plus(cost)
    for step, accuracy in sorted(leg.held_out.items()):
      at = total.plus(leg.step, step - leg.first)
      curve.append({'step': step, 'operations': at.operations, 'seconds': at.seconds, 'held_out': accuracy})
    total = total.plus(leg.step, leg.last - leg.first)
  result = legs[-1].result
  assert result is not None
  return {
    'arm': arm.name,
    'seed': experiment.config.seed,
    'parameters': experiment.parameters,
    'accuracy': result[ACCURACY.name],
    'nll': result['nll'],
    **total._asdict(),
    'changes': changes._asdict(),
    'curve': curve,
  }


def study_config(data_dir: str) -> ConfigDict:
  """Return the config of all arms: recipe laptop with a smaller network and two epochs."""
  config = cifar10('recipe=laptop')
  config.update_from_flattened_dict({**SIZES, **TRAINING, 'data.dir': data_dir, 'log.units': False})
  return config


def _measure_all(seeds: Sequence[int], data_dir: str, record: Record) -> None:
  """Measure all arms. Rows that are stored stay as they are."""
  rows, config = list((record.stored or {'rows': []})['rows']), study_config(data_dir)
  dataset = in_memory(Classification.load_dataset(config))
  for arm in ARMS:
    for seed in seeds:
      if not any(row['arm'] == arm.name and row['seed'] == seed for row in rows):
        rows.append(run_arm(arm, config, seed, dataset) | {'commit': commit()})
        print(rows[-1], file=sys.stderr, flush=True)
        record.save({'data': 'cifar10', 'config': SIZES | TRAINING, 'rows': rows})


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
  """Run the command and return its exit status."""
  study = Study('starts', draw, table, verbosity=logging.ERROR)  # Orbax warns of intended behavior
  parser = study.parser('hbf.analysis.starts_study', __doc__)
  parser.add_argument(
    '--seed', type=int, action='append', default=[], help='a seed; may be repeated; default: 0 and 1'
  )
  parser.add_argument('--data_dir', default='~/tensorflow_datasets', help='TFDS folder with CIFAR-10')
  flags = parser.parse_args(arguments)
  return study.run(flags, functools.partial(_measure_all, flags.seed or [0, 1], flags.data_dir))


if __name__ == '__main__':
  sys.exit(main())
