"""Edits of a trained network: centers that correct the answers for single examples.

An edit of a classifier has one center, for one image. An edit of a language model has a center for each token of the
answer to a prompt. Each center sets a change of the logits of its example. A HyperBF over the examples' points
interpolates these changes (`hbf.models.edited`). The coefficients C solve R C = Δ. Here R_ia is the response of
center a to the example of center i, and Δ_i is the change that center i sets. So every edited example gets exactly
the logits that were set. If an edit is removed, the coefficients are computed again.
"""

import dataclasses
import functools
import numbers
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from hbf.errors import UserError
from hbf.models.build import unrolled
from hbf.models.classifier import ImageClassifier
from hbf.models.edited import EDITS, EditedClassifier, EditedLanguageModel, ball
from hbf.models.language import LanguageModel
from hbf.ops.hyperbf import responses


@dataclasses.dataclass(frozen=True, eq=False)
class Edit:
  """One edit, with m centers. m is 1 for an image, and the number of tokens of the answer for a text.

  Attributes:
    source: the name of the image, such as its path. For a text: the prompt.
    was: the answer before the edit: the name of a class. For a text: the likeliest continuation of the prompt.
    label: the answer after the edit.
    centers: the points of the examples (`hbf.models.edited`), float32 [m, D].
    radii: the radii ρ [m] of the balls around the centers. A point p is in the ball of a center t if ‖W(p − t)‖ < ρ.
    changes: the changes of the logits that the edit sets at each example, float32 [m, classes]. For a text, the
      classes are the tokens of the vocabulary.
  """

  source: str
  was: str
  label: str
  centers: np.ndarray
  radii: np.ndarray
  changes: np.ndarray

  @property
  def answers(self) -> np.ndarray:
    """For each center, the index of the class whose logit it changes most, up or down, int [m]."""
    return np.asarray(np.abs(self.changes).argmax(axis=-1))


@dataclasses.dataclass(frozen=True, eq=False)
class Edits:
  """The edits of a network, in the order in which they were made.

  Attributes:
    step: the step of the edited checkpoint.
    average: True if the edited parameters are the moving average.
    metric: the matrix W, float32 [D, D]. The distance of two points p and q is ‖W(p − q)‖.
    edits: the edits. The number of an edit is its index in this tuple.
  """

  step: int
  average: bool
  metric: np.ndarray
  edits: tuple[Edit, ...] = ()

  def __repr__(self) -> str:
    """Return a text with the checkpoint's step, and the old and the new answer of each edit."""
    answers = ', '.join(f'{edit.source}: {edit.was} → {edit.label}' for edit in self.edits)
    return f'Edits(step={self.step}, {answers or "none"})'

  def __len__(self) -> int:
    """Return the number of edits."""
    return len(self.edits)

  def added(self, edit: Edit) -> 'Edits':
    """Return these edits and one more."""
    return dataclasses.replace(self, edits=(*self.edits, edit))

  def without(self, number: int) -> 'Edits':
    """Return these edits without the edit of this number.

    Raises:
      UserError: there is no edit of this number.
    """
    if not isinstance(number, numbers.Integral) or not 0 <= number < len(self.edits):
      known = f'expected 0 to {len(self.edits) - 1}' if self.edits else 'there are no edits'
      raise UserError(f'edit {number!r} does not exist: {known}')
    return dataclasses.replace(self, edits=self.edits[:number] + self.edits[number + 1 :])

  def changes(self, points: np.ndarray) -> np.ndarray:
    """Return the float32 changes [n, classes] of the logits at points [n, D]. Without edits, return zeros [n, 1]."""
    if not self.edits:
      return np.zeros((len(points), 1), np.float32)
    return np.asarray(self.responses(points) @ self.params['coefficients'], np.float32)

  def responses(self, points: np.ndarray) -> np.ndarray:
    """Return the responses of all E centers to points [n, D], float64 [n, E]. A center's response to itself is 1."""
    basis = ball(jnp.asarray(self._joined('radii')), jnp.asarray(self.metric))
    return np.asarray(responses(jnp.asarray(points), jnp.asarray(self._joined('centers')), basis), np.float64)

  @functools.cached_property
  def params(self) -> dict[str, np.ndarray]:
    """The parameters of `hbf.models.edited.Corrections` for these edits. There must be at least one edit.

    Raises:
      UserError: two centers are the same point, so that no coefficients give each its own change.
    """
    centers = self._joined('centers')
    try:
      coefficients = np.linalg.solve(self.responses(centers), self._joined('changes').astype(np.float64))
    except np.linalg.LinAlgError:
      raise UserError(
        'the points of the model are the same for two of the edited examples or tokens: leave one of them out'
      ) from None
    arrays = {
      'centers': centers,
      'coefficients': coefficients,
      'metric': self.metric,
      'radius': self._joined('radii'),
    }
    return {name: value.astype(np.float32) for name, value in arrays.items()}

  def applied(self, model: nn.Module, params: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """Return the edited network and its parameters. If there are no edits, return `model` and `params`."""
    if not self.edits:
      return model, dict(params)
    edited, count = {**params, EDITS: self.params}, len(self._joined('radii'))
    if isinstance(model, LanguageModel):
      return EditedLanguageModel.of(unrolled(model), count), edited
    assert isinstance(model, ImageClassifier)
    return EditedClassifier(unrolled(model), count), edited

  def _joined(self, name: str) -> np.ndarray:
    """Return an attribute of all edits, such as 'radii', joined to one array for their E centers, float32 [E, …]."""
    return np.concatenate([getattr(edit, name) for edit in self.edits]).astype(np.float32)


def unedited(model: nn.Module, params: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
  """Return a network and its parameters without its edits, if it has any."""
  own = {name: value for name, value in params.items() if name != EDITS}
  if isinstance(model, EditedLanguageModel):
    return model.unedited, own
  return (model.classifier if isinstance(model, EditedClassifier) else model), own
