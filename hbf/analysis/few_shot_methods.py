"""Methods that add classes to a trained classifier from few images, in closed form, for a comparison.

A method works on the features of images, which are the inputs of the classifier's head. The layers before the head do
not change. A method gets the training images of B base classes once, and then the images of N new classes. Its result
is a score for each of the B + N classes. A trial is a choice of a method's options. The methods:

    nearest class mean     the score is minus the squared distance to the mean of a class, or a cosine
    random ReLU features   ridge regression on relu(x R) with a random matrix R (ACIL, RanPAC)
    Gaussian kernels       ridge regression on Gaussians around random base images (GKEAL)
    HyperBF                ridge regression on Gaussians around random base images and around all new images
    HyperBF beside head    the head stays. Gaussians around the new images give the logits of the new classes
    head and centers       the head stays. A new class wins if its mean is nearer than that of the head's answer

Distances are Euclidean, or in the metric of the base classes. In this metric, the features of base images of the same
class are near to each other (`hbf.editing.guard.metric_of_classes`).
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from hbf.analysis.rows import of_norm_1, squared
from hbf.editing.guard import RIDGE, metric_of_classes
from hbf.models.edited import Observed

UNITS = 600  # units of a hidden layer, without the centers at new images
SEED = 0  # of the random units


class Labeled(NamedTuple):
  """The outputs of a classifier for some images, and the classes of these images.

  Attributes:
    seen: the outputs. The logits are those of the base classes, [n, B].
    labels: the classes [n]. Base classes are 0 to B − 1, and new classes follow.
  """

  seen: Observed
  labels: np.ndarray

  def where(self, rows: Any) -> 'Labeled':
    """Return the images that `rows` selects on the first axis: indices, a slice or booleans."""
    return Labeled(self.seen.at(rows), self.labels[rows])

  def below(self, classes: int) -> 'Labeled':
    """Return the images of the classes 0 to `classes` − 1."""
    return self.where(self.labels < classes)


# The options of a method by name:
#   cosine   1 for the cosine, 0 for the Euclidean distance
#   sigma    σ of a Gaussian, divided by the median distance of two base images of different classes
#   ridge    the number that ridge regression adds to the diagonal, divided by the mean of the diagonal; in the
#            nearest class mean the ridge of the covariance of the classes (`hbf.editing.guard.metric_of`)
#   balance  p: an image of a class of n images has the weight n^−p
#   offset   an advantage of new classes in squared distance, divided by the mean squared distance of a base image to
#            the mean of its class
#   margin   the logit of a new image's class, minus its greatest base logit
Trial = Mapping[str, float]

# A function from images to the scores of all classes, [n, B + N].
Scores = Callable[[Observed], np.ndarray]


def means_of(images: Labeled) -> np.ndarray:
  """Return the mean features of each class, [classes, F]. There must be an image of each class."""
  one_hot = np.eye(images.labels.max() + 1)[images.labels]
  return np.asarray((one_hot / one_hot.sum(axis=0)).T @ images.seen.features)


def joined(first: Labeled, second: Labeled) -> Labeled:
  """Return the images of two sets as one set."""
  seen = (np.concatenate(pair) for pair in zip(first.seen, second.seen, strict=True))
  return Labeled(Observed(*seen), np.concatenate([first.labels, second.labels]))


class Method:
  """A method that knows the training images of the base classes, and learns new classes by `learn`."""

  def __init__(self, base: Labeled) -> None:
    """Store the training images of the base classes."""
    self.base = base

  def learn(self, new: Labeled, trial: Trial) -> Scores:
    """Learn new classes. Return a function from images to the scores of all classes.

    Args:
      new: the images of all new classes of the sessions so far. There may be none.
      trial: the options.
    """
    raise NotImplementedError


class NearestMean(Method):
  """The nearest class mean, by the Euclidean distance or by the cosine.

  For the cosine, the mean feature of the base images is subtracted first.
  """

  def learn(self, new: Labeled, trial: Trial) -> Scores:
    """Return a function from images to minus the squared distances to the class means.

    If the option `cosine` is 1, the function returns the cosines with the class means instead.
    """
    center, means = self.base.seen.features.mean(axis=0), means_of(joined(self.base, new))
    if not trial['cosine']:
      return lambda seen: -squared(seen.features, means)
    return lambda seen: of_norm_1(seen.features - center) @ of_norm_1(means - center).T


class NearestMeanInMetric(Method):
  """The nearest class mean in the metric of the base classes."""

  def learn(self, new: Labeled, trial: Trial) -> Scores:
    """Return a function from images to minus the squared distances to the class means in the metric."""
    w, means = self._metric(trial['ridge']), means_of(joined(self.base, new))
    return lambda seen: -squared(seen.features @ w.T, means @ w.T)

  def _metric(self, ridge: float) -> np.ndarray:
    return metric_of_classes(self.base.seen.features, self.base.labels, ridge)


class HeadAndCenters(NearestMeanInMetric):
  """The head, and for each class a center at the mean of its features (`hbf learn`).

  A new class wins over the head's answer if its center is nearer than the center of this answer, in the metric of the
  base classes. Otherwise the head's answer stays. The option `offset` gives new classes an advantage in
  this comparison.
  """

  def learn(self, new: Labeled, trial: Trial) -> Scores:
    """Return a function from images to the logits of base and new classes.

    Let b be the head's answer, a base class. The logit of a new class c is b's logit plus (d_b² − d_c² + e) / 2. Here
    d_b and d_c are the distances of the image's features to the centers of b and c. The option `offset` is e, divided
    by the mean squared distance of a base image to the mean of its class.
    """
    near = super().learn(new, trial)
    size = -trial['offset'] * float(near(self.base.seen)[np.arange(len(self.base.labels)), self.base.labels].mean())

    def scores(seen: Observed) -> np.ndarray:
      squares, rows = -near(seen), np.arange(len(seen.logits))
      answers = seen.logits.argmax(axis=1)
      lead = squares[rows, answers][:, None] - squares[:, seen.logits.shape[1] :] + size
      return np.concatenate([seen.logits, seen.logits.max(axis=1, keepdims=True) + lead / 2], axis=1)

    return scores


class Ridge(Method):
  """Ridge regression of one-hot classes on the values of hidden units. Subclasses define the units.

  Image i has the unit values H_i and the one-hot class Y_i. Its weight w_i is n^−p if its class has n images, where p
  is the option `balance`. The coefficients C minimize Σ_i w_i ‖H_i C − Y_i‖² + λ‖C‖². Here λ is the option `ridge`
  times the mean of the diagonal of Σ_i w_i H_iᵀH_i. The normal equations are sums over images. So images can be added
  one by one, and the coefficients are the same as from all images at once (ACIL, GKEAL).
  """

  def __init__(self, base: Labeled) -> None:
    """Store the base images."""
    super().__init__(base)
    self._codes = np.eye(base.labels.max() + 1, dtype=np.float32)[base.labels]
    self._sigma: float | None = None

  def fixed(self, features: np.ndarray, sigma: float) -> np.ndarray:
    """Return the values [n, M] of the units that do not depend on the new images, for features [n, F].

    Only Gaussian units use the option `sigma`.
    """
    raise NotImplementedError

  def added(self, features: np.ndarray, new: np.ndarray, sigma: float) -> np.ndarray:
    """Return the values [n, E] of E units, one at each new image, for features [n, F].

    The class `Ridge` itself has no such units, and returns an array [n, 0]. `new` has the features of the new images,
    [E, F]. Only Gaussian units use the option `sigma`.
    """
    del new, sigma
    return np.zeros((len(features), 0), np.float32)

  def learn(self, new: Labeled, trial: Trial) -> Scores:
    """Return a function from images to the outputs of the regression."""
    sigma = trial.get('sigma', 0.0)
    self._read_base(sigma)
    features, classes = new.seen.features, int(max(new.labels, default=-1)) + 1
    beside = self.added(self.base.seen.features, features, sigma)
    cross = self._hidden.T @ beside
    moment = np.block([[self._moment, cross], [cross.T, beside.T @ beside]]).astype(np.float64)
    target = np.concatenate([self._target, beside.T @ self._codes]).astype(np.float64)
    base_classes = target.shape[1]
    target = np.pad(target, ((0, 0), (0, max(0, classes - base_classes))))
    # All base classes have equally many images, so one weight serves all of them.
    scale = (len(self.base.labels) / base_classes) ** -trial['balance']
    moment, target = scale * moment, scale * target
    hidden = np.concatenate([self.fixed(features, sigma), self.added(features, features, sigma)], axis=1)
    if len(features):
      weight = np.bincount(new.labels)[new.labels, None] ** -trial['balance']
      moment += hidden.T @ (weight * hidden)
      target += hidden.T @ (weight * np.eye(target.shape[1])[new.labels])
    moment += trial['ridge'] * np.trace(moment) / len(moment) * np.eye(len(moment))
    coefficients = np.linalg.solve(moment, target).astype(np.float32)

    def scores(seen: Observed) -> np.ndarray:
      x = seen.features
      return np.concatenate([self.fixed(x, sigma), self.added(x, features, sigma)], axis=1) @ coefficients

    return scores

  def _read_base(self, sigma: float) -> None:
    # The part of the base images in the normal equations is computed only once for each σ.
    if self._sigma != sigma:
      self._hidden, self._sigma = self.fixed(self.base.seen.features, sigma), sigma
      self._moment, self._target = self._hidden.T @ self._hidden, self._hidden.T @ self._codes


class RandomFeatures(Ridge):
  """Random ReLU features with ridge regression (ACIL, Zhuang et al. 2022; RanPAC, McDonnell et al. 2023)."""

  def fixed(self, features: np.ndarray, sigma: float) -> np.ndarray:
    """Return relu(x R) [n, M] for features x, where R [F, M] has standard normal entries. `sigma` is not used."""
    # The scale of R does not matter, because λ (see `Ridge`) is proportional to its square.
    del sigma
    matrix = np.random.default_rng(SEED).normal(size=(features.shape[1], UNITS)).astype(np.float32)
    return np.maximum(features @ matrix, 0)


class GaussianKernels(Ridge):
  """Gaussians around random base images with ridge regression (GKEAL, Zhuang et al. 2023)."""

  def __init__(self, base: Labeled) -> None:
    """Store the base images, draw centers from them, and compute the unit of the option `sigma`.

    The unit is the median distance between two centers of different classes.
    """
    super().__init__(base)
    self.metric = self.make_metric()
    rows = np.random.default_rng(SEED).permutation(len(base.labels))[:UNITS]
    self._centers = base.seen.features[rows] @ self.metric.T
    other = base.labels[rows][:, None] != base.labels[rows]
    self._unit = float(np.sqrt(np.median(squared(self._centers, self._centers)[other])))

  def make_metric(self) -> np.ndarray:
    """Return the metric W [F, F], which is the identity here."""
    return np.eye(self.base.seen.features.shape[1], dtype=np.float32)

  def fixed(self, features: np.ndarray, sigma: float) -> np.ndarray:
    """Return the responses K(‖W(x − t)‖² / 2σ²) [n, M] for features x [n, F]. The M centers t are random base images.

    `sigma` is σ divided by the median distance between two centers whose images have different classes.
    """
    return self._kernel(features @ self.metric.T, self._centers, sigma)

  def _kernel(self, points: np.ndarray, centers: np.ndarray, sigma: float) -> np.ndarray:
    return np.exp(squared(points, centers) / np.float32(-2 * (sigma * self._unit) ** 2))


class HyperBF(GaussianKernels):
  """A HyperBF whose centers are random base images and all new images, with coefficients by ridge regression."""

  def added(self, features: np.ndarray, new: np.ndarray, sigma: float) -> np.ndarray:
    """Return the responses K(‖W(x − t)‖² / 2σ²) [n, E] for features x [n, F] and E centers t.

    The centers are `new`, the features of the new images [E, F]. `sigma` is σ divided by the median distance between
    two random centers of different classes.
    """
    return self._kernel(features @ self.metric.T, new @ self.metric.T, sigma)


class HyperBFInMetric(HyperBF):
  """The HyperBF with the metric of the base classes."""

  def make_metric(self) -> np.ndarray:
    """Return the metric of the base classes."""
    return metric_of_classes(self.base.seen.features, self.base.labels, RIDGE)


class HyperBFBesideHead(HyperBFInMetric):
  """A HyperBF beside the head. The logits of base classes do not change.

  The centers are the new images. The coefficients solve a linear system: at each new image, the logit of its class is
  the greatest base logit plus the option `margin`, and the logits of the other new classes are 0.
  """

  def learn(self, new: Labeled, trial: Trial) -> Scores:
    """Return a function from images to the logits of base and new classes."""
    logits, features, classes = new.seen.logits, new.seen.features, self._codes.shape[1]
    if not len(features):
      return lambda seen: seen.logits
    wanted = np.eye(int(new.labels.max()) + 1)[new.labels][:, classes:]
    wanted *= logits.max(axis=1, keepdims=True) + trial['margin']
    responses = self.added(features, features, trial['sigma']).astype(np.float64)
    coefficients = np.linalg.solve(responses + 1e-6 * np.eye(len(features)), wanted)

    def scores(seen: Observed) -> np.ndarray:
      return np.concatenate([seen.logits, self.added(seen.features, features, trial['sigma']) @ coefficients], axis=1)

    return scores


def _grid(**values: Iterable[float]) -> tuple[Trial, ...]:
  """Return a trial for each combination of the options' values."""
  return tuple(
    dict(zip(values, map(float, combination), strict=True)) for combination in itertools.product(*values.values())
  )


@dataclasses.dataclass(frozen=True)
class Entry:
  """A method of the comparison.

  Attributes:
    method: the class of the method.
    trials: the options to choose from.
  """

  method: type[Method]
  trials: tuple[Trial, ...]


_GAUSSIANS = _grid(sigma=(0.25, 0.5, 1.0), ridge=(1e-4, 1e-2), balance=(0.5, 1.0))
METHODS = {
  'nearest class mean': Entry(NearestMean, _grid(cosine=(0, 1))),
  'nearest class mean, metric of classes': Entry(NearestMeanInMetric, _grid(ridge=np.logspace(-2.5, 1.5, 12))),
  'random ReLU features, ridge': Entry(RandomFeatures, _grid(ridge=np.logspace(-6, -1, 6), balance=(0.5, 1.0))),
  'Gaussian kernels at base images, ridge': Entry(GaussianKernels, _GAUSSIANS),
  'HyperBF, centers at new images too, ridge': Entry(HyperBF, _GAUSSIANS),
  'HyperBF, metric of classes, ridge': Entry(HyperBFInMetric, _GAUSSIANS),
  'HyperBF beside the head, metric of classes': Entry(
    HyperBFBesideHead, _grid(sigma=(0.3, 0.45, 0.6, 0.9), margin=(0, 4, 8))
  ),
  'head, and a center for each class, metric of classes': Entry(
    HeadAndCenters, _grid(ridge=(0.03, 0.1, 0.3, 1), offset=(-0.05, 0, 0.05))
  ),
}


def sessions(new: Labeled, base: int, classes: int) -> Iterator[Labeled]:
  """Yield an empty set of images at first. After each session, yield the images of all new classes learned so far.

  Args:
    new: the images of all new classes.
    base: B, number of base classes.
    classes: number of new classes in a session.
  """
  for known in range(base, int(new.labels.max()) + 2, classes):
    yield new.below(known)
