"""An image classifier with learned classes, which are added after the training. Each class has one center."""

from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from hbf.models.classifier import ImageClassifier
from hbf.models.edited import observe_call
from hbf.ops.distances import squared_distances

LEARNED = 'learned'  # name of the parameters


class ExtendedClassifier(nn.Module):
  """A classifier whose logits are those of the trained classes, followed by those of the learned classes.

  Let b be the trained class with the greatest logit z_b. The logit of a learned class c is

      z_c(x) = z_b(x) + (‖W(f(x) − t_b)‖² − ‖W(f(x) − t_c)‖²) / 2.

  The features f(x) are the input of the head, and t are the centers of the classes. So exp(z_c) = exp(z_b) K_c / K_b
  with Gaussian kernels K. A learned class wins if its center is nearer than the center of the trained class b. The
  logits of the trained classes do not change.

  The parameters are the centers [C, F] of the C trained classes, the centers [N, F] of the N learned classes, and the
  metric W [F, F]. They lie beside the classifier's parameters, under the name `learned`.

  Attributes:
    classifier: the classifier of the trained classes. It must not use `scan_layers` (`hbf.models.build.unrolled`).
    classes: N, number of learned classes.
    input_dtype: type of the inputs.
  """

  input_dtype: ClassVar[Any] = jnp.float32

  classifier: ImageClassifier
  classes: int

  def setup(self) -> None:
    """Give the parameters of the classifier the names that they have without this module."""
    nn.share_scope(self, self.classifier)

  @nn.compact
  def __call__(self, images: Float[Array, 'B height width channels'], *, train: bool) -> Float[Array, 'B classes']:
    """Compute logits [B, classes] in float32 of normalized images [B, height, width, channels]."""
    seen = observe_call(self.classifier, lambda: self.classifier(images, train=train))
    return jnp.concatenate([seen.logits, LearnedClasses(self.classes, name=LEARNED)(*seen[::2])], axis=-1)


class LearnedClasses(nn.Module):
  """The centers of C trained and N learned classes.

  The module maps features [B, F] and logits [B, C] (of the trained classes) to logits [B, N] (of the learned
  classes). The centers and the metric are computed by `hbf.editing.learn`. They are not trained.

  Attributes:
    classes: N, number of learned classes.
  """

  classes: int

  @nn.compact
  def __call__(self, logits: Float[Array, 'B C'], features: Float[Array, 'B F']) -> Float[Array, 'B N']:
    """Compute the logits [B, N] of the learned classes. `logits` are those of the trained classes."""
    zeros, width = nn.initializers.zeros_init(), features.shape[-1]
    trained = self.param('trained_centers', zeros, (logits.shape[-1], width))
    centers = self.param('centers', zeros, (self.classes, width))
    metric = self.param('metric', lambda _: jnp.eye(width))
    halves = squared_distances(features, jnp.concatenate([trained, centers]), 'full', metric, 0.5)
    answers = jnp.argmax(logits, axis=-1, keepdims=True)
    own = jnp.take_along_axis(halves, answers, axis=-1)
    return jnp.max(logits, axis=-1, keepdims=True) + own - halves[:, logits.shape[-1] :]
