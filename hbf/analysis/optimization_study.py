"""Measurement of closed-form refits of linear layers, and of the likeness of learned metrics to the AGOP.

python -m hbf.analysis.optimization_study --run=runs/claim/cifar10-hyperbf-0 --run=runs/claim/cifar10-vit-swiglu-0 …
python -m hbf.analysis.optimization_study --report         # draws tables and picture again, from stored numbers

A refit computes the weights of one linear layer of a trained network in closed form (`hbf.analysis.refit`). The AGOP
of a block, its average gradient outer product, is compared with the metric of its stage 2 (`hbf.analysis.agop`).
docs/research/optimization.md explains the results.
"""

import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

from hbf.analysis import refit
from hbf.analysis.agop import agop, correlations, feature_matrices, random_correlations, root
from hbf.analysis.report.optimization_report import draw, tables
from hbf.analysis.study import Record, Study, check_folder_names, data_of
from hbf.data.augment.batches import normalize
from hbf.data.pipeline.host import read_many
from hbf.data.pipeline.order import evenly_spaced
from hbf.errors import UserError, in_one_line
from hbf.evaluation.batches import in_batches
from hbf.models.build import flops_per_example
from hbf.models.classifier import ImageClassifier
from hbf.tasks.classification import Classification
from hbf.training.experiment import make_splits
from hbf.training.restore import Restored, restore

BATCH = 250  # images in one call of the network
HELD_OUT, TESTED = 2_500, 10_000  # most images
ROUNDS, ITERATIONS = 2, 5  # Gauss–Newton steps from trained coefficients, and products in a step
ROUNDS_FROM_ZERO = 3
ROUNDS_OF_HEAD, ITERATIONS_OF_HEAD = 3, 20
RATES = (1e-3, 4e-3)  # learning rates of Adam
SEED = 1  # seed of the transforms, of random steps and of untrained parameters
SEEN = 300  # training images of the AGOP
DRAWS = 200  # random matrices


class Split(NamedTuple):
  """The inputs of two linear layers for the n images of a split, and the labels of the images.

  The layers are the head and the output layer of the last stage 2. They are refitted on these inputs.

  Attributes:
    seen: the inputs of both layers. `seen.inputs` is a list of two arrays for the output layer of stage 2: its inputs
      in the trained network, and its inputs if stage 2 has its untrained parameters.
    labels: the classes, int [n].
    targets: the class probabilities in the cross-entropy of the training, float32 [n, classes]. They are smoothed and
      mixed as in training.
  """

  seen: refit.Seen
  labels: np.ndarray
  targets: np.ndarray


def classifier(restored: Restored, workdir: pathlib.Path) -> tuple[ImageClassifier, Classification]:
  """Return the network and the task of a run.

  Args:
    restored: the restored run.
    workdir: the run folder, for the messages of errors.

  Raises:
    UserError: the run is not of task classification, or holds out no images.
  """
  model, task = restored.model, restored.task
  if not (isinstance(task, Classification) and isinstance(model, ImageClassifier)):
    raise UserError(f'{workdir} holds a run of task {restored.config.task}: give a run of task classification')
  if not restored.config.data.validation:
    raise UserError(f'{workdir} holds out no images of train: give a run with data.validation above 0')
  return model, task


def untrained(restored: Restored) -> Any:
  """Return the parameters that the network has at initialization with the run's seed."""
  model, task = classifier(restored, pathlib.Path())
  source = make_splits(task, restored.config.data.validation)['train']
  images, _ = read_many(source, evenly_spaced(len(source), BATCH), task.shape)  # centers may start at tokens
  init = jax.jit(functools.partial(model.init, train=False))
  return init(jax.random.key(restored.config.seed), normalize(jnp.asarray(images), task.mean, task.std))['params']


def read_split(restored: Restored, name: str, most: int, stages: Sequence[Any]) -> Split:
  """Pass the images of a split through the network once, and return the arrays that the refits need.

  Images of the split 'train' are transformed as in training.

  Args:
    restored: the restored run.
    name: name of the split.
    most: greatest number of images.
    stages: a list of other parameters for the last stage 2. The list `Split.seen.inputs` begins with the inputs that
      are computed with the trained parameters. Then it has the inputs that are computed with each item of `stages`.
  """
  model, task = classifier(restored, pathlib.Path())
  source = make_splits(task, restored.config.data.validation)[name]
  images, labels = read_many(source, evenly_spaced(len(source), most), task.shape)
  keys = jax.random.split(jax.random.key(SEED))

  @jax.jit
  def see(params: Any, stages: Any, rows: Any, images: Any, labels: Any) -> tuple[refit.Seen, jax.Array]:
    targets = jax.nn.one_hot(labels, model.classes)
    inputs = normalize(images, task.mean, task.std)
    if name == 'train':
      batch = {'index': rows, 'image': images, 'label': labels, 'step': jnp.asarray(0)}
      inputs, (_, targets) = task.train_batch((keys[0], keys[1]), None, batch)
    return refit.see(model, params, inputs, stages), optax.smooth_labels(targets, task.label_smoothing)

  def of_rows(rows: np.ndarray) -> Any:
    return see(restored.params, stages, rows, images[rows], labels[rows])

  seen, targets = in_batches(of_rows, np.arange(len(images)), BATCH)
  return Split(seen, labels, targets)


def problem(split: Split, tail: refit.Tail, loss: refit.Loss, weights: np.ndarray, inputs: int = 0) -> refit.Problem:
  """Return the loss on the images of a split, as a function of the last stage 2's coefficients and bias.

  Args:
    split: the images.
    tail: the part of the network after the last block.
    loss: the loss of logits against class probabilities.
    weights: the trained coefficients, with the bias as the last row, [A + 1, D]. They give the output of the
      trained stage 2, which is subtracted from the last block's tokens to get `Problem.rest`.
    inputs: an index in `split.seen.inputs`: 0 for the responses of the trained stage 2, 1 for those of the untrained
      one.
  """
  rest = split.seen.tokens - split.seen.inputs[0] @ weights.astype(np.float32)
  return refit.Problem(tail, loss, split.seen.inputs[inputs], rest, split.targets)


def of_head(split: Split, loss: refit.Loss, targets: np.ndarray) -> refit.Problem:
  """Return the loss on the images of a split, as a function of the head's weights and bias.

  Args:
    split: the images.
    loss: the loss of logits against targets.
    targets: the targets, [n, classes].
  """
  rest = np.zeros((len(targets), 1, targets.shape[-1]), np.float32)
  return refit.Problem(refit.no_tail, loss, split.seen.features, rest, targets)


def codes(logits: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
  """Fit class codes to logits by least squares. Return the scale and the offset of the codes.

  The code of a class is the vector scale · (one-hot − 1/classes) + offset. It is fitted to the logits of the images
  of this class. Codes are the targets of refits with the squared loss.

  Args:
    logits: the logits of n images, [n, classes].
    labels: the classes of the images, int [n].
  """
  classes = logits.shape[-1]
  own = logits[np.arange(len(labels)), labels].mean(dtype=np.float64)
  mean = logits.mean(dtype=np.float64)
  return float((own - mean) / (1 - 1 / classes)), float(mean)


def coded(problem: refit.Problem, split: Split, code: tuple[float, float]) -> refit.Problem:
  """Return the problem with another loss: half the squared distance of the logits to the codes of the true classes.

  Args:
    problem: the problem.
    split: its images, with their labels.
    code: the scale and the offset of the codes, as returned by `codes`.
  """
  classes = problem.targets.shape[-1]
  targets = code[0] * (np.eye(classes)[split.labels] - 1 / classes) + code[1]
  return dataclasses.replace(problem, loss=refit.squared, targets=targets.astype(problem.rest.dtype))


def scores(test: refit.Problem, split: Split, weights: np.ndarray) -> dict[str, float]:
  """Return the scores of a network on test images, with other weights in one of its linear layers.

  Args:
    test: the loss on the test images, as a function of the layer's weights.
    split: the test images.
    weights: the weights of the layer, with the bias as the last row.

  Returns:
    'accuracy' in percent, 'nll' (the negative log-likelihood), and 'loss', the cross-entropy against `split.targets`.
  """
  logits = test.logits(weights)
  nll = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), jnp.asarray(split.labels))
  right = logits.argmax(axis=-1) == split.labels
  loss = refit.cross_entropy(jnp.asarray(logits), jnp.asarray(split.targets))
  return {'accuracy': 100 * float(right.mean()), 'nll': float(nll.mean()), 'loss': float(loss.mean())}


class Splits(NamedTuple):
  """Three objects of one kind, such as three problems: one for each split of the data."""

  train: Any
  held_out: Any
  test: Any


def run_refit(
  label: dict[str, str], given: Splits, test: refit.Problem, split: Split, start: np.ndarray, steps: tuple[int, int]
) -> tuple[dict[str, Any], refit.Refit]:
  """Refit a linear layer. Return a row of the study's results, and the result of `hbf.analysis.refit.refit`.

  Args:
    label: entries of the row that tell this refit from others: the layer, its initial weights and the loss.
    given: the loss as a function of the layer's weights, for each split. The loss on the training images is
      minimized. The loss on the held-out images chooses the damping.
    test: the cross-entropy on the test images, as a function of the layer's weights.
    split: the test images.
    start: the weights and the bias of the layer at the start.
    steps: the greatest number of Gauss–Newton steps, and the number of products with the Gauss–Newton matrix in a
      step.
  """
  begin = time.process_time()
  done = refit.refit(given.train, given.held_out, start, *steps)
  row = label | {
    'images': len(given.train.inputs),
    'rounds': [each._asdict() for each in done.rounds],
    'before': given.held_out.value(start),
    'tests': [scores(test, split, weights) for weights in done.weights],
    'operations': len(done.rounds) * given.train.operations(steps[1]),
    'seconds': time.process_time() - begin,
  }
  logging.info('%s: %s', label, {key: row[key] for key in ('before', 'rounds', 'tests', 'operations', 'seconds')})
  return row, done


def by_adam(given: Splits, split: Split, start: np.ndarray, operations: float) -> dict[str, Any]:
  """Minimize the loss over the last stage 2's weights by Adam. Return a row like the rows of `run_refit`.

  Each learning rate in `RATES` is tried, and the result with the least held-out loss is kept. The row counts the
  operations of this result only.

  Args:
    given: the cross-entropy as a function of the layer's weights, for each split.
    split: the test images.
    start: the weights and the bias of the layer at the start.
    operations: the greatest number of operations with one learning rate. It sets the number of epochs, which is at
      least 1.
  """
  begin, each = time.process_time(), given.train.gradient_operations()
  epochs = max(1, int(operations // each))
  found = [refit.descend(given.train, start, rate, epochs, SEED) for rate in RATES]
  losses = [given.held_out.value(weights) for weights in found]
  best = int(np.argmin(losses))
  end = {'damping': None, 'train': given.train.value(found[best]), 'held_out': losses[best]}
  row = {
    'layer': 'stage 2',
    'start': 'zero',
    'loss': 'cross-entropy, by Adam',
    'images': len(given.train.inputs),
    'rate': RATES[best],
    'held_out_by_rate': losses,
    'epochs': epochs,
    'rounds': [end],
    'before': given.held_out.value(start),
    'tests': [scores(given.test, split, weights) for weights in (start, found[best])],
    'operations': epochs * each,
    'seconds': time.process_time() - begin,
  }
  logging.info('%s', row)
  return row


def measure_refits(restored: Restored, most: int) -> list[dict[str, Any]]:
  """Refit the last stage 2 and the head of a run, from several initial weights and with two losses.

  Return a row for each refit. `most` is the greatest number of training images.
  """
  model, _ = classifier(restored, pathlib.Path())
  weights, block = refit.coefficients(model, restored.params), refit.last_block(model)
  stages, begin = [untrained(restored)[block]['stage2']], time.process_time()
  sizes = {'train': most, 'validation': HELD_OUT, 'test': TESTED}
  split = Splits(*(read_split(restored, name, size, stages) for name, size in sizes.items()))
  passed = {
    'pass_operations': len(split.train.labels) * float(flops_per_example(model, restored.task.shape)),
    'pass_seconds': time.process_time() - begin,
  }
  logging.info('%s', passed)
  tail = refit.tail_of(model, restored.params)
  trained, drawn = (
    Splits(*(problem(each, tail, refit.cross_entropy, weights, inputs) for each in split)) for inputs in (0, 1)
  )
  code = codes(trained.train.logits(weights), split.train.labels)
  zero = np.zeros_like(weights)
  base, more = (ROUNDS, ITERATIONS), (ROUNDS_FROM_ZERO, ITERATIONS)
  rows = []

  def add(layer: str, start: str, loss: str, *arguments: Any) -> refit.Refit:
    row, done = run_refit({'layer': layer, 'start': start, 'loss': loss}, *arguments)
    rows.append(row)
    return done

  to_codes = Splits(*(coded(z, each, code) for z, each in zip(trained, split, strict=True)))
  done = add('stage 2', 'trained', 'cross-entropy', trained, trained.test, split.test, weights, base)
  path, step = done.paths[0], done.weights[1] - weights if len(done.weights) > 1 else done.paths[0].step(1.0)
  drawn_step = scores(trained.test, split.test, weights + path.random(step, SEED))
  rows.append({'layer': 'stage 2', 'start': 'trained', 'loss': 'random step', 'tests': [drawn_step]})
  add('stage 2', 'trained', 'squared', to_codes, trained.test, split.test, weights, (1, ITERATIONS))
  add('stage 2', 'zero', 'cross-entropy', trained, trained.test, split.test, zero, more)
  rows.append(by_adam(trained, split.test, zero, rows[-1]['operations']))
  add('stage 2', 'zero, random units', 'cross-entropy', drawn, drawn.test, split.test, zero, more)
  rows += _refit_head(restored, split)
  return [row | passed for row in rows]


def _refit_head(restored: Restored, split: Splits) -> list[dict[str, Any]]:
  """Refit the head of a run, from its trained weights and from weights of 0. Return a row for each refit."""
  head = restored.params['head']
  weights = np.concatenate([np.asarray(head['kernel']), np.asarray(head['bias'])[None]])
  given = Splits(*(of_head(each, refit.cross_entropy, each.targets) for each in split))
  unit = (1.0, 1 / weights.shape[-1])  # codes are one-hot
  to_codes = Splits(*(coded(z, each, unit) for z, each in zip(given, split, strict=True)))
  steps, rows = (ROUNDS_OF_HEAD, ITERATIONS_OF_HEAD), []
  for start, loss, part, first in (
    ('trained', 'cross-entropy', given, weights),
    ('zero', 'cross-entropy', given, np.zeros_like(weights)),
    ('zero', 'squared', to_codes, np.zeros_like(weights)),
  ):
    label = {'layer': 'head', 'start': start, 'loss': loss}
    rows.append(run_refit(label, part, given.test, split.test, first, steps)[0])
  return rows


def measure_agop(restored: Restored) -> list[dict[str, Any]]:
  """Compute correlations of each block's AGOP with matrices of its stage 2, and with random matrices.

  The matrices of a stage 2 are those of `hbf.analysis.agop.feature_matrices`. Return a row for each of them, in the
  trained network and in the network at initialization.
  """
  model, task = classifier(restored, pathlib.Path())
  source = make_splits(task, restored.config.data.validation)['train']
  shown, _ = read_many(source, evenly_spaced(len(source), SEEN), task.shape)
  images = np.asarray(normalize(jnp.asarray(shown), task.mean, task.std))
  start, rows, metric = untrained(restored), [], restored.config.model.stage2.get('metric', '')
  for state, params in (('trained', restored.params), ('untrained', start)):
    for block, outer in agop(model, params, images).items():
      for name, matrix in feature_matrices(params[block]['stage2'], metric).items():
        found = {'agop': correlations(outer, matrix), 'root': correlations(root(outer), matrix)}
        units = _units(params[block]['stage2'])
        draws = random_correlations(outer, units, DRAWS, SEED)
        at_random = {
          key: [float(z) for z in np.quantile(values, (0.025, 0.5, 0.975))] for key, values in draws.items()
        }
        rows.append({'state': state, 'block': block, 'matrix': name, **found, 'random': at_random})
        logging.info('%s', rows[-1])
  return rows


def _units(stage: Any) -> int:
  if 'hidden' in stage:
    return int(stage['hidden']['kernel'].shape[-1])  # in a gated MLP, gates and values count
  return int(np.prod(stage['centers'].shape[:2]))


def measure(workdir: pathlib.Path, most: int) -> dict[str, Any]:
  """Measure the refits and the AGOP of a run.

  Args:
    workdir: folder of a run of task classification that holds out a part of the training images.
    most: greatest number of training images of the refits. 0: no refits.

  Returns:
    A dict with the keys run, model, seed, stage2 (its options), agop and refits. The values of the last two keys are
    lists of rows.

  Raises:
    UserError: the run is not of task classification, holds out no images, or cannot be restored.
  """
  restored = restore(workdir, 'latest', jax.devices()[:1])
  classifier(restored, workdir)
  config = restored.config
  about = {
    'run': workdir.name,
    'model': config.model.name,
    'seed': config.seed,
    'stage2': config.model.stage2.to_dict(),
  }
  return about | {'agop': measure_agop(restored), 'refits': measure_refits(restored, most) if most else []}


def _measure_all(folders: Sequence[pathlib.Path], most: int, record: Record) -> None:
  """Measure the runs. The stored numbers of other runs stay as they are."""
  networks = {network['run']: network for network in (record.stored or {'networks': []})['networks']}
  check_folder_names(folders)
  data = data_of(folders, record)
  for folder in folders:
    found = measure(folder, most)
    if not most:  # keep the refits that are stored
      found['refits'] = networks.get(found['run'], found)['refits']
    networks[found['run']] = found
    record.save(data | {'networks': [*networks.values()]})


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
  """Run the command and return its exit status."""
  study = Study('optimization', draw, tables, keys=('networks',))
  parser = study.parser('hbf.analysis.optimization_study', __doc__, 'a run folder; may be repeated')
  about = 'most training images of the refits; 0: measure no refits, and keep the stored ones'
  parser.add_count('--images', 0, 6_000, about)
  flags = parser.parse_args(arguments)
  return study.run(flags, functools.partial(_measure_all, flags.run, flags.images))


if __name__ == '__main__':
  sys.exit(main())
