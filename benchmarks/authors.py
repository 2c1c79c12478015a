"""Training speed of HyperBF against the authors' PyTorch code, in images a second.

python -m benchmarks.authors          # needs PyTorch: pip install torch

Both sides take whole training steps (forward, cross-entropy, backward, AdamW) in float32 on the same images, in one
process and in turn. `Authors` has the arithmetic of Hyper_ViT in main.py of
github.com/sunrainyg/Unified_architecture (2023-10-31), and runs eagerly as there. It is compared with two models of
this library: the default, and one of exactly its form. PyTorch multiplies float32 at full precision. On a GPU, JAX
does so only for distances.
"""

import dataclasses
import os
import sys
from typing import Any

os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')  # PyTorch needs a part of the GPU's memory

import jax
import numpy as np

from benchmarks import common
from benchmarks.models import CLASSES, Trainer, compile_trainer, random_batch
from hbf.config.recipes import make_config
from hbf.config.resolve import resolve
from hbf.training.machine import keep_freed_memory

try:
  import torch
  from torch import nn
  from torch.nn import functional
except ImportError:
  sys.exit('error: this benchmark needs PyTorch: pip install torch')

IMAGE, PATCH = 32, 4
# Options of the authors' form, which also has a bias in the output of stage 2.
AUTHORS_STAGE1 = {'metric': 'bilinear', 'sigma_per': 'layer'}
AUTHORS_STAGE2 = {'metric': 'bilinear', 'sigma_per': 'center', 'normalization': 'none'}


@dataclasses.dataclass(frozen=True)
class Size:
  """Sizes of a model and of its batch."""

  width: int
  depth: int
  heads: int
  centers: int
  batch: int


SIZES = {192: Size(192, 4, 3, 4 * 192, 128), 768: Size(768, 4, 4, 2 * 768, 32)}


def squared_distances(points: torch.Tensor, centers: torch.Tensor, metric: torch.Tensor) -> torch.Tensor:
  """Compute the distances xᵀMx + tᵀMt − 2xᵀMt [..., N, A] from points [..., N, d] to centers [..., A, d]."""
  mapped = points @ metric
  own = (points * mapped).sum(dim=-1, keepdim=True)
  theirs = (centers * (centers @ metric)).sum(dim=-1)
  return own + theirs.unsqueeze(-2) - 2 * mapped @ centers.transpose(-2, -1)


class AuthorsAttention(nn.Module):
  """An attention by the softmax of −scale · squared distance. All heads of a layer share one metric and one scale."""

  def __init__(self, width: int, heads: int):
    super().__init__()
    self.heads = heads
    self.scale = nn.Parameter(torch.tensor((width // heads) ** -0.5))
    self.metric = nn.Parameter(torch.eye(width // heads))
    self.qkv = nn.Linear(width, 3 * width, bias=False)
    self.out = nn.Linear(width, width)

  def forward(self, tokens: torch.Tensor) -> torch.Tensor:
    """Map tokens [B, N, D] to outputs [B, N, D]."""
    batch, length, width = tokens.shape
    q, k, v = self.qkv(tokens).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
    weights = (-squared_distances(q, k, self.metric) * self.scale).softmax(dim=-1)
    return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class AuthorsUnit(nn.Module):
  """A stage 2 that computes exp(−β · squared distance to the centers), and then a linear layer."""

  def __init__(self, width: int, centers: int):
    super().__init__()
    self.centers = nn.Parameter(torch.randn(centers, width))
    self.metric = nn.Parameter(torch.eye(width))
    # Not the published 0.1, which makes every response 0. Products of zeros and denormals have another speed.
    self.beta = nn.Parameter(torch.full((centers,), 0.5 / width))
    self.out = nn.Linear(centers, width)

  def forward(self, tokens: torch.Tensor) -> torch.Tensor:
    """Map tokens [B, N, D] to outputs [B, N, D]."""
    return self.out(torch.exp(-self.beta.unsqueeze(0) * squared_distances(tokens, self.centers, self.metric)))


class AuthorsBlock(nn.Module):
  """A block of both stages, with pre-norm and residual connections."""

  def __init__(self, width: int, heads: int, centers: int):
    super().__init__()
    self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
    self.attention, self.unit = AuthorsAttention(width, heads), AuthorsUnit(width, centers)

  def forward(self, tokens: torch.Tensor) -> torch.Tensor:
    """Map tokens [B, N, D] to outputs [B, N, D]."""
    tokens = tokens + self.attention(self.norm1(tokens))
    return tokens + self.unit(self.norm2(tokens))


class Authors(nn.Module):
  """Hyper_ViT with positions for exactly the images' patches. The published code interpolates them at every step."""

  def __init__(self, size: Size):
    super().__init__()
    self.patches = nn.Conv2d(3, size.width, kernel_size=PATCH, stride=PATCH)
    self.class_token = nn.Parameter(torch.zeros(1, 1, size.width))
    self.positions = nn.Parameter(0.02 * torch.randn(1, (IMAGE // PATCH) ** 2 + 1, size.width))
    self.blocks = nn.Sequential(*(AuthorsBlock(size.width, size.heads, size.centers) for _ in range(size.depth)))
    self.norm = nn.LayerNorm(size.width)
    self.head = nn.Linear(size.width, CLASSES)

  def forward(self, images: torch.Tensor) -> torch.Tensor:
    """Return the logits [B, classes] of images [B, 3, height, width]."""
    patches = self.patches(images).flatten(2).transpose(1, 2)
    tokens = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1) + self.positions
    return self.head(self.norm(self.blocks(tokens))[:, 0])


def our_step(size: Size, **stages: dict[str, Any]) -> Trainer:
  """Return a trainer of HyperBF with these options of its stages.

  The step normalizes images but does not augment them.
  """
  config = resolve(make_config('model=hyperbf,recipe=memo', {'name': 'cifar10', 'transforms': ()}))
  config.model.update(width=size.width, depth=size.depth, heads=size.heads, patch=PATCH)
  config.model.stage2.centers = size.centers
  config.model.update(stages)
  return compile_trainer(config, IMAGE, size.batch)


def their_step(size: Size) -> common.Thunk:
  """Return a function that takes a training step of `Authors`, with the optimizer of recipe memo."""
  device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
  torch.manual_seed(0)
  model = Authors(size).to(device)
  optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
  examples = jax.tree.map(np.array, random_batch(size.batch, IMAGE))
  pixels = (examples['image'].astype(np.float32) / 255 - np.float32(0.5)) / np.float32(0.25)
  images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().to(device)
  labels = torch.from_numpy(examples['label']).long().to(device)

  def take() -> float:
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()  # waits for the device, like the authors' loop

  return take


def measure(size: Size, rounds: int) -> list[dict[str, Any]]:
  """Return a row for each model. Each ratio is that of two times in the same round."""
  thunks: dict[str, common.Thunk] = {
    'authors (PyTorch)': their_step(size),
    'ours, their form': our_step(size, stage1=AUTHORS_STAGE1, stage2=AUTHORS_STAGE2),
    'ours, default': our_step(size),
  }
  seconds = common.alternate(thunks, rounds)
  theirs = seconds['authors (PyTorch)']
  return [
    {
      'width': size.width,
      'batch': size.batch,
      'model': name,
      'images/s': common.spread([size.batch / s for s in times], digits=1),
      'ours/theirs': common.spread(common.ratios(theirs, times)),
    }
    for name, times in seconds.items()
  ]


def main() -> None:
  """Run the benchmark."""
  flags = common.parser(__doc__.splitlines()[0])
  flags.add_argument('--width', type=int, choices=SIZES, nargs='+', default=list(SIZES), help='widths of the models')
  arguments = flags.parse_args()
  keep_freed_memory()
  rows = [row for width in arguments.width for row in measure(SIZES[width], arguments.rounds)]
  title = f'Training steps, float32, PyTorch {torch.__version__}: median (quartiles)'
  common.report('authors', title, rows, arguments.out)


if __name__ == '__main__':
  main()
