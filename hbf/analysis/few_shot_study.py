"""Measurement of learning new classes from few images, and of forgetting in training on tasks one after the other.

python -m hbf.analysis.few_shot_study                # trains networks on CIFAR-100 and CIFAR-10: an hour on a CPU
python -m hbf.analysis.few_shot_study --report       # draws the table and the picture again, from stored numbers

The classes of CIFAR-100 are divided into base classes and new classes. A network is trained on the base classes. Then
it learns the new classes in sessions of `SESSION` classes, from `SHOTS` images of each class.

docs/research/few-shot.md explains the results.
"""

import argparse
import functools
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from ml_collections import ConfigDict
from rich.console import Console

from hbf.analysis import split_cifar
from hbf.analysis.few_shot_methods import METHODS, Labeled, Method, Scores, Trial, sessions
from hbf.analysis.report import few_shot_report
from hbf.analysis.split_cifar import Pair, Splits
from hbf.analysis.study import Record, Study
from hbf.config.datasets import get_config
from hbf.data.augment.batches import normalize
from hbf.data.datasets import from_arrays, load
from hbf.data.images.arrays import ArrayData
from hbf.data.pipeline.host import read_many
from hbf.editing.guard import Reader
from hbf.errors import UserError, in_one_line
from hbf.evaluation.batches import in_batches
from hbf.models.edited import observe
from hbf.training.experiment import make_splits
from hbf.training.loop import train
from hbf.training.restore import Restored, restore

MODELS = ('hyperbf', 'vit')
SEED = 0  # of the networks, and of the draw of the base classes
BASE, SESSION, SHOTS = 60, 5, 5  # base classes, new classes of a session, images of a new class
PRETENDED = 25  # base classes that act as new classes when options are chosen
READ = 100  # images of a base class that the methods read
EPOCHS = 2.0
STEPS = 10  # steps of fine-tuning in a session
TESTED, JUDGED = 20, 12  # images of a class, test and held-out, that measure fine-tuning
RATES = tuple(float(rate) for rate in np.logspace(-3.5, 0.5, 12))
FINE_TUNING, NONE = 'fine-tuning of all parameters', 'base classes only'
HIDDEN = -1e4  # bias of a class that is not learned yet


class Parts(NamedTuple):
  """Four sets of images. Each is a pair of images and labels, or a `Labeled`.

  Attributes:
    base: the training images of the base classes.
    held_out: images of the base classes that are held out for the choice of options.
    new: the few images of the new classes, sorted by class.
    test: test images of all classes.
  """

  base: Any
  held_out: Any
  new: Any
  test: Any


def read_images(data_dir: str, name: str) -> Splits:
  """Return the images and the labels of the data set `name`, by split."""
  dataset = load(name=name, dir=data_dir, root='', image_size=0, download=False)
  return {
    split: read_many(source, np.arange(len(source)), dataset.image_shape) for split, source in dataset.splits.items()
  }


def base_data(images: Splits) -> ArrayData:
  """Return the images of the base classes as a data set."""
  (x_train, y_train), (x_test, y_test) = (
    [z[labels < BASE] for z in (x, labels)] for x, labels in (images['train'], images['test'])
  )
  return ArrayData(x_train, y_train, x_test, y_test, [str(number) for number in range(BASE)])


def make_config(model: str, seed: int) -> ConfigDict:
  """Return the config of a network: recipe laptop with two resolutions and Muon, as in docs/research/claim.md."""
  config = get_config(f'arrays:model={model},recipe=laptop')
  config.seed = seed
  config.model.update(width=48, merge=(2,))
  if model == 'vit':
    config.model.stage2.activation = 'gelu'
  config.optimizer.update(name='muon', learning_rate=12e-3)
  config.train.epochs = EPOCHS
  config.data.validation = 0.05
  config.log.units = False
  return config


def trained(model: str, seed: int, images: Splits, folder: pathlib.Path) -> Restored:
  """Train a network on the base classes, unless the run folder already has it. Return the trained network.

  Raises:
    UserError: a signal stopped the training.
  """
  data = from_arrays(base_data(images))
  if train(make_config(model, seed), folder, Console(quiet=True), jax.devices()[:1], dataset=data) is None:
    raise UserError('a signal stopped the training: run the command again')
  return restore(folder, 'latest', jax.devices()[:1], dataset=data)


def few_images(labels: np.ndarray, seed: int, count: int = SHOTS) -> np.ndarray:
  """Return the indices of `count` random images of each class, sorted by class."""
  order = np.random.default_rng(seed).permutation(len(labels))
  return np.concatenate([order[labels[order] == label][:count] for label in np.unique(labels)])


def pretended(base: Labeled, seed: int) -> tuple[Labeled, Labeled]:
  """Return two parts of the base images, so that options can be chosen without images of the new classes.

  The last `PRETENDED` base classes act as new classes. The second part has `SHOTS` images of each of them. The first
  part has all images of the other classes.
  """
  known = BASE - PRETENDED
  few = few_images(base.labels, seed)
  return known_only(base.below(known)), known_only(base.where(few[base.labels[few] >= known]))


def known_only(images: Labeled) -> Labeled:
  """Return images without the logits of the base classes that act as new classes in `pretended`."""
  return images._replace(seen=images.seen._replace(logits=images.seen.logits[:, : BASE - PRETENDED]))


def accuracy(scores: np.ndarray, labels: np.ndarray) -> float:
  """Return the share of right answers in percent. The answer is the class of the greatest score."""
  return 100 * float((scores.argmax(axis=1) == labels).mean())


def after_session(scores: Scores, test: Labeled, known: int) -> dict[str, float]:
  """Return the results of `of_scores` for the test images of the first `known` classes.

  The function `scores` returns scores for these classes only, so they are the possible answers.
  """
  seen = test.below(known)
  return of_scores(scores(seen.seen), seen.labels)


def of_scores(scores: np.ndarray, labels: np.ndarray) -> dict[str, float]:
  """Return the accuracies in percent of n images with scores [n, classes].

  Returns:
    'all': on all images. 'base': on images of base classes. 'new': on the other images, if there are any.
  """
  is_base = labels < BASE
  parts = {'all': labels >= 0, 'base': is_base, 'new': ~is_base}
  return {name: accuracy(scores[rows], labels[rows]) for name, rows in parts.items() if rows.any()}


def chosen(seen: Parts, seed: int) -> dict[str, dict[str, Any]]:
  """Choose the options of each closed-form method without images of the new classes.

  A method learns the base classes that act as new classes in `pretended(seen.base, seed)`. Its accuracy is measured
  on `seen.held_out`, the held-out images of the base classes.

  Returns:
    For each method: 'trials', which are options with their accuracy, and 'best', the index of the best one.
  """
  (base, new), judged = pretended(seen.base, seed), known_only(seen.held_out)
  found: dict[str, dict[str, Any]] = {}
  for name, entry in METHODS.items():
    method = entry.method(base)
    trials = [
      {**trial, 'accuracy': accuracy(method.learn(new, trial)(judged.seen), judged.labels)} for trial in entry.trials
    ]
    best = int(np.argmax([trial['accuracy'] for trial in trials]))
    found[name] = {'trials': trials, 'best': best}
    logging.info('%s: %s', name, trials[best])
  return found


class FineTuning:
  """Fine-tuning of all parameters, in one session after the other. A session adds `SESSION` new classes.

  The head has all classes from the start. A class that is not learned yet is hidden: its bias is −10,000. When a
  session begins, the weights of each of its classes become the mean feature of the images of the class. They are
  scaled to the mean norm of the weights of all earlier classes (Qi et al. 2018, "Low-shot learning with imprinted
  weights").
  """

  def __init__(self, restored: Restored, classes: int) -> None:
    """Prepare the network with a head for `classes` classes: the base classes and all new ones."""
    self._reader, self._classes = Reader.of(restored.model, restored.params, restored.task), classes
    model, mean, std = self._reader.model.clone(classes=classes), self._reader.mean, self._reader.std

    def logits(params: Any, images: jax.Array) -> jax.Array:
      return jnp.asarray(model.apply({'params': params}, normalize(images, mean, std), train=False))

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
      return optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels).mean()

    @jax.jit
    def tuned(params: Any, images: jax.Array, labels: jax.Array, rate: Any) -> Any:
      def step(params: Any, _: Any) -> tuple[Any, None]:
        gradient = jax.grad(loss)(params, images, labels)
        return jax.tree.map(lambda p, g: p - rate * g, params, gradient), None

      return jax.lax.scan(step, params, None, STEPS)[0]

    self._logits, self._tuned = jax.jit(logits), tuned
    self._features = jax.jit(lambda params, images: observe(model, params, normalize(images, mean, std)).features)

  def start(self, known: int) -> Any:
    """Return the parameters with a head for all classes, in which all but the first `known` classes are hidden.

    A hidden class has the bias −10,000, so that it is never the answer.
    """
    params = dict(self._reader.params)
    kernel, bias = (np.array(params['head'][name])[..., :known] for name in ('kernel', 'bias'))
    more = self._classes - known
    head = {'kernel': np.pad(kernel, ((0, 0), (0, more))), 'bias': np.pad(bias, (0, more), constant_values=HIDDEN)}
    return params | {'head': {name: jnp.asarray(value) for name, value in head.items()}}

  def learn(self, params: Any, images: np.ndarray, labels: np.ndarray, known: int, rate: float) -> Any:
    """Return the parameters after fine-tuning on the images of a session, before which there were `known` classes."""
    kernel, bias = (np.array(params['head'][name]) for name in ('kernel', 'bias'))
    features = np.asarray(self._features(params, images))
    means = np.stack([features[labels == label].mean(axis=0) for label in np.unique(labels)])
    norm = np.linalg.norm(kernel[:, :known], axis=0).mean()
    own = slice(known, known + len(means))
    kernel[:, own] = norm * means.T / np.linalg.norm(means, axis=1)
    bias[own] = bias[:known].mean()
    head = {'kernel': jnp.asarray(kernel), 'bias': jnp.asarray(bias)}
    return self._tuned(params | {'head': head}, images, labels, rate)

  def logits(self, params: Any, images: np.ndarray) -> np.ndarray:
    """Return the logits [n, classes] of uint8 images [n, H, W, channels]."""
    return np.asarray(in_batches(lambda batch: self._logits(params, batch), images))

  def after_sessions(self, known: int, images: np.ndarray, labels: np.ndarray, rate: float) -> Iterator[Any]:
    """Yield the parameters before the first session and after each session.

    The sessions learn the classes `known`, `known` + 1, and so on. `images` are images of these classes, sorted by
    class.
    """
    params = self.start(known)
    yield params
    for first in range(known, int(labels.max()) + 1, SESSION):
      rows = (labels >= first) & (labels < first + SESSION)
      params = self.learn(params, images[rows], labels[rows], first, rate)
      yield params


def chosen_rate(restored: Restored, images: Parts, seed: int) -> dict[str, Any]:
  """Choose the learning rate of fine-tuning. The choice does not use images of the new classes.

  Fine-tuning learns the base classes that act as new classes in `pretended`. Its accuracy is measured on held-out
  images of all base classes.

  Returns:
    'trials', which are learning rates with their accuracy, and 'best', the index of the best one.
  """
  (x, labels), held_out = images.base, thinned(images.held_out, JUDGED)
  few = few_images(labels, seed)
  few = few[labels[few] >= BASE - PRETENDED]
  tuning, trials = FineTuning(restored, BASE), []
  for rate in RATES:
    *_, params = tuning.after_sessions(BASE - PRETENDED, x[few], labels[few], rate)
    trials.append({'rate': rate, 'accuracy': accuracy(tuning.logits(params, held_out[0]), held_out[1])})
  return {'trials': trials, 'best': int(np.argmax([trial['accuracy'] for trial in trials]))}


def thinned(images: Pair, count: int) -> Pair:
  """Return `count` random images of each class, sorted by class."""
  rows = few_images(images[1], 0, count)
  return images[0][rows], images[1][rows]


def fine_tuned(tuning: FineTuning, images: Parts, rate: float) -> list[dict[str, float]]:
  """Fine-tune in each session. Return the accuracies before the first session and after each session."""
  (x, labels), after = thinned(images.test, TESTED), []
  for number, params in enumerate(tuning.after_sessions(BASE, images.new[0], images.new[1], rate)):
    rows = labels < BASE + SESSION * number
    after.append(of_scores(tuning.logits(params, x[rows]), labels[rows]))
  return after


def with_new(images: Splits, parts: Parts, draw: int) -> Parts:
  """Return `parts` with its fields `new` and `test` filled in.

  The seed `draw` determines the order of the new classes and the `SHOTS` training images of each.
  """
  (x, y), (x_test, y_test) = images['train'], images['test']
  order = np.random.default_rng(draw).permutation(np.arange(BASE, int(y.max()) + 1))
  number = np.concatenate([np.arange(BASE), order]).astype(np.int32)
  few = few_images(number[y], draw)
  few = few[y[few] >= BASE]
  return parts._replace(new=(x[few], number[y[few]]), test=(x_test, number[y_test]))


def measure(model: str, images: Splits, folder: pathlib.Path, draws: int) -> list[dict[str, Any]]:
  """Train a network on the base classes, and measure all methods. Return a row for each method and draw.

  Fine-tuning is measured for the first draw only.

  Args:
    model: the name of the network.
    images: the images of all classes.
    folder: the run folder of the network.
    draws: number of draws. Each has another random order of the new classes, and other images of them.
  """
  images = split_cifar.renamed(images, SEED)
  restored = trained(model, SEED, images, folder)
  splits = {
    name: read_many(source, np.arange(len(source)), restored.task.shape)
    for name, source in make_splits(restored.task, restored.config.data.validation).items()
  }
  parts = Parts(thinned(splits['train'], READ), splits['validation'], None, None)
  reader = Reader.of(restored.model, restored.params, restored.task)
  base, held_out = (Labeled(reader(x), labels) for x, labels in (parts.base, parts.held_out))
  test = reader(images['test'][0])
  options = chosen(Parts(base, held_out, None, None), SEED)
  options[FINE_TUNING] = chosen_rate(restored, parts, SEED)
  tuning, rows = FineTuning(restored, int(images['train'][1].max()) + 1), []
  for draw in range(draws):
    drawn = with_new(images, parts, draw)
    seen = Parts(base, held_out, Labeled(reader(drawn.new[0]), drawn.new[1]), Labeled(test, drawn.test[1]))
    after = {NONE: [after_session(lambda seen: seen.logits, seen.test, BASE)]}
    for name, entry in METHODS.items():
      after[name] = in_sessions(entry.method(base), seen, entry.trials[options[name]['best']])
    if not draw:
      after[FINE_TUNING] = fine_tuned(tuning, drawn, RATES[options[FINE_TUNING]['best']])
    rows += [
      {'model': model, 'draw': draw, 'method': name, 'sessions': found, **options.get(name, {})}
      for name, found in after.items()
    ]
    logging.info('%s, draw %d: %s', model, draw, {name: found[-1] for name, found in after.items()})
  return rows


def in_sessions(method: Method, seen: Parts, trial: Trial) -> list[dict[str, float]]:
  """Return the accuracies of a method before the first session and after each session."""
  return [
    after_session(method.learn(new, trial), seen.test, BASE + SESSION * number)
    for number, new in enumerate(sessions(seen.new, BASE, SESSION))
  ]


def _measure_all(flags: argparse.Namespace, record: Record) -> None:
  stored = record.stored or {}
  few, split, options = ([*stored.get(key, [])] for key in ('rows', 'split', 'options'))

  def of_model(model: str) -> None:
    if model not in {row['model'] for row in few}:
      images = read_images(flags.data_dir, 'cifar100')
      few.extend(measure(model, images, flags.out / 'runs' / model, flags.draws))

  def of_seed(seed: int) -> None:
    if seed not in {row['seed'] for row in split}:
      images = read_images(flags.data_dir, 'cifar10')
      options.extend([] if options else split_cifar.choose(images))
      split.extend(split_cifar.measure(images, options, seed))

  models = [functools.partial(of_model, model) for model in MODELS]
  seeds = [functools.partial(of_seed, seed) for seed in range(flags.seeds)]
  # Each job is stored, so that an interrupted measurement goes on.
  for job in (*models[:1], *seeds[:1], *models[1:], *seeds[1:]):
    job()
    record.save({'rows': few, 'split': split, 'options': options})


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
  """Run the command and return its exit status."""
  study = Study('few-shot', few_shot_report.draw, few_shot_report.tables, keys=('rows', 'split', 'options'))
  parser = study.parser('hbf.analysis.few_shot_study', __doc__)
  parser.add_argument('--data_dir', default='~/tensorflow_datasets', help='TFDS folder with CIFAR-10 and CIFAR-100')
  parser.add_count('--draws', 1, 5, 'number of draws of the new images')
  parser.add_count('--seeds', 1, 3, 'number of seeds of Split CIFAR-10')
  flags = parser.parse_args(arguments)
  return study.run(flags, functools.partial(_measure_all, flags))


if __name__ == '__main__':
  sys.exit(main())
