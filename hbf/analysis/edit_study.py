"""Measurement of edits by HyperBF balls, ReLU neurons, a lookup table, updates of the head, and fine-tuning.

python -m hbf.analysis.edit_study --run=runs/claim/cifar10-hyperbf-0 --run=runs/claim/cifar10-vit-swiglu-0 …
python -m hbf.analysis.edit_study --report         # draws the table and the picture again, from stored numbers

docs/research/edit.md explains the results.
"""

import functools
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

from hbf.analysis.edit_methods import METHODS, Base, Method, Trial, in_order
from hbf.analysis.report.edit_report import draw, table
from hbf.analysis.study import Record, Study, data_of
from hbf.data.augment.batches import normalize
from hbf.data.augment.transforms import read_transforms
from hbf.data.pipeline.host import read_many
from hbf.data.pipeline.order import evenly_spaced
from hbf.editing.edit import training_images
from hbf.editing.guard import Reader, copies, measure_metric, moves
from hbf.errors import UserError, in_one_line
from hbf.evaluation.batches import in_batches
from hbf.models.edited import Observed
from hbf.tasks.classification import Classification
from hbf.training.experiment import make_splits
from hbf.training.restore import Restored, restore
from hbf.training.workdir import load_config

COPIES = 20  # copies of each edited image, which the methods do not see
CHANGED = 0.2  # greatest share of the other images whose answers one edit may change, in percent
KEPT = 99.0  # least accuracy that many edits must leave on images that are never edited, in percent
EDITS = (1, 10, 100, 1_000)
# Numbers of images for fine-tuning on single images: in the result, in a trial, and other images to measure damage.
TUNED, TUNED_IN_TRIALS, OTHERS = 200, 20, 1_000
STEPS = 101  # most steps of fine-tuning on an image
RATES = tuple(float(rate) for rate in np.logspace(-4.5, 1, 12))
FINE_TUNING = 'fine-tuning of all parameters'


class Split(NamedTuple):
  """The images of a split, and transformed copies of the misclassified images.

  Attributes:
    images: all images, uint8 [n, H, W, C].
    seen: the classifier's outputs for all images.
    labels: the true classes [n].
    wrong: indices of the misclassified images, int [m].
    copied: `COPIES` copies of each misclassified image, uint8 [m, COPIES, H, W, C].
    copies: the classifier's outputs for the copies, [m · COPIES, …].
  """

  images: np.ndarray
  seen: Observed
  labels: np.ndarray
  wrong: np.ndarray
  copied: np.ndarray
  copies: Observed


def open_split(restored: Restored, name: str, seed: int) -> Split:
  """Load a split of a run, and make transformed copies of the misclassified images.

  The copies show whether an edit generalizes. So no method of editing uses them.

  Args:
    restored: the restored run.
    name: name of the split.
    seed: seed of the copies.

  Raises:
    UserError: the classifier makes no mistake.
  """
  config, task = restored.config, restored.task
  source = make_splits(task, config.data.validation)[name]
  images, labels = read_many(source, np.arange(len(source)), task.shape)
  reader = Reader.of(restored.model, restored.params, restored.task)
  seen = reader(images)
  wrong = np.flatnonzero(seen.logits.argmax(axis=-1) != labels)
  if not len(wrong):
    raise UserError(f'all {len(labels):,} images of {name} are answered right, so none is edited: give another run')
  entries = moves(read_transforms(config.data.transforms), task.shape[0])
  copied = copies(images[wrong], entries, COPIES, seed)
  return Split(images, seen, labels, wrong, copied, reader(copied.reshape(-1, *task.shape)))


def open_base(restored: Restored) -> Base:
  """Load the guarded examples of a run, which are training images, and compute the metric from copies of them."""
  reader = Reader.of(restored.model, restored.params, restored.task)  # raises if the run is not on images
  assert isinstance(restored.task, Classification)
  images, _ = training_images(restored.task, restored.config.data.validation)
  return Base(reader(images), measure_metric(reader, images, read_transforms(restored.config.data.transforms)))


def alone(method: Method, trial: Trial, base: Base, split: Split) -> dict[str, np.ndarray]:
  """Edit the network for each of the m misclassified images alone, and measure each edited network.

  Returns:
    Arrays [m] in percent. 'edited': 100 if the edited image's answer is right after the edit, else 0. 'copies': share
    of the image's transformed copies with a right answer. 'changed': share of all other images of the split whose
    answers change.
  """
  edited, labels = split.seen.at(split.wrong), split.labels[split.wrong]
  changes = method.changes(edited, labels, trial.margin)
  answers, found = split.seen.logits.argmax(axis=-1), []
  for start in range(0, len(labels), 100):
    part = slice(start, start + 100)
    respond = functools.partial(method.respond, base, edited.at(part), labels[part])
    of_all = respond(split.seen, trial.reach)
    copied = split.copies.at(slice(start * COPIES, (start + 100) * COPIES))
    of_copies = respond(copied, trial.reach)
    for i, (change, label, row) in enumerate(zip(changes[part], labels[part], split.wrong[part], strict=True)):
      now = (split.seen.logits + of_all[i][:, None] * change).argmax(axis=-1)
      own = slice(i * COPIES, (i + 1) * COPIES)
      right = (copied.logits[own] + of_copies[i, own][:, None] * change).argmax(axis=-1) == label
      others = (now != answers).sum() - (now[row] != answers[row])
      found.append((now[row] == label, right.mean(), others / (len(answers) - 1)))
  return dict(zip(('edited', 'copies', 'changed'), 100 * np.array(found).T, strict=True))


def tried(method: Method, base: Base, split: Split) -> list[dict[str, float]]:
  """Try each choice of a method's options (`Method.trials`), and return its scores in percent.

  Returns:
    A dict for each choice of options. It has the options and five scores. 'edited', 'copies' and 'changed' are the
    means of the results of `alone`. 'many_copies' and 'many_others' are the scores 'copies' and
    'others' in the last dict that `many` returns.
  """
  found = []
  for trial in method.trials:
    means = {name: float(values.mean()) for name, values in alone(method, trial, base, split).items()}
    end = many(method, trial, base, split)[-1]
    found.append(trial._asdict() | means | {'many_copies': end['copies'], 'many_others': end['others']})
  return found


def best_alone(scores: Sequence[Mapping[str, float]]) -> int:
  """Return the index of the choice of options that is best for single edits, from the result of `tried`.

  A choice is allowed if it changes at most `CHANGED` percent of the answers to other images. The best allowed choice
  has the most copies with a right answer. If no choice is allowed, the best one changes the fewest answers.
  """
  allowed = [i for i, score in enumerate(scores) if score['changed'] <= CHANGED]
  if allowed:
    return max(allowed, key=lambda i: scores[i]['copies'])
  return min(range(len(scores)), key=lambda i: scores[i]['changed'])


def best_of_many(scores: Sequence[Mapping[str, float]]) -> int:
  """Return the index of the choice of options that is best for many edits, from the result of `tried`.

  A choice is allowed if the accuracy on images that are never edited is at least `KEPT` percent after the edits. The
  best allowed choice has the most copies with a right answer. If no choice is allowed, the best one has the highest
  accuracy.
  """
  allowed = [i for i, score in enumerate(scores) if score['many_others'] >= KEPT]
  if allowed:
    return max(allowed, key=lambda i: scores[i]['many_copies'])
  return max(range(len(scores)), key=lambda i: scores[i]['many_others'])


# Arguments: 'seen' for the images of a split or 'copies' for their copies, and row numbers. Result: logits [n, C].
LogitsOf = Callable[[str, np.ndarray], np.ndarray]


def many(method: Method, trial: Trial, base: Base, split: Split) -> list[dict[str, float]]:
  """Edit the first misclassified images one after the other, and keep all edits.

  Return a dict of scores (`_after`) for each number of edits in `counts(split)`.
  """
  found = []
  for count in counts(split):
    rows = split.wrong[:count]
    logits_of = in_order(method, base, split.seen.at(rows), split.labels[rows], trial)
    found.append(_after(functools.partial(_of_rows, logits_of, split), split, count))
  return found


def counts(split: Split) -> list[int]:
  """Return the numbers of edits after which the scores are measured.

  They are the numbers in `EDITS`. Those above the number of misclassified images are replaced by that number.
  """
  return sorted({min(count, len(split.wrong)) for count in EDITS})


def _of_rows(logits_of: Callable[[Observed], np.ndarray], split: Split, which: str, rows: np.ndarray) -> np.ndarray:
  return logits_of(getattr(split, which).at(rows))


def _after(logits_of: LogitsOf, split: Split, count: int) -> dict[str, float]:
  """Return the scores after edits of the first `count` misclassified images, in percent.

  Args:
    logits_of: the edited network.
    split: the images.
    count: number of edits.

  Returns:
    'edits': number of edits. 'edited': share of the edited images with a right answer. 'copies': share of their
    copies with a right answer. 'others': accuracy on images that are never edited, which are all but the first 1,000
    misclassified images. 'others_before': accuracy on these images without edits.
  """
  rows, kept = split.wrong[:count], np.setdiff1d(np.arange(len(split.labels)), split.wrong[: EDITS[-1]])

  def right(which: str, rows: np.ndarray, labels: np.ndarray) -> float:
    return 100 * float((logits_of(which, rows).argmax(axis=-1) == labels).mean())

  return {
    'edits': count,
    'edited': right('seen', rows, split.labels[rows]),
    'copies': right('copies', np.arange(count * COPIES), np.repeat(split.labels[rows], COPIES)),
    'others': right('seen', kept, split.labels[kept]),
    'others_before': 100 * float((split.seen.logits[kept].argmax(axis=-1) == split.labels[kept]).mean()),
  }


def descend(loss: Callable[[Any], tuple[jax.Array, jax.Array]], params: Any, rate: Any) -> Any:
  """Take gradient steps until all answers are right, but at most `STEPS` steps. Return the new parameters.

  Args:
    loss: function of the parameters. It returns the loss, and True if all answers are right.
    params: the parameters to start from.
    rate: the learning rate.
  """

  def step(state: Any) -> Any:
    params, _, number = state
    gradient, right = jax.grad(loss, has_aux=True)(params)
    rate_now = jnp.where(right, 0.0, rate)
    return jax.tree.map(lambda p, g: p - rate_now * g, params, gradient), right, number + 1

  return jax.lax.while_loop(lambda state: ~state[1] & (state[2] < STEPS), step, (params, jnp.array(False), 0))[0]


class FineTuning:
  """Fine-tuning of all parameters on one image, until the answer to this image is right or for `STEPS` steps."""

  def __init__(self, restored: Restored) -> None:
    reader = Reader.of(restored.model, restored.params, restored.task)
    self._params, mean, std = reader.params, reader.mean, reader.std

    def logits(params: Any, images: jax.Array) -> jax.Array:
      return jnp.asarray(reader.model.apply({'params': params}, normalize(images, mean, std), train=False))

    def loss(params: Any, image: jax.Array, label: jax.Array) -> tuple[jax.Array, jax.Array]:
      z = logits(params, image[None])
      return optax.softmax_cross_entropy_with_integer_labels(z, label[None]).mean(), z[0].argmax() == label

    def tuned(params: Any, image: jax.Array, label: jax.Array, rate: jax.Array) -> Any:
      return descend(lambda params: loss(params, image, label), params, rate)

    self._logits, self._tuned = jax.jit(logits), jax.jit(tuned)

  def logits(self, params: Any, images: np.ndarray) -> np.ndarray:
    """Return the logits [n, C] of uint8 images [n, H, W, channels]."""
    return np.asarray(in_batches(lambda batch: self._logits(params, batch), images))

  def alone(self, rate: float, split: Split, count: int) -> dict[str, np.ndarray]:
    """Fine-tune the trained network on each of the first `count` misclassified images alone, and measure the results.

    Returns:
      Arrays [count] in percent. 'edited': 100 if the answer to the image becomes right, else 0. 'copies': share of
      its copies with a right answer. 'changed': share of at most `OTHERS` other images whose answers change.
    """
    others = evenly_spaced(len(split.images), OTHERS)
    before, found = split.seen.logits[others].argmax(axis=-1), []
    for i, row in enumerate(split.wrong[:count]):
      label = split.labels[row]
      params = self._tuned(self._params, split.images[row], label, rate)
      own = self.logits(params, np.concatenate([split.images[[row]], split.copied[i]])).argmax(axis=-1)
      now = self.logits(params, split.images[others]).argmax(axis=-1)
      changed = (now != before)[others != row].mean()
      found.append((own[0] == label, (own[1:] == label).mean(), changed))
    return dict(zip(('edited', 'copies', 'changed'), 100 * np.array(found).T, strict=True))

  def tried(self, split: Split) -> list[dict[str, float]]:
    """Return a dict for each learning rate: 'rate', and the means of `FineTuning.alone` in percent."""
    return [
      {'rate': rate} | {name: float(z.mean()) for name, z in self.alone(rate, split, TUNED_IN_TRIALS).items()}
      for rate in RATES
    ]

  def many(self, rate: float, split: Split) -> list[dict[str, float]]:
    """Fine-tune on the first misclassified images one after the other, and keep all changes.

    Return a dict of scores (`_after`) for each number of images in `counts(split)`.
    """
    params, rows = self._params, []
    for number, row in enumerate(split.wrong[: EDITS[-1]], 1):
      params = self._tuned(params, split.images[row], split.labels[row], rate)
      if number in counts(split):
        rows.append(_after(functools.partial(self._of_rows, params, split), split, number))
    return rows

  def _of_rows(self, params: Any, split: Split, which: str, rows: np.ndarray) -> np.ndarray:
    images = split.images if which == 'seen' else split.copied.reshape(-1, *split.images.shape[1:])
    return self.logits(params, images[rows])


def measure(workdir: pathlib.Path, options: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
  """Measure all methods on a run. Return a row for the classifier without edits, then a row for each method.

  A method's row has the options that were tried, the indices of the best ones, and the scores for single and for many
  edits.

  Args:
    workdir: folder of a run of task classification with a validation split.
    options: the results of `tried` for each method, from an earlier run of the same model. If `options` is empty, the
      results are measured on the validation split and added to it, so that later runs have the same options.

  Raises:
    UserError: the run holds out no images, or cannot be restored (`hbf.training.restore.restore`).
  """
  restored = restore(workdir, 'latest', jax.devices()[:1])
  if not restored.config.data.validation:
    raise UserError(f'{workdir} holds out no images of train: give a run with data.validation above 0')
  base, test = open_base(restored), open_split(restored, 'test', seed=1)
  about = {'model': restored.config.model.name, 'seed': restored.config.seed, 'images': len(test.images)}
  about['wrong'] = len(test.wrong)
  tuning = FineTuning(restored)
  if not options:
    held_out = open_split(restored, 'validation', seed=2)
    options |= {name: tried(method, base, held_out) for name, method in METHODS.items()}
    options[FINE_TUNING] = tuning.tried(held_out)
  right = 100 * float((test.copies.logits.argmax(-1) == np.repeat(test.labels[test.wrong], COPIES)).mean())
  rows = [about | {'method': 'no edit', 'alone': {'edited': 0.0, 'copies': right, 'changed': 0.0}, 'many': []}]
  for name, trials in options.items():
    best = best_alone(trials)
    if name == FINE_TUNING:
      last = best  # many edits have the learning rate that is best for single edits
      scores, after = tuning.alone(RATES[best], test, TUNED), tuning.many(RATES[best], test)
    else:
      method, last = METHODS[name], best_of_many(trials)
      scores, after = alone(method, method.trials[best], base, test), many(method, method.trials[last], base, test)
    means = {key: float(values.mean()) for key, values in scores.items()}
    chosen = {'trials': trials, 'best': best, 'best_of_many': last}
    rows.append(about | {'method': name} | chosen | {'alone': means, 'many': after})
    logging.info('%s, %s: %s, %s', workdir, name, means, after[-1])
  return rows


def _measure_all(folders: Sequence[pathlib.Path], record: Record) -> None:
  options: dict[str, Any] = {}
  rows: list[dict[str, Any]] = []
  data = data_of(folders)
  for folder in folders:
    rows += measure(folder, options.setdefault(load_config(folder).model.name, {}))
  record.save(data | {'rows': rows})


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
  """Run the command and return its exit status."""
  study = Study('edit', draw, table)
  about = "a run folder; may be repeated. A model's first run chooses the options"
  flags = study.parser('hbf.analysis.edit_study', __doc__, about).parse_args(arguments)
  return study.run(flags, functools.partial(_measure_all, flags.run))


if __name__ == '__main__':
  sys.exit(main())
