"""The authors' network in PyTorch, as a model to train beside others (`benchmarks.peers`).

`Authors` has the arithmetic of Hyper_ViT in main.py of github.com/sunrainyg/Unified_architecture (2023-10-31).
"""

import torch
from torch import nn


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

  def __init__(self, width: int, depth: int, heads: int, centers: int, image: int, patch: int, classes: int):
    super().__init__()
    self.patches = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
    self.class_token = nn.Parameter(torch.zeros(1, 1, width))
    self.positions = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2 + 1, width))
    self.blocks = nn.Sequential(*(AuthorsBlock(width, heads, centers) for _ in range(depth)))
    self.norm = nn.LayerNorm(width)
    self.head = nn.Linear(width, classes)

  def forward(self, images: torch.Tensor) -> torch.Tensor:
    """Return the logits [B, classes] of images [B, 3, height, width]."""
    patches = self.patches(images).flatten(2).transpose(1, 2)
    tokens = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1) + self.positions
    return self.head(self.norm(self.blocks(tokens))[:, 0])
