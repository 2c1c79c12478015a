"""Methods to edit a network, for a comparison: centers of a HyperBF, and other methods.

An example is an image, or the first tokens of a text. The answer to the first tokens of a text is the next token. An
edit corrects the answer to one example. With E edits, the logits of an example x become z(x) + Σ_a R_a(x) c_a. The
coefficients c_a of edit a are a change of the logits. The response R_a(x) is 1 if x is the example of edit a. Methods
differ in R:

    HyperBF      a ball with a soft edge, max(0, 1 − r²/ρ²), or a Gaussian, around the example's point
    ReLU neuron  a hidden unit of an MLP, relu(w·p − b) for a point p, scaled to 1 at the example
    GRACE        1 in a ball around the point, 0 outside; replaces the answer in the ball (Hartvigsen et al. 2023)
    rank-one     linear in the head's inputs: a least-squares update of its matrix (Meng et al. 2022, "ROME", eq. 2)
    lookup       1 for exactly this example, 0 for all others

The point of an image is the mean of its tokens after the first half of the blocks (`hbf.models.edited.Observed`). The
point of a beginning of a text is the vector of its last token in one of the network's layers (`hbf.editing.places`).

A trial is a choice of a method's options.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hbf.analysis.rows import of_norm_1, squared
from hbf.editing.editor import leading
from hbf.models.edited import Observed

REPLACED = 1e4  # a change of the logits that replaces any answer


class Trial(NamedTuple):
  """Values of the two options of a method.

  Attributes:
    reach: size of the region in which an edit acts, in a unit that depends on the method. For the rank-one update it
      is the ridge of the least squares.
    margin: the wanted lead after the edit: the edited example's logit for its label minus the greatest other logit.
  """

  reach: float
  margin: float


@dataclasses.dataclass(frozen=True)
class Base:
  """The guarded examples and the metric that the methods use.

  Attributes:
    guard: the network's outputs for guarded examples. These are training examples whose answers should not change.
    metric: the metric of copies, W [D, D] (`hbf.editing.guard.metric_of`).
  """

  guard: Observed
  metric: np.ndarray


# Arguments: the base, the m edited examples, their labels [m], n other examples, and `Trial.reach`.
# Result: the responses R, [m, n].
Respond = Callable[[Base, Observed, np.ndarray, Observed, float], np.ndarray]


def nearest_other(base: Base, edited: Observed, labels: np.ndarray, metric: np.ndarray) -> np.ndarray:
  """Return the distance [m] of each edited example to the nearest guarded example with another answer.

  A guarded example counts only if its answer differs from the edited example's label. The distance is ‖W(x − x')‖ for
  points x and x'.

  Args:
    base: the guarded examples.
    edited: the network's outputs for the m edited examples.
    labels: the labels of the edited examples, [m].
    metric: W, [D, D].
  """
  away = squared(edited.points @ metric.T, base.guard.points @ metric.T)
  away[base.guard.logits.argmax(-1) == labels[:, None]] = np.inf
  return np.sqrt(away.min(axis=1))


def _identity(base: Base) -> np.ndarray:
  return np.eye(len(base.metric))


def _radial(kernel: Callable[[np.ndarray], np.ndarray], metric: Callable[[Base], np.ndarray]) -> Respond:
  """Return a function that computes the responses K(r²/ρ²), where ρ is the radius of an edit.

  The distance r is that between the points of an example and of the edited example. The radius is `reach` times the
  distance that `nearest_other` returns for the edited example.

  Args:
    kernel: K.
    metric: function that returns the metric of all these distances.
  """

  def respond(base: Base, edited: Observed, labels: np.ndarray, others: Observed, reach: float) -> np.ndarray:
    w = metric(base)
    radius = reach * nearest_other(base, edited, labels, w)
    return kernel(squared(edited.points @ w.T, others.points @ w.T) / radius[:, None] ** 2)

  return respond


def _soft_ball(s: np.ndarray) -> np.ndarray:
  return np.maximum(1 - s, 0)


def _gaussian(s: np.ndarray) -> np.ndarray:
  return np.exp(-s / 2)


def _of_copies(base: Base) -> np.ndarray:
  return base.metric


def _ball(metric: Callable[[Base], np.ndarray]) -> Respond:
  def respond(base: Base, edited: Observed, labels: np.ndarray, others: Observed, reach: float) -> np.ndarray:
    w = metric(base)
    # One radius for all edits, as in GRACE: `reach` times the median of the distances from `nearest_other`.
    radius = reach * np.median(nearest_other(base, edited, labels, w))
    away = squared(edited.points @ w.T, others.points @ w.T)
    return np.where(away < radius**2, 1 - 1e-3 * away / radius**2, 0)  # the nearest key has the greatest response

  return respond


def _neuron(norm_1: bool) -> Respond:
  """Return a function that computes the responses of ReLU neurons, one for each edit.

  The points are centered and multiplied by the metric first. The weights of a neuron are then the point p of its
  edited example. The greater the argument `reach` of the returned function, the more examples the neuron responds to.
  With `reach` 1, it does not respond to a guarded example p' with another answer if p·p' is at most 98% of p·p.

  Args:
    norm_1: True to scale the points also to norm 1.
  """

  def respond(base: Base, edited: Observed, labels: np.ndarray, others: Observed, reach: float) -> np.ndarray:
    mean = base.guard.points.mean(axis=0)
    own, other, guard = ((seen.points - mean) @ base.metric.T for seen in (edited, others, base.guard))
    if norm_1:
      own, other, guard = map(of_norm_1, (own, other, guard))
    own_products, guard_products = (own * own).sum(-1), own @ guard.T
    guard_products[base.guard.logits.argmax(-1) == labels[:, None]] = -np.inf
    # If a guarded example has the greater product, no bias separates it from the edited example. Then the gap is set
    # to a small value.
    gap = np.maximum(own_products - guard_products.max(axis=1), 0.02 * own_products)
    return np.maximum(1 - (own_products[:, None] - own @ other.T) / (reach * gap)[:, None], 0)

  return respond


def _rank_one(base: Base, edited: Observed, labels: np.ndarray, others: Observed, reach: float) -> np.ndarray:
  """Return the responses [m, n] of m rank-one updates of the head for n other examples.

  An update corrects the answer to one of the m edited examples, and changes the logits of the guarded examples least.
  `reach` is the ridge of the least squares, divided by the mean square of a feature.
  """
  del labels
  features = base.guard.features.astype(np.float64)
  moment = features.T @ features / len(features)
  moment += reach * np.trace(moment) / len(moment) * np.eye(len(moment))
  keys = np.linalg.solve(moment, edited.features.T.astype(np.float64)).T
  return (keys @ others.features.T) / (keys * edited.features).sum(-1)[:, None]


def _lookup(base: Base, edited: Observed, labels: np.ndarray, others: Observed, reach: float) -> np.ndarray:
  del base, labels, reach
  return (edited.points[:, None, :2] == others.points[None, :, :2]).all(-1).astype(np.float64)


@dataclasses.dataclass(frozen=True)
class Method:
  """A method and its trials.

  Attributes:
    respond: function that computes the responses [m, n] of m edits for n examples.
    trials: the choices of options that are tried: one for the lookup, twelve for every other method.
    replaces: True if an edit replaces the answer where its response is near 1. False if it adds to the logits.
    interpolates: True if the coefficients of all edits come from one linear system.
  """

  respond: Respond
  trials: tuple[Trial, ...]
  replaces: bool = False
  interpolates: bool = False

  def changes(self, edited: Observed, labels: np.ndarray, margin: float) -> np.ndarray:
    """Return the coefficients [m, C] that the edits would have if each were the only edit.

    In a row, all entries but the label's are 0.
    """
    if not self.replaces:
      return leading(edited.logits, labels, margin)
    wanted = np.zeros_like(edited.logits)
    wanted[np.arange(len(labels)), labels] = REPLACED
    return wanted


def _grid(reaches: tuple[float, ...], margins: tuple[float, ...]) -> tuple[Trial, ...]:
  return tuple(Trial(reach, margin) for reach in reaches for margin in margins)


_MARGINS = (4.0, 16.0, 64.0)
_BALLS = _grid((0.8, 1.0, 1.2, 1.4), _MARGINS)
_WIDTHS = _grid((0.3, 0.4, 0.5, 0.6), _MARGINS)
_GAPS = _grid((0.5, 1.0, 2.0, 4.0), _MARGINS)
_CAPS = _grid((0.64, 1.0, 1.44, 1.96), _MARGINS)  # for points of norm 1, they give balls with the radii of `_BALLS`
_RADII = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6)
METHODS = {
  'HyperBF ball, metric of copies': Method(_radial(_soft_ball, _of_copies), _BALLS, interpolates=True),
  'HyperBF ball, identity metric': Method(_radial(_soft_ball, _identity), _BALLS, interpolates=True),
  'HyperBF Gaussian, metric of copies': Method(_radial(_gaussian, _of_copies), _WIDTHS, interpolates=True),
  'ReLU neuron': Method(_neuron(norm_1=False), _GAPS, interpolates=True),
  'ReLU neuron on points of norm 1': Method(_neuron(norm_1=True), _CAPS, interpolates=True),
  'GRACE, identity metric': Method(_ball(_identity), _grid(_RADII, (0.0,)), replaces=True),
  'GRACE, metric of copies': Method(_ball(_of_copies), _grid(_RADII, (0.0,)), replaces=True),
  'rank-one update of the head': Method(_rank_one, _grid((1e-4, 1e-3, 1e-2, 1e-1), (0.1, 1.0, 4.0))),
  'lookup of the image': Method(_lookup, (Trial(0.0, 0.0),), replaces=True),
}


RIDGE = 1e-6  # added to the diagonal of the responses, so that two nearly equal examples give no singular system


def in_order(
  method: Method, base: Base, edited: Observed, labels: np.ndarray, trial: Trial
) -> Callable[[Observed], np.ndarray]:
  """Edit examples one after the other. Return a function from n examples to their edited logits [n, C].

  An example gets no edit if earlier edits already corrected its answer. If the method interpolates, the coefficients
  of all edits solve a linear system: every edited example gets its unedited logits plus its row of `Method.changes`.
  Otherwise the coefficients of an edit are computed from the logits that the earlier edits already changed. If the
  method replaces answers, only the edit with the greatest response acts on an example.

  Args:
    method: the method.
    base: the guarded examples and the metric.
    edited: the network's outputs for the examples to edit, in order.
    labels: the right answers of these examples.
    trial: the options of the method.
  """
  responses = method.respond(base, edited, labels, edited, trial.reach)
  kept, coefficients = coefficients_of(method, responses, edited, labels, trial.margin)

  def logits_of(others: Observed) -> np.ndarray:
    found = method.respond(base, edited, labels, others, trial.reach)[kept]
    return np.asarray(others.logits + sum_of(method, found, coefficients))

  return logits_of


def coefficients_of(
  method: Method, responses: np.ndarray, edited: Observed, labels: np.ndarray, margin: float, skip: bool = True
) -> tuple[list[int], np.ndarray]:
  """Return the indices of the E examples that get an edit, and the coefficients [E, C] of these edits.

  Args:
    method: the method.
    responses: the responses of all edits to all examples, [m, m]. Row i is the edit for example i, and column j is
      the edited example j.
    edited: the network's outputs for the m examples to edit, in order.
    labels: the right answers of these examples, [m].
    margin: the wanted lead of a right answer after the edit (`Trial.margin`).
    skip: True to make no edit for an example whose answer is already right at its turn.
  """
  wanted = method.changes(edited, labels, margin)
  if method.interpolates and not skip:  # one linear system
    return list(range(len(labels))), np.linalg.solve(responses.T + RIDGE * np.eye(len(labels)), wanted)
  kept: list[int] = []
  coefficients, inverse = np.zeros((0, wanted.shape[1])), np.zeros((0, 0))
  for row in range(len(labels)):
    former = sum_of(method, responses[kept, row][:, None], coefficients)
    now = edited.at([row])._replace(logits=edited.logits[[row]] + former)
    if skip and now.logits.argmax() == labels[row]:
      continue
    if method.interpolates:
      inverse = _bordered(inverse, responses[row, kept], responses[kept, row])
      coefficients = inverse @ wanted[[*kept, row]]
    else:
      coefficients = np.concatenate([coefficients, method.changes(now, labels[[row]], margin)])
    kept.append(row)
  return kept, coefficients


def _bordered(inverse: np.ndarray, column: np.ndarray, row: np.ndarray) -> np.ndarray:
  """Return the inverse of a matrix to which a column and a row are added.

  Args:
    inverse: the inverse of the matrix before the addition, [E, E].
    column: the new column, [E].
    row: the new row, [E]. The new entry on the diagonal is 1 + `RIDGE`.
  """
  u, v = inverse @ column, row @ inverse
  corner = 1 + RIDGE - row @ u
  left = np.concatenate([inverse + np.outer(u, v) / corner, -v[None] / corner])
  return np.concatenate([left, np.append(-u, 1)[:, None] / corner], axis=1)


def sum_of(method: Method, responses: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
  """Return the changes [n, C] that E edits make to the logits of n examples, from the edits' responses [E, n]."""
  if not len(responses):
    return np.zeros((1, coefficients.shape[1]))
  if method.replaces:
    return np.asarray(coefficients[responses.argmax(axis=0)] * responses.max(axis=0)[:, None])
  return np.asarray(responses.T @ coefficients)
