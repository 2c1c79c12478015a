"""Hyper_ViT and ViT as the authors' code states them: float64, image by image, sharing nothing with `hbf`.

t holds the tensors of a state_dict by name; in a linear layer of weight w and bias b, y = x wᵀ + b.
"""

import numpy as np
from ops.reference import softmax


def random_state_dict(model, optional=(), width=12, depth=2, d=4, hidden=5, patch=2, grid=3, classes=4, seed=0):
  """Return random tensors of a network. β and the scale of the attention have either sign."""
  random = np.random.default_rng(seed)
  network = {
    'cls_token': (1, 1, width),
    'pos_embed': (1, grid * grid + 1, width),
    'patch_embed.proj.weight': (width, 3, patch, patch),
    'patch_embed.proj.bias': (width,),
    **layer('norm', width),
    **linear('head', width, classes),
  }
  block = {**layer('norm1', width), **layer('norm2', width), 'attn.M': (d, d), 'attn.qkv.weight': (3 * width, width)}
  block |= linear('attn.proj', width, width)
  if model == 'vit':
    block |= {**linear('mlp.fc1', width, hidden), **linear('mlp.fc2', hidden, width)}
  else:
    block |= {'mlp.centers': (hidden, width), 'mlp.beta': (hidden,), 'mlp.fc.weight': (width, hidden)}
    shapes = {'attn.scale': (), 'mlp.M_RBF': (width, width), 'mlp.fc.bias': (width,)}
    block |= {name: shapes[name] for name in optional}
  shapes = network | {f'blocks.{i}.{name}': shape for i in range(depth) for name, shape in block.items()}
  tensors = {name: 0.5 * random.normal(size=shape) for name, shape in shapes.items()}
  for name in tensors:
    if name.endswith('beta'):
      tensors[name] /= 10  # of distances of some 2D
  return {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}


def layer(name, width):
  return {f'{name}.weight': (width,), f'{name}.bias': (width,)}


def linear(name, inputs, outputs):
  return {f'{name}.weight': (outputs, inputs), f'{name}.bias': (outputs,)}


def logits(t, images, heads):
  """Return the logits [batch, classes] of images [batch, height, width, 3]."""
  t = {name: np.asarray(tensor, np.float64) for name, tensor in t.items()}
  return np.array([network(t, np.asarray(image, np.float64), heads) for image in images])


def network(t, image, heads):
  weight = t['patch_embed.proj.weight']
  p = weight.shape[-1]
  rows, columns = image.shape[0] // p, image.shape[1] // p
  tokens = [t['cls_token'][0, 0] + t['pos_embed'][0, 0]]
  positions = resized(t['pos_embed'][0, 1:], rows, columns)
  for i in range(rows):
    for j in range(columns):
      square = image[i * p : (i + 1) * p, j * p : (j + 1) * p]
      embedded = np.einsum('dcij,ijc->d', weight, square) + t['patch_embed.proj.bias']
      tokens.append(embedded + positions[i, j])
  x = np.array(tokens)
  i = 0
  while f'blocks.{i}.norm1.weight' in t:
    b = {name.removeprefix(f'blocks.{i}.'): tensor for name, tensor in t.items()}
    x = x + attention(b, norm(b, 'norm1', x), heads)
    x = x + stage2(b, norm(b, 'norm2', x))
    i += 1
  return norm(t, 'norm', x)[0] @ t['head.weight'].T + t['head.bias']


def norm(t, name, x):
  """Compute PyTorch's layer norm `name` of x."""
  variance = x.var(-1, keepdims=True)
  return (x - x.mean(-1, keepdims=True)) / np.sqrt(variance + 1e-5) * t[f'{name}.weight'] + t[f'{name}.bias']


def distances(x, centers, metric):
  """Return xᵀMx + tᵀMt − 2xᵀMt [points, centers] for each pair of a point x and a center t."""
  return np.array([[a @ metric @ a + b @ metric @ b - 2 * a @ metric @ b for b in centers] for a in x])


def attention(b, x, heads):
  qkv = (x @ b['attn.qkv.weight'].T).reshape(len(x), 3, heads, -1)
  d = qkv.shape[-1]
  outs = []
  for h in range(heads):
    q, k, v = qkv[:, 0, h], qkv[:, 1, h], qkv[:, 2, h]
    if 'mlp.centers' in b:
      scores = -distances(q, k, b['attn.M']) * b.get('attn.scale', d**-0.5)
    else:
      scores = q @ k.T * d**-0.8
    outs.append(softmax(scores) @ v)
  return np.concatenate(outs, -1) @ b['attn.proj.weight'].T + b['attn.proj.bias']


def stage2(b, x):
  if 'mlp.fc1.weight' in b:
    hidden = np.maximum(x @ b['mlp.fc1.weight'].T + b['mlp.fc1.bias'], 0)
    return hidden @ b['mlp.fc2.weight'].T + b['mlp.fc2.bias']
  r2 = distances(x, b['mlp.centers'], b.get('mlp.M_RBF', np.eye(x.shape[-1])))
  return np.exp(-b['mlp.beta'] * r2) @ b['mlp.fc.weight'].T + b.get('mlp.fc.bias', 0)


def resized(positions, rows, columns):
  """Resize positions [grid², D] to [rows, columns, D] by cubic convolution, one new position after another."""
  grid = int(len(positions) ** 0.5)
  square = positions.reshape(grid, grid, -1)
  if rows == columns == grid:
    return square
  result = np.zeros((rows, columns, square.shape[-1]))
  for i in range(rows):
    for j in range(columns):
      for row, down in taps(i, grid, rows):
        for column, across in taps(j, grid, columns):
          result[i, j] += down * across * square[row, column]
  return result


def taps(i, old, new):
  """Return the four old points near new point i, with their weights. Points outside the grid are the edge point."""
  at = (i + 0.5) * old / (new + 0.1) - 0.5
  t = at - np.floor(at)
  a = -0.75
  weights = (
    a * (t**3 - 2 * t**2 + t),
    (a + 2) * t**3 - (a + 3) * t**2 + 1,
    -(a + 2) * t**3 + (2 * a + 3) * t**2 - a * t,
    a * (t**2 - t**3),
  )
  points = [min(max(int(np.floor(at)) + n, 0), old - 1) for n in (-1, 0, 1, 2)]
  return list(zip(points, weights, strict=True))
