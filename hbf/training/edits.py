"""Edits of a trained classifier: centers that correct the answers for single images.

Each edit sets a change of the logits of its image. The point of an image is the mean of its tokens after the first
half of the blocks. A HyperBF over these points interpolates the changes (`hbf.models.edited.EditedClassifier`). The
coefficients C solve R C = Δ. Here R_ia is the response of center a to the image of edit i, and Δ_i is the change that
edit i sets. So every edited image gets exactly the logits that were set. If an edit is removed, the coefficients are
computed again.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from hbf.errors import UserError
from hbf.models.classifier import ImageClassifier
from hbf.models.edited import EDITS, EditedClassifier, ball
from hbf.ops.hyperbf import responses


@dataclasses.dataclass(frozen=True, eq=False)
class Edit:
  """One edit.

  Attributes:
    source: the name of the image, such as its path.
    was: the name of the class that the classifier answered before the edit.
    label: the name of the class that the classifier answers after the edit.
    center: the point of the image (`hbf.models.edited.EditedClassifier`), float32 [D].
    radius: ρ, the radius of the ball around the center, as a distance under the metric of `Edits`.
    change: the change of the image's logits that the edit sets, float32 [classes].
  """

  source: str
  was: str
  label: str
  center: np.ndarray
  radius: float
  change: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Edits:
  """The edits of a classifier, in the order in which they were made.

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
    """Return a text with the checkpoint's step, and the old and the new answer for each image."""
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
    if not 0 <= number < len(self.edits):
      known = f'expected 0 to {len(self.edits) - 1}' if self.edits else 'there are no edits'
      raise UserError(f'edit {number} does not exist: {known}')
    return dataclasses.replace(self, edits=self.edits[:number] + self.edits[number + 1 :])

  def changes(self, points: np.ndarray) -> np.ndarray:
    """Return the float32 changes [n, classes] of the logits at points [n, D]. Without edits, return zeros [n, 1]."""
    if not self.edits:
      return np.zeros((len(points), 1), np.float32)
    return np.asarray(self.responses(points) @ self.params['coefficients'], np.float32)

  def responses(self, points: np.ndarray) -> np.ndarray:
    """Return the responses [n, E] of the E centers to points [n, D], in float64. At its center, a response is 1."""
    basis = ball(jnp.asarray(self._stacked('radius')), jnp.asarray(self.metric))
    return np.asarray(responses(jnp.asarray(points), jnp.asarray(self._stacked('center')), basis), np.float64)

  @functools.cached_property
  def params(self) -> dict[str, np.ndarray]:
    """The parameters of `hbf.models.edited.Corrections` for these edits. There must be at least one edit."""
    centers = self._stacked('center')
    coefficients = np.linalg.solve(self.responses(centers), self._stacked('change').astype(np.float64))
    arrays = {
      'centers': centers,
      'coefficients': coefficients,
      'metric': self.metric,
      'radius': self._stacked('radius'),
    }
    return {name: value.astype(np.float32) for name, value in arrays.items()}

  def applied(self, model: nn.Module, params: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """Return the edited classifier and its parameters. If there are no edits, return `model` and `params`."""
    if not self.edits:
      return model, dict(params)
    assert isinstance(model, ImageClassifier)
    return EditedClassifier(model, len(self.edits)), {**params, EDITS: self.params}

  def _stacked(self, name: str) -> np.ndarray:
    return np.array([getattr(edit, name) for edit in self.edits], np.float32)


def unedited(model: nn.Module, params: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
  """Return a classifier and its parameters without its edits, if it has any."""
  own = {name: value for name, value in params.items() if name != EDITS}
  return (model.classifier if isinstance(model, EditedClassifier) else model), own
