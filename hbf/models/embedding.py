"""Embedding of images as tokens with positions. Each patch becomes a token, by a linear map or by convolutions."""

from collections.abc import Callable
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from hbf.errors import UserError
from hbf.nn.checked import CheckedModule
from hbf.nn.context import grid_positions
from hbf.nn.dropout import Dropout
from hbf.nn.tiles import tiles
from hbf.ops.layout import as_rows_of, laid_out_by_xla
from hbf.options import FLAG, FLOATS, RATE, OptionError, one_of, whole

# The ways to pool tokens for the head: True if the head gets a class token, False if it gets all tokens.
POOLS = {'cls': True, 'mean': False, 'sequence': False}
# Names of parameters that never change, without the names of their modules. No gradient reaches them, and they do not
# count as learned.
FROZEN = ('whitening',)
_LEAST_VARIANCE = 5e-4  # added to the variances that whitening divides by, as in airbench


class PatchEmbedding(CheckedModule):
  """Patches of an image as tokens, with their positions (Dosovitskiy et al. 2021).

  Attributes:
    width: D, a token's dimensions.
    patch: side of a square patch in pixels, a divisor of the image's height and width.
    pool: 'cls': a class token comes first, and the head reads this token. 'mean' or 'sequence': the head reads the
      mean or the weighted mean of all patches (`hbf.models.classifier.ImageClassifier`).
    stem: 'patch': a linear map of a patch's pixels. 'conv': log₂(patch) convolutions of 3×3 with a stride of 2. The
      number of channels doubles with each convolution, up to D. Between two convolutions are LayerNorm and GELU
      (after Xiao et al. 2021, whose stem has BatchNorm and ReLU, and a last convolution of 1×1).
    whiten: True to replace the first convolution of stem 'conv' by a frozen `Whitening`. GELU follows it, without
      LayerNorm.
    positions: 'learned', 'sincos2d' (fixed 2-D sines and cosines; D divisible by 4) or 'none'.
    dropout: dropout rate of the tokens.
    dtype: type of the matrix products. Parameters are float32.
  """

  width: Annotated[int, whole(1)]
  patch: Annotated[int, whole(1)]
  pool: Annotated[str, one_of(POOLS)]
  positions: Annotated[str, one_of(('learned', 'sincos2d', 'none'))]
  dropout: Annotated[float, RATE] = 0.0
  dtype: Annotated[Any, FLOATS] = jnp.float32
  stem: Annotated[str, one_of(('patch', 'conv'))] = 'patch'
  whiten: Annotated[bool, FLAG] = False

  @property
  def read(self) -> slice:
    """The slice of the tokens that the head reads."""
    return slice(0, 1) if POOLS[self.pool] else slice(None)

  @nn.compact
  def __call__(
    self, images: Float[Array, 'B height width channels'], train: bool
  ) -> tuple[Float[Array, 'B N D'], Float[Array, 'N 2']]:
    """Map images [B, height, width, channels] to tokens [B, N, D] and positions [N, 2].

    A position is the row and the column of a patch, counted in patches. The position of a class token is NaN.

    Raises:
      UserError: the images have no four axes, the patch doesn't divide them, or an option's value is unknown.
    """
    if images.ndim != 4:
      hint = {2: ', such as images[None, :, :, None]', 3: ', such as images[None] for one image'}.get(images.ndim, '')
      raise UserError(f'images have shape {list(images.shape)}: expected [B, height, width, channels]{hint}')
    if self.whiten and (self.stem != 'conv' or self.patch < 4):
      raise OptionError(
        'whiten fixes the first of two convolutions or more: it needs stem conv and a patch of 4 or more; they are '
        f'{self.stem} and {self.patch}',
        stem=self.stem,
        patch=self.patch,
      )
    inputs = self._convolved(images) if self.stem == 'conv' else to_patches(images, self.patch)
    batch, rows, columns, numbers = inputs.shape
    coordinates = grid_positions(rows, columns)
    tokens = nn.Dense(self.width, dtype=self.dtype, name='embedding')(inputs.reshape(-1, numbers))
    tokens = tokens.reshape(batch, rows * columns, self.width) + self._positions(coordinates)
    if POOLS[self.pool]:
      token = self.param('class_token', nn.initializers.normal(0.02), (1, 1, self.width), jnp.float32)
      tokens = jnp.concatenate([as_rows_of(tokens[:, :1], token.astype(tokens.dtype)), tokens], axis=1)
      coordinates = np.concatenate([np.full((1, 2), np.nan, np.float32), coordinates])
    return Dropout(self.dropout, deterministic=not train)(tokens), jnp.asarray(coordinates)

  def _convolved(self, images: jax.Array) -> jax.Array:
    """Return for each patch the inputs [B, rows, columns, 9 · channels] of the stem's last convolution."""
    _check_patch(images, self.patch)
    halvings = self.patch.bit_length() - 1
    if self.patch != 2**halvings or not halvings or self.width % self.patch:
      raise OptionError(
        'stem conv halves the image until a token is left of each patch, with channels that double up to the width: '
        f'the patch must be 2, 4, 8, … and divide the width; they are {self.patch} and {self.width}',
        patch=self.patch,
        width=self.width,
      )
    channels, z = 2 * self.width // self.patch, images
    for i in range(halvings - 1):
      around = neighborhoods(z)
      if self.whiten and i == 0:
        z = nn.gelu(Whitening(dtype=self.dtype, name='stem0')(around))
        continue
      z = nn.Dense(channels << i, dtype=self.dtype, name=f'stem{i}')(around.reshape(-1, around.shape[-1]))
      z = nn.gelu(nn.LayerNorm(dtype=self.dtype, name=f'norm_stem{i}')(z)).reshape(*around.shape[:3], channels << i)
    return neighborhoods(z)

  def _positions(self, coordinates: np.ndarray) -> jax.Array:
    """Return the position vectors [N, D] of patches at coordinates [N, 2]. They are added to the tokens."""
    shape = (len(coordinates), self.width)
    makers: dict[str, Callable[[], Any]] = {
      'learned': lambda: self.param('positions', nn.initializers.normal(0.02), shape, jnp.float32),
      'sincos2d': lambda: sincos(coordinates, self.width),
      'none': lambda: np.zeros(shape),
    }
    return jnp.asarray(makers[self.positions](), self.dtype or jnp.float32)


class Whitening(nn.Module):
  """A frozen linear map of windows of 3×3 pixels to uncorrelated channels and to the negatives of these channels.

  The windows are those of the stem's first convolution (`neighborhoods`). The map is computed from the images seen at
  initialization, so that the channels have variance 1 (Jordan 2024, section 3.2). A learned bias is added.

  Attributes:
    dtype: type of the matrix product. Parameters are float32.
  """

  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, windows: Float[Array, 'B rows columns K']) -> Float[Array, 'B rows columns 2*K']:
    """Map windows [B, rows, columns, K] to [B, rows, columns, 2 K]."""
    # Once the parameter exists, Flax uses the initializer for its shape only, so any image will do. In a program for
    # any number of images, this number is unknown.
    seen = windows if self.is_initializing() else jnp.zeros((1, *windows.shape[1:]), windows.dtype)
    start = self.param('whitening', lambda _: laid_out_by_xla(whitening, PartitionSpec(), seen))
    kernel = jax.lax.stop_gradient(start)
    bias = self.param('bias', nn.initializers.zeros_init(), kernel.shape[1:], jnp.float32)
    flat = windows.reshape(-1, windows.shape[-1]).astype(self.dtype)
    z = flat @ kernel.astype(self.dtype) + bias.astype(self.dtype)
    return z.reshape(*windows.shape[:-1], kernel.shape[1])


def whitening(windows: Float[Array, 'B rows columns K']) -> Float[Array, 'K 2*K']:
  """Return the matrix of `Whitening`: K columns that whiten windows, then the negatives of these columns.

  Each of the K columns is an eigenvector of the windows' matrix of second moments, divided by √(eigenvalue + 5·10⁻⁴).

  Args:
    windows: the windows of 3×3 pixels of B images, [B, rows, columns, K]. Windows in the first row or column contain
      zeros from outside the image, and are left out.

  Returns:
    [K, 2 K], float32.
  """
  flat = windows[:, 1:, 1:].reshape(-1, windows.shape[-1]).astype(jnp.float32)
  moments = jnp.matmul(flat.T, flat, precision='highest') / flat.shape[0]
  variances, vectors = jnp.linalg.eigh(moments)
  scaled = vectors * jax.lax.rsqrt(jnp.maximum(variances, 0) + _LEAST_VARIANCE)
  return jnp.concatenate([scaled, -scaled], axis=1)


def to_patches(images: Float[Array, 'B H W C'], patch: int) -> Float[Array, 'B rows columns K']:
  """Cut images [B, H, W, C] into patches [B, H/patch, W/patch, patch · patch · C].

  Raises:
    UserError: the patch doesn't divide the height and width.
  """
  _check_patch(images, patch)
  patches = tiles(images, patch, patch)
  return patches.reshape(*patches.shape[:3], patch * patch * images.shape[3])  # JAX refuses −1 without images


def neighborhoods(z: Float[Array, 'B H W C']) -> Float[Array, 'B _ _ _']:
  """Return the windows [B, H/2, W/2, 9 C] of a padded 3×3 convolution of z [B, H, W, C] with a stride of 2.

  Output (i, j) has the window of rows 2i − 1 to 2i + 1 and columns 2j − 1 to 2j + 1. The convolution is then a
  product with a kernel [9 C, D], which is a kernel [3, 3, C, D] reshaped. This product trains faster on a CPU than
  XLA's own convolutions.
  """
  _, height, width, _ = z.shape
  padded = jnp.pad(z, ((0, 0), (1, 0), (1, 0), (0, 0)))
  parts = [padded[:, i : i + height : 2, j : j + width : 2] for i in range(3) for j in range(3)]
  return jnp.concatenate(parts, axis=-1)


def _check_patch(images: jax.Array, patch: int) -> None:
  height, width = images.shape[1:3]
  if height % patch or width % patch:
    raise OptionError(f"patches of {patch} pixels don't divide images of {height}×{width}: change it", patch=patch)


def sincos(coordinates: np.ndarray, width: int) -> np.ndarray:
  """Return sines and cosines [N, width] of coordinates [N, P]. The columns of the last coordinate come first.

  With one coordinate (texts), these are the positions of Vaswani et al. 2017, section 3.5. With row and column
  (images), they are those of Beyer et al. 2022. Frequencies are 1 to 1/10,000.

  Raises:
    UserError: the width is not divisible by 2P.
  """
  parts = 2 * coordinates.shape[1]
  if width % parts:
    raise OptionError(f'positions of sines and cosines need a width divisible by {parts}: it is {width}', width=width)
  frequencies = 10_000.0 ** -np.linspace(0, 1, width // parts)
  angles = [z[:, None] * frequencies for z in coordinates.T[::-1]]
  return np.concatenate([wave(z) for z in angles for wave in (np.sin, np.cos)], axis=-1).astype(np.float32)
