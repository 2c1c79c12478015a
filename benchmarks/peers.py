"""Training speed beside other libraries, in images a second.

python -m benchmarks.peers                             # needs pip install torch timm vit-pytorch
python -m benchmarks.peers --width 64 192 --patch 2    # 256 tokens instead of 64

All models take whole training steps (forward, cross-entropy, backward, AdamW) in float32 on the same images, in one
process and in turn. The rivals are plain ViTs of the same sizes (timm, vit-pytorch, and one of Flax's own layers) and
the authors' network. PyTorch runs eagerly, as its users do by default, with its own number of threads. Two models of
this library have the form of a rival: `ours, timm's form`, and `ours, authors' form`. In this form they have a class
token if and only if the rival has one. The other two of this library have none. PyTorch multiplies float32 at full
precision. On a GPU, JAX does so only for distances.
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')  # PyTorch needs a part of the GPU's memory

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import common
from benchmarks.models import CIFAR, CLASSES, make_trainer, random_batch
from hbf.training.machine import keep_freed_memory

try:
  import timm
  import torch
  import vit_pytorch
  from torch.nn import functional

  from benchmarks.authors import Authors
except ImportError:
  sys.exit('error: this benchmark needs other libraries: pip install torch timm vit-pytorch')

IMAGE = CIFAR[0]
RATE, DECAY = 1e-4, 0.01  # of recipe memo
# Options of our models in the form of others. The authors' network has a class token, and also a bias in the output
# of stage 2. The other networks have the mean of the tokens for the head.
AUTHORS_FORM = {
  'stage1': {'metric': 'bilinear', 'sigma_per': 'layer'},
  'stage2': {'metric': 'bilinear', 'sigma_per': 'center', 'normalization': 'none'},
}
TIMM_FORM = {'pool': 'mean', 'stage1': {'qkv_bias': True}, 'stage2': {'activation': 'gelu_erf'}}


class Size(NamedTuple):
  """Sizes of a model, of its batch and of its patches.

  `hidden` is the number of centers, or of an MLP's hidden units. `patch` is the side of a patch.
  """

  width: int
  depth: int
  heads: int
  hidden: int
  batch: int
  patch: int = 4


SIZES = {64: Size(64, 4, 4, 4 * 64, 256), 192: Size(192, 4, 3, 4 * 192, 128), 768: Size(768, 4, 4, 2 * 768, 32)}


class FlaxBlock(flax.linen.Module):
  """A ViT's block of Flax's own layers."""

  heads: int
  hidden: int

  @flax.linen.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    """Map tokens [B, N, D] to outputs [B, N, D]."""
    normed = flax.linen.LayerNorm()(tokens)
    tokens = tokens + flax.linen.MultiHeadDotProductAttention(self.heads)(normed)
    hidden = flax.linen.gelu(flax.linen.Dense(self.hidden)(flax.linen.LayerNorm()(tokens)))
    return tokens + flax.linen.Dense(tokens.shape[-1])(hidden)


class FlaxViT(flax.linen.Module):
  """A ViT of Flax's own layers, with a learned position for each patch and the mean of the tokens for the head."""

  size: Size

  @flax.linen.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    """Return the logits [B, classes] of images [B, height, width, 3]."""
    patches = flax.linen.Conv(self.size.width, (self.size.patch, self.size.patch), strides=self.size.patch)(images)
    tokens = patches.reshape(len(images), -1, self.size.width)
    tokens += self.param('positions', flax.linen.initializers.normal(0.02), tokens.shape[1:])
    for _ in range(self.size.depth):
      tokens = FlaxBlock(self.size.heads, self.size.hidden)(tokens)
    return flax.linen.Dense(CLASSES)(flax.linen.LayerNorm()(tokens).mean(axis=1))


def normalized(batch: int) -> tuple[np.ndarray, np.ndarray]:
  """Return random images, normalized, and their labels."""
  examples = jax.tree.map(np.array, random_batch(batch, CIFAR))
  return (examples['image'].astype(np.float32) / 255 - np.float32(0.5)) / np.float32(0.25), examples['label']


def our_step(model: str, size: Size, **keys: Any) -> common.Thunk:
  """Return a function that takes a training step of our model, with these keys of the config's model part.

  The step normalizes the images but does not augment them.
  """
  width, depth, heads, hidden, batch, patch = size
  return make_trainer(model, width, depth, heads, hidden, batch, data={'transforms': ()}, patch=patch, **keys)


def flax_step(size: Size) -> common.Thunk:
  """Return a function that takes a compiled training step of `FlaxViT`."""
  examples = tuple(map(jnp.asarray, normalized(size.batch)))
  model, optimizer = FlaxViT(size), optax.adamw(RATE, weight_decay=DECAY)
  params = model.init(jax.random.key(0), examples[0])

  def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, images), labels).mean()

  @functools.partial(jax.jit, donate_argnums=0)
  def step(state: Any, images: jax.Array, labels: jax.Array) -> Any:
    params, opt_state = state
    updates, opt_state = optimizer.update(jax.grad(loss)(params, images, labels), opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  states = [(params, optimizer.init(params))]

  def take() -> Any:
    # The images are arguments, as they are for our models. Otherwise they would be constants of the program.
    states.append(step(states.pop(), *examples))
    return states[-1]

  return take


def torch_step(model: Any, size: Size) -> common.Thunk:
  """Return a function that takes a training step of a PyTorch module."""
  device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
  model = model.to(device)
  optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
  pixels, labels = map(torch.from_numpy, normalized(size.batch))
  images, labels = pixels.permute(0, 3, 1, 2).contiguous().to(device), labels.long().to(device)

  def take() -> float:
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()  # waits for the device

  return take


def timm_vit(size: Size) -> Any:
  """Return timm's ViT, with the mean of the tokens for the head."""
  return timm.models.vision_transformer.VisionTransformer(
    img_size=IMAGE,
    patch_size=size.patch,
    num_classes=CLASSES,
    embed_dim=size.width,
    depth=size.depth,
    num_heads=size.heads,
    mlp_ratio=size.hidden / size.width,
    class_token=False,
    global_pool='avg',
    fc_norm=False,
  )


def lucidrains_vit(size: Size) -> Any:
  """Return vit-pytorch's ViT, with the mean of the tokens for the head."""
  return vit_pytorch.ViT(
    image_size=IMAGE,
    patch_size=size.patch,
    num_classes=CLASSES,
    dim=size.width,
    depth=size.depth,
    heads=size.heads,
    dim_head=size.width // size.heads,
    mlp_dim=size.hidden,
    pool='mean',
  )


def authors(size: Size) -> Any:
  """Return the authors' network."""
  return Authors(size.width, size.depth, size.heads, size.hidden, IMAGE, size.patch, CLASSES)


OURS = 'ours, HyperBF'
STEPS: dict[str, Callable[[Size], common.Thunk]] = {
  'timm, ViT': lambda size: torch_step(timm_vit(size), size),
  'vit-pytorch, ViT': lambda size: torch_step(lucidrains_vit(size), size),
  'authors (PyTorch)': lambda size: torch_step(authors(size), size),
  "Flax's layers, ViT": flax_step,
  "ours, authors' form": lambda size: our_step('hyperbf', size, **AUTHORS_FORM),
  "ours, timm's form": lambda size: our_step('vit', size, **TIMM_FORM),
  'ours, positional': lambda size: our_step('positional', size, pool='mean'),
  OURS: lambda size: our_step('hyperbf', size, pool='mean'),
}


def measure(size: Size, rounds: int) -> list[dict[str, Any]]:
  """Return a row for each model. Each ratio is that of two times in the same round."""
  torch.manual_seed(0)
  seconds = common.alternate({name: make(size) for name, make in STEPS.items()}, rounds)
  return [
    {
      'width': size.width,
      'batch': size.batch,
      'model': name,
      'images/s': common.spread([size.batch / s for s in times], digits=1),
      'time / HyperBF': common.spread(common.ratios(times, seconds[OURS])),
    }
    for name, times in seconds.items()
  ]


def main() -> None:
  """Print a row for every width and model."""
  flags = common.parser(__doc__.splitlines()[0])
  flags.add_argument('--width', type=int, choices=SIZES, nargs='+', default=list(SIZES), help='widths of the models')
  flags.add_argument('--patch', type=int, default=4, choices=(2, 4, 8, 16), help='side of a patch')
  arguments = flags.parse_args()
  keep_freed_memory()
  sizes = [SIZES[width]._replace(patch=arguments.patch) for width in arguments.width]
  rows = [row for size in sizes for row in measure(size, arguments.rounds)]
  libraries = f'PyTorch {torch.__version__}, timm {timm.__version__}'
  title = f'Training steps, patch {arguments.patch}, float32, {libraries}: median (quartiles)'
  common.report('peers', title, rows, arguments.out)


if __name__ == '__main__':
  common.launch(main)
