"""Networks with edits. An edit corrects the answer for one example, by centers of a HyperBF beside the head."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hbf.models.build import unrolled
from hbf.models.classifier import ImageClassifier
from hbf.models.language import LanguageModel
from hbf.nn.block import Block
from hbf.ops.basis import RadialBasis
from hbf.ops.hyperbf import hyperbf
from hbf.options import OptionError, whole

EDITS = 'edits'  # name of the parameters
# Layers of a language model, by name (`layers_of_tokens`).
MIDDLE, LAST, FEATURES = 'tokens after half of the blocks', 'input of the last stage 2', 'input of the head'


def ball(radius: jax.Array, metric: jax.Array) -> RadialBasis:
  """Return the radial basis max(0, 1 − ‖W(x − t)‖² / ρ²) for radii ρ [E] and a metric W [D, D]."""
  sigma = radius / 2**0.5  # the kernel is relu(b − r²/2σ²)
  return RadialBasis('ball_relu', sigma, metric='full', weights=metric, normalization='none', squared_radius=1.0)


class Observed(NamedTuple):
  """Arrays that a network computes from B examples. An example is an image, or the first tokens of a text.

  Attributes:
    logits: the logits, [B, classes].
    points: the point of each example, [B, D]. For an image it is the mean of its tokens after the first half of the
      blocks. For the first tokens of a text it is the vector of the last of them, in one layer of `layers_of_tokens`.
    features: the input of the head, [B, F].
  """

  logits: Any
  points: Any
  features: Any

  def at(self, rows: Any) -> 'Observed':
    """Return the arrays of some of the examples. `rows` is an index of the first axis."""
    return Observed(self.logits[rows], self.points[rows], self.features[rows])


class EditedClassifier(nn.Module):
  """A classifier with edits: its logits are z(x) + Σ_a max(0, 1 − ‖W(p(x) − t_a)‖² / ρ_a²) c_a for an image x.

  z(x) are the logits of the classifier without edits. The sum is a HyperBF with one ball for each edit. The point
  p(x) is the mean of the image's tokens after the first half of the blocks. The parameters of the edits are the
  centers t [E, D], their radii ρ [E], the coefficients c [E, classes] and the metric W [D, D]. They lie beside the
  classifier's parameters, under the name `edits`.

  Attributes:
    classifier: the classifier without edits. It must not use `scan_layers` (`hbf.models.build.unrolled`).
    edits: E, number of centers.
    input_dtype: type of the inputs.
  """

  input_dtype: ClassVar[Any] = jnp.float32

  classifier: ImageClassifier
  edits: int

  def setup(self) -> None:
    """Give the parameters of the classifier the names that they have without this module."""
    nn.share_scope(self, self.classifier)

  @nn.compact
  def __call__(self, images: Float[Array, 'B height width channels'], *, train: bool) -> Float[Array, 'B classes']:
    """Compute logits [B, classes] in float32 of normalized images [B, height, width, channels]."""
    seen = observe_call(self.classifier, lambda: self.classifier(images, train=train))
    return seen.logits + Corrections(self.edits, seen.logits.shape[-1], name=EDITS)(seen.points)


class EditedLanguageModel(LanguageModel):
  """A language model with edits. Its logits at a token are z + Σ_a max(0, 1 − ‖W(p − t_a)‖² / ρ_a²) c_a.

  z are the logits of the model without edits. The point p is the input of the last block's stage 2 at this token. So
  the centers t lie in the same space as the centers of that stage. The parameters are as in `EditedClassifier`.
  The model must not use `scan_layers` (`hbf.models.build.unrolled`).

  Attributes:
    edits: E, number of centers.
  """

  edits: Annotated[int, whole(1)] = 1

  @classmethod
  def of(cls, model: LanguageModel, edits: int) -> 'EditedLanguageModel':
    """Return an edited model: `model` with `edits` centers beside its head."""
    return cls(**_fields_of(model), edits=edits)

  @property
  def unedited(self) -> LanguageModel:
    """The model without edits."""
    return LanguageModel(**{name: value for name, value in _fields_of(self).items() if name != 'edits'})

  @nn.compact
  def __call__(
    self,
    tokens: Int[Array, 'B N'],
    *,
    train: bool,
    mask: Bool[Array, 'B N'] | None = None,
    start: Int[Array, ''] | None = None,
  ) -> Float[Array, 'B N V']:
    """Compute logits [B, N, V] in float32 of texts; see `LanguageModel.__call__`."""
    unedited = super().__call__
    logits, layers = layers_of_tokens(self, lambda: unedited(tokens, train=train, mask=mask, start=start))
    points = layers[LAST].reshape(-1, self.width)
    changes = Corrections(self.edits, self.vocabulary, name=EDITS)(points)
    return jnp.asarray(logits + changes.reshape(logits.shape))


def _fields_of(model: nn.Module) -> dict[str, Any]:
  return {
    field.name: getattr(model, field.name)
    for field in dataclasses.fields(model)
    if field.name not in ('parent', 'name')
  }


class Corrections(nn.Module):
  """A HyperBF beside the head. It maps the points of examples [B, D] to changes of their logits [B, C].

  The centers and coefficients are not trained: `hbf.editing` computes them.

  Attributes:
    edits: E, number of centers.
    classes: C, number of logits.
  """

  edits: int
  classes: int

  @nn.compact
  def __call__(self, points: Float[Array, 'B D']) -> Float[Array, 'B C']:
    """Compute the changes of the logits [B, C] at points [B, D]."""
    zeros, width = nn.initializers.zeros_init(), points.shape[-1]
    centers = self.param('centers', zeros, (self.edits, width))
    coefficients = self.param('coefficients', zeros, (self.edits, self.classes))
    metric = self.param('metric', lambda _: jnp.eye(width))
    radius = self.param('radius', nn.initializers.ones_init(), (self.edits,))
    return hyperbf(points, centers, coefficients, ball(radius, metric))


def observe(model: ImageClassifier, params: Any, images: Float[Array, 'B height width channels']) -> Observed:
  """Return the logits, the points and the features of normalized images."""
  flat = unrolled(model)
  return observe_call(flat, lambda: flat.apply({'params': params}, images, train=False))


def observe_call(model: ImageClassifier, call: Callable[[], Any]) -> Observed:
  """Call `call`, which runs the model and returns its logits. Return the logits, the points and the features.

  Raises:
    OptionError: the model uses `scan_layers`.
  """
  if model.trunk.scan_layers:
    raise OptionError(
      'scan_layers hides the tokens inside of the network, which edits and learned classes need: give '
      'hbf.models.build.unrolled(model), which has the same parameters',
      scan_layers=True,
    )
  middle, points, features = f'block{max(model.trunk.depth // 2, 1) - 1}', [], []

  def intercept(method: Any, args: Any, kwargs: Any, context: Any) -> Any:
    out = method(*args, **kwargs)
    if context.method_name == '__call__' and context.module.name == middle and isinstance(context.module, Block):
      points.append(out.astype(jnp.float32).mean(axis=1))
    elif context.method_name == '__call__' and context.module.name == 'head':
      features.append(args[0])
    return out

  with nn.intercept_methods(intercept):
    logits = call()
  return Observed(logits, points[0], features[0])


def layers_of_tokens(model: LanguageModel, call: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
  """Call `call`, which runs a language model and returns its logits. Return the logits, and the tokens by layer.

  The tokens are float32 [B, N, D]. The names of the layers are `MIDDLE` (after the first half of the blocks), `LAST`
  (the input of stage 2 in the last block, if there is a stage 2) and `FEATURES` (the input of the head). The model
  must not use `scan_layers` (`hbf.models.build.unrolled`).
  """
  depth, found = model.trunk.depth, {}
  wanted = {
    (f'block{max(depth // 2, 1) - 1}',): MIDDLE,
    (f'block{depth - 1}', 'norm_stage2'): LAST,
    ('norm',): FEATURES,
  }

  def intercept(method: Any, args: Any, kwargs: Any, context: Any) -> Any:
    out = method(*args, **kwargs)
    if context.method_name == '__call__' and context.module.path in wanted:
      found[wanted[context.module.path]] = out.astype(jnp.float32)
    return out

  with nn.intercept_methods(intercept):
    logits = call()
  return logits, found
