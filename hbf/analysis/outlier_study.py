"""Measurement of scores that should tell images of other data sets from test images.

python -m hbf.analysis.outlier_study --run=runs/claim/cifar10-hyperbf-0 --run=runs/claim/cifar10-vit-swiglu-0 …
python -m hbf.analysis.outlier_study --report      # draws the table and the picture again, from stored numbers

Several runs of one model count as its seeds. The numbers of a run are stored as soon as it is measured. A second call
measures only the runs and the data sets that are not stored.

docs/research/outliers.md explains the results.
"""

import functools
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from hbf.analysis import outlier_tokens
from hbf.analysis.image_run import ImageRun
from hbf.analysis.ood_images import MOST, NOISE, load_ood_images
from hbf.analysis.outlier_scores import ClassGaussians, calibrated, class_density, mahalanobis, nearest_features
from hbf.analysis.outlier_tokens import RANKS, TOKENS, Fitted, Scores
from hbf.analysis.report.outlier_report import draw, table
from hbf.analysis.study import Record, Study, check_folder_names, data_of
from hbf.data.pipeline.host import read_many
from hbf.data.pipeline.order import evenly_spaced
from hbf.errors import UserError, in_one_line
from hbf.evaluation.outliers import energy_score, separation, softmax_score
from hbf.training.experiment import make_splits

TRAINING = 20_000  # training images that the scores are fitted to
HELD_OUT = 2_000  # held-out images for the choice of k and the calibration of the blocks' scores
FEATURE_RANKS = (1, 5, 10, 20, 50, 100, 200, 500)  # values of k for the nearest features
OUTSIDE = ('cifar100', 'tiny_imagenet', 'digits')
SCRAMBLED = 'phase-scrambled'
# Classes of Tiny ImageNet that OpenOOD 1.5 (Zhang et al. 2023) leaves out for CIFAR-10, because CIFAR-10 has images
# of such things. OpenOOD's list `test_tin.txt` lacks nearly all images of these classes. It also lacks a few images
# of other classes, but this study uses them.
LIKE_CIFAR10 = (
  'Chihuahua', 'Egyptian cat', 'German shepherd', 'Labrador retriever', 'Persian cat', 'Yorkshire terrier',
  'albatross', 'beach wagon', 'black stork', 'bullfrog', 'convertible', 'golden retriever', 'gondola', 'goose',
  'king penguin', 'lifeboat', 'limousine', 'moving van', 'police van', 'school bus', 'sports car', 'standard poodle',
  'tabby', 'tailed frog',
)  # fmt: skip
SOFTMAX, ENERGY, FEATURES = 'softmax', 'energy', 'k nearest features'
MAHALANOBIS, GAUSSIANS = 'Mahalanobis', 'class Gaussians'


def scrambled(images: np.ndarray, seed: int) -> np.ndarray:
  """Return images with random Fourier phases, uint8. They look like textures.

  This is the random phase noise of Galerne et al. 2011. An image keeps the amplitudes of its frequencies and the mean
  of each channel. The same random phases are added in all channels of an image, which keeps the correlations
  between channels.

  Args:
    images: uint8 [n, height, width, channels].
    seed: seed of the phases.
  """
  noise = np.random.default_rng(seed).normal(size=images.shape[:3])
  phases = np.exp(1j * np.angle(np.fft.fft2(noise, axes=(1, 2))))[..., None]
  phases[:, 0, 0] = 1
  mixed = np.fft.ifft2(np.fft.fft2(images, axes=(1, 2)) * phases, axes=(1, 2)).real
  return np.clip(mixed.round(), 0, 255).astype(np.uint8)


def made_up(images: np.ndarray, seed: int) -> np.ndarray:
  """Return made-up outliers, uint8, as many as there are images.

  Half of them are means of two images. The others are images that are cut into 4 × 4 parts, which are then shuffled.
  Hendrycks et al. (2019, "Outlier Exposure") choose options on such images, so that no real outliers are needed.

  Args:
    images: uint8 [n, height, width, channels]. The sides are at least 4 pixels.
    seed: seed of the pairs of images and of the orders of the parts.
  """
  random, half = np.random.default_rng(seed), len(images) // 2
  first, second = images[:half], images[half:]
  pairs = (first.astype(int) + images[random.permutation(len(images))[:half]]) // 2
  height, width = (side // 4 for side in images.shape[1:3])
  parts = second[:, : 4 * height, : 4 * width].reshape(len(second), 4, height, 4, width, -1).swapaxes(2, 3)
  parts = parts.reshape(len(second), 16, height, width, -1)
  orders = np.argsort(random.random((len(second), 16)), axis=1)
  parts = np.take_along_axis(parts, orders[..., None, None, None], axis=1)
  whole = parts.reshape(len(second), 4, 4, height, width, -1).swapaxes(2, 3)
  jigsaws = second.copy()
  jigsaws[:, : 4 * height, : 4 * width] = whole.reshape(len(second), 4 * height, 4 * width, -1)
  return np.concatenate([pairs.astype(np.uint8), jigsaws])


class Known(NamedTuple):
  """Quantities that the scores need, computed from training and held-out images.

  Attributes:
    tokens: training tokens and their k-means centers, by block.
    features: inputs of the head for training images, [n, F].
    shared: Gaussians of the features of each class, with one covariance for all classes. For the score 'Mahalanobis'.
    own: Gaussians of the features of each class, each with its own covariance. For the score 'class Gaussians'.
    held_out: scores of held-out images.
    rank: the choice of k in two scores. The first number is the k of the score 'k nearest features'. The second
      number selects the k of the score 'k nearest tokens': it is an index in `RANKS`.
  """

  tokens: dict[str, Fitted]
  features: np.ndarray
  shared: ClassGaussians
  own: ClassGaussians
  held_out: Scores
  rank: tuple[int, int]


def learn(run: ImageRun) -> Known:
  """Fit the scores of a run to its training images, and choose their options on held-out images.

  The options are two values of k, for the k nearest features and the k nearest tokens. Each is the value with the
  greatest AUROC between held-out images and made-up outliers.

  Raises:
    UserError: the run holds out no images, or reads fewer than two training images of a class.
  """
  if not run.restored.config.data.validation:
    raise UserError(f'{run.workdir} holds out no images of train: give a run with data.validation above 0')
  images, labels = run.read('train', TRAINING)
  for name, count in zip(run.classes, np.bincount(labels, minlength=len(run.classes)), strict=True):
    if count < 2:  # one image has no covariance
      read = f'{len(images)} training images of {run.workdir}'
      raise UserError(f'{count} of {read} are of class {name}: expected two or more of every class')
  tokens = outlier_tokens.fit(run, images[evenly_spaced(len(images), outlier_tokens.IMAGES)])
  features = outlier_tokens.features(run, images)
  shared, own = (ClassGaussians.fit(features, labels, one_covariance) for one_covariance in (True, False))
  held_out = run.read('validation', HELD_OUT).images
  inside, outside = (outlier_tokens.scores(run, tokens, z) for z in (held_out, made_up(held_out, seed=0)))
  ranks = [k for k in FEATURE_RANKS if k <= len(features)]
  near = [nearest_features(seen.features, features, ranks) for seen in (inside, outside)]
  best = max(ranks, key=lambda k: separation(*(z[k] for z in near)).auroc.value)
  column = max(range(len(RANKS)), key=lambda i: _separated_by_tokens(inside, outside, i)) if tokens else 0
  return Known(tokens, features, shared, own, inside, (best, column))


def _separated_by_tokens(inside: Scores, outside: Scores, column: int) -> float:
  parts = [{block: z[:, column] for block, z in seen.tokens[TOKENS].items()} for seen in (inside, outside)]
  return separation(*(calibrated(part, parts[0]) for part in parts)).auroc.value


def all_scores(run: ImageRun, known: Known, images: np.ndarray) -> dict[str, np.ndarray]:
  """Return a dict from the name of each score to its values [n] for n images.

  A score that comes from tokens is calibrated in each block on held-out images, and then summed over the blocks. The
  dict also has the score of each block alone, without calibration. Its name is 'NAME, BLOCK' if NAME is the name of
  the sum.

  Args:
    run: the run.
    known: the result of `learn` for the run.
    images: uint8 [n, height, width, channels].
  """
  seen, (rank, column) = outlier_tokens.scores(run, known.tokens, images), known.rank
  found = {
    SOFTMAX: softmax_score(seen.logits),
    ENERGY: energy_score(seen.logits),
    FEATURES: nearest_features(seen.features, known.features, [rank])[rank],
    MAHALANOBIS: mahalanobis(known.shared, seen.features),
    GAUSSIANS: class_density(known.own, seen.features),
  }
  for name in seen.tokens:
    parts, reference = (
      {block: z[:, column] if name == TOKENS else z for block, z in scores.tokens[name].items()}
      for scores in (seen, known.held_out)
    )
    found[name] = calibrated(parts, reference)
    found |= {f'{name}, {block}': np.asarray(values, np.float64) for block, values in parts.items()}
  return found


def measure(run: ImageRun, outside: Mapping[str, np.ndarray]) -> dict[str, Any]:
  """Measure how well each score of a run separates test images from images of other data sets.

  Return a row of the study's results: row['scores'][data set][score] has the AUROC and the FPR95.

  Args:
    run: the run.
    outside: images of other data sets by name, uint8 [m, height, width, channels].

  Raises:
    UserError: as in `learn`.
  """
  known = learn(run)
  inside = all_scores(run, known, run.read('test', MOST).images)
  found: dict[str, dict[str, Any]] = {}
  for name, images in outside.items():
    scores = all_scores(run, known, images)
    measures = {score: separation(inside[score], values) for score, values in scores.items()}
    found[name] = {score: {'auroc': vars(z.auroc), 'fpr95': vars(z.fpr95)} for score, z in measures.items()}
  chosen = {'k of features': known.rank[0], 'k of tokens': RANKS[known.rank[1]]}
  counts = {name: len(images) for name, images in outside.items()}
  return run.about() | {'chosen': chosen, 'images': counts, 'scores': found}


def load_outside(run: ImageRun, wanted: Sequence[str]) -> dict[str, np.ndarray]:
  """Return the images that should have lower scores than test images: images of other data sets, textures and noise.

  The result is a dict from the name of each kind to its images, uint8 [m, height, width, channels]. The textures are
  made from test images that are not scored themselves. If there are none, textures are missing.

  Args:
    run: the run.
    wanted: names of data sets, or folders of images.
  """
  near = {'tiny_imagenet': LIKE_CIFAR10} if run.restored.config.data.name == 'cifar10' else {}
  found = load_ood_images(run, wanted, near)
  noise, test = {NOISE: found.pop(NOISE)}, make_splits(run.task, run.restored.config.data.validation)['test']
  others = np.setdiff1d(evenly_spaced(len(test), 2 * MOST), evenly_spaced(len(test), MOST))
  if len(others) < 2:  # an AUROC needs two
    logging.warning('%s: its %d test images are all scored, so there are no textures', run.workdir, len(test))
    return found | noise
  return found | {SCRAMBLED: scrambled(read_many(test, others, run.task.shape)[0], seed=0)} | noise


def add(rows: list[dict[str, Any]], run: ImageRun, outside: Mapping[str, np.ndarray]) -> bool:
  """Measure a run on the data sets that its row does not have yet, and put the numbers into the row.

  Return True if something was measured, False if the row already has all data sets.

  Args:
    rows: the rows that were measured before. The run's row is changed or appended.
    run: the run.
    outside: images of other data sets by name, uint8 [m, height, width, channels].
  """
  number = next((i for i, row in enumerate(rows) if row['run'] == run.workdir.name), len(rows))
  known: Mapping[str, Any] = rows[number] if number < len(rows) else {}
  if not run.about().items() <= known.items():  # numbers of an earlier checkpoint do not belong in the same row
    known = {'scores': {}, 'images': {}}
  missing = {name: images for name, images in outside.items() if name not in known['scores']}
  if not missing:
    return False
  row = measure(run, missing)
  rows[number : number + 1] = [row | {key: known[key] | row[key] for key in ('images', 'scores')}]
  return True


def _measure_all(folders: Sequence[pathlib.Path], outside: Sequence[str], record: Record) -> None:
  """Measure the runs and the data sets whose numbers are not stored."""
  check_folder_names(folders)
  data = data_of(folders, record)
  runs = [ImageRun.of(folder) for folder in folders]
  measured = record.stored or data | {'rows': []}
  for run in runs:
    if add(measured['rows'], run, load_outside(run, outside)):
      record.save(measured)
      logging.info('%s is measured', run.workdir)


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
  """Run the command and return its exit status."""
  study = Study('outliers', draw, table)
  parser = study.parser('hbf.analysis.outlier_study', __doc__, 'a run folder; may be repeated')
  about = f'a prepared data set or a folder of images; may be repeated; default: {", ".join(OUTSIDE)}'
  parser.add_argument('--outside', action='append', default=[], help=about)
  flags = parser.parse_args(arguments)
  return study.run(flags, functools.partial(_measure_all, flags.run, flags.outside or OUTSIDE))


if __name__ == '__main__':
  sys.exit(main())
