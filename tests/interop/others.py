"""Google's and timm's networks as the papers state them: float64, image by image, sharing nothing with `hbf`.

t holds the tensors of a file by name. ViT: Dosovitskiy et al. 2021, eq. 1 to 4; Mixer: Tolstikhin et al. 2021, eq. 1;
gMLP: Liu et al. 2021, eq. 1 to 3. All norms are before their layers, and there is one before the head.
"""

import math

import numpy as np
from ops.reference import softmax

WIDTH, HEADS, DEPTH, HIDDEN, TOKENS, PATCH, GRID, CLASSES = 16, 2, 2, 12, 6, 4, 3, 5
N, SIDE = GRID * GRID, PATCH * GRID
erf = np.vectorize(math.erf)


def gelu(x):
  """Return Google's GELU: the tanh form."""
  return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_exact(x):
  """Return timm's GELU: x Φ(x)."""
  return 0.5 * x * (1 + erf(x / np.sqrt(2)))


def normed(x, scale, bias, epsilon=1e-6):
  variance = x.var(-1, keepdims=True)
  return (x - x.mean(-1, keepdims=True)) / np.sqrt(variance + epsilon) * scale + bias


def attended(q, k, v):
  """Return the attention of one head."""
  return softmax(q @ k.T / np.sqrt(q.shape[-1])) @ v


def attended_causally(q, k, v):
  """Return the causal attention of one head, token by token."""
  return np.array([attended(q[i : i + 1], k[: i + 1], v[: i + 1])[0] for i in range(len(q))])


def squares(image):
  """Return the patches of an image, row by row."""
  rows, columns = image.shape[0] // PATCH, image.shape[1] // PATCH
  return [
    image[i * PATCH : (i + 1) * PATCH, j * PATCH : (j + 1) * PATCH] for i in range(rows) for j in range(columns)
  ]


def logits(network, t, images):
  """Return the logits [batch, classes] of images [batch, height, width, channels]."""
  t = {name: np.asarray(tensor, np.float64) for name, tensor in t.items()}
  return np.array([network(t, np.asarray(image, np.float64)) for image in images])


def resized(positions, rows, columns):
  """Resize positions [grid², D] to [rows · columns, D], one new position after another."""
  grid = round(len(positions) ** 0.5)
  square = positions.reshape(grid, grid, -1)
  return np.array([
    np.einsum('r,c,rcd->d', interpolation_weights(i, grid, rows), interpolation_weights(j, grid, columns), square)
    for i in range(rows)
    for j in range(columns)
  ])  # fmt: skip


def interpolation_weights(i, old, new):
  """Return the weights of the `old` points for new point i (Keys 1981, eq. 4, a = −1/2).

  If there are fewer new points than old ones, the weights are wider.
  """
  stretch = max(old / new, 1)
  x = np.abs((np.arange(old) + 0.5) - (i + 0.5) * old / new) / stretch
  weights = np.where(x < 1, 1.5 * x**3 - 2.5 * x**2 + 1, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2) * (x < 2)
  return weights / weights.sum()


# Google: a layer of name n has n/kernel [in, out] and n/bias.


def google_dense(t, name, x):
  return x @ t[f'{name}/kernel'] + t[f'{name}/bias']


def google_norm(t, name, x):
  return normed(x, t[f'{name}/scale'], t[f'{name}/bias'])


def google_embedded(t, name, image):
  return np.array([
    np.einsum('ijc,ijcd->d', square, t[f'{name}/kernel']) + t[f'{name}/bias'] for square in squares(image)
  ])  # fmt: skip


def google_vit(t, image, attention=1, norm=2, mlp=3):
  x, positions = google_embedded(t, 'embedding', image), t['Transformer/posembed_input/pos_embedding'][0]
  rows, columns = image.shape[0] // PATCH, image.shape[1] // PATCH
  if 'cls' in t:
    x = np.concatenate([t['cls'][0] + positions[:1], x + resized(positions[1:], rows, columns)])
  else:
    x = x + resized(positions, rows, columns)
  for i in range(DEPTH):
    b = {name.removeprefix(f'Transformer/encoderblock_{i}/'): tensor for name, tensor in t.items()}
    a, y, outs = f'MultiHeadDotProductAttention_{attention}', google_norm(b, 'LayerNorm_0', x), 0
    for h in range(HEADS):
      q, k, v = (y @ b[f'{a}/{z}/kernel'][:, h] + b[f'{a}/{z}/bias'][h] for z in ('query', 'key', 'value'))
      outs = outs + attended(q, k, v) @ b[f'{a}/out/kernel'][h]
    x = x + outs + b[f'{a}/out/bias']
    y = gelu(google_dense(b, f'MlpBlock_{mlp}/Dense_0', google_norm(b, f'LayerNorm_{norm}', x)))
    x = x + google_dense(b, f'MlpBlock_{mlp}/Dense_1', y)
  x = google_norm(t, 'Transformer/encoder_norm', x)
  return google_dense(t, 'head', x[0] if 'cls' in t else x.mean(0))


def google_vit_by_kind(t, image):
  return google_vit(t, image, attention=0, norm=1, mlp=0)


def google_mixer(t, image):
  x = google_embedded(t, 'stem', image)
  for i in range(DEPTH):
    b = {name.removeprefix(f'MixerBlock_{i}/'): tensor for name, tensor in t.items()}
    y = google_norm(b, 'LayerNorm_0', x).T
    x = x + google_dense(b, 'token_mixing/Dense_1', gelu(google_dense(b, 'token_mixing/Dense_0', y))).T
    y = google_norm(b, 'LayerNorm_1', x)
    x = x + google_dense(b, 'channel_mixing/Dense_1', gelu(google_dense(b, 'channel_mixing/Dense_0', y)))
  return google_dense(t, 'head', google_norm(t, 'pre_head_layer_norm', x).mean(0))


# timm: a layer of name n has n.weight [out, in] and n.bias.


def timm_linear(t, name, x):
  return x @ t[f'{name}.weight'].T + t[f'{name}.bias']


def timm_norm(t, name, x, epsilon=1e-6):
  return normed(x, t[f'{name}.weight'], t[f'{name}.bias'], epsilon)


def timm_embedded(t, name, image):
  return np.array([
    np.einsum('ijc,dcij->d', square, t[f'{name}.proj.weight']) + t[f'{name}.proj.bias'] for square in squares(image)
  ])  # fmt: skip


def timm_blocks(t):
  return [{name.removeprefix(f'blocks.{i}.'): tensor for name, tensor in t.items()} for i in range(DEPTH)]


def timm_vit(t, image):
  positions = resized(t['pos_embed'][0, 1:], image.shape[0] // PATCH, image.shape[1] // PATCH)
  first = t['cls_token'][0] + t['pos_embed'][0, :1]
  x = np.concatenate([first, timm_embedded(t, 'patch_embed', image) + positions])
  for b in timm_blocks(t):
    qkv = timm_linear(b, 'attn.qkv', timm_norm(b, 'norm1', x))
    q, k, v = (np.split(z, HEADS, axis=-1) for z in np.split(qkv, 3, axis=-1))
    heads = [attended(q[h], k[h], v[h]) for h in range(HEADS)]
    x = x + timm_linear(b, 'attn.proj', np.concatenate(heads, -1))
    y = gelu_exact(timm_linear(b, 'mlp.fc1', timm_norm(b, 'norm2', x)))
    x = x + timm_linear(b, 'mlp.fc2', y)
  return timm_linear(t, 'head', timm_norm(t, 'norm', x)[0])


def timm_gmlp(t, image):
  x = timm_embedded(t, 'stem', image)
  for b in timm_blocks(t):
    y = gelu_exact(timm_linear(b, 'mlp_channels.fc1', timm_norm(b, 'norm', x)))
    kept, gate = np.split(y, 2, axis=-1)
    gate = timm_linear(b, 'mlp_channels.gate.proj', timm_norm(b, 'mlp_channels.gate.norm', gate, 1e-5).T).T
    x = x + timm_linear(b, 'mlp_channels.fc2', kept * gate)
  return timm_linear(t, 'head', timm_norm(t, 'norm', x).mean(0))


def timm_mixer(t, image):
  x = timm_embedded(t, 'stem', image)
  for b in timm_blocks(t):
    for name, turn in (('tokens', np.transpose), ('channels', np.asarray)):
      y = turn(timm_norm(b, 'norm1' if name == 'tokens' else 'norm2', x))
      y = timm_linear(b, f'mlp_{name}.fc2', gelu_exact(timm_linear(b, f'mlp_{name}.fc1', y)))
      x = x + turn(y)
  return timm_linear(t, 'head', timm_norm(t, 'norm', x).mean(0))


# Shapes of all tensors, and random ones.


def google_dense_shapes(name, inputs, outputs):
  return {f'{name}/kernel': (inputs, outputs), f'{name}/bias': (outputs,)}


def google_shapes(network, width, depth, channels, classes):
  def norm(name):
    return {f'{name}/scale': (width,), f'{name}/bias': (width,)}

  is_mixer = network is google_mixer
  shapes = {
    f'{"stem" if is_mixer else "embedding"}/kernel': (PATCH, PATCH, channels, width),
    f'{"stem" if is_mixer else "embedding"}/bias': (width,),
    **norm('pre_head_layer_norm' if is_mixer else 'Transformer/encoder_norm'),
    **google_dense_shapes('head', width, classes),
  }
  if is_mixer:
    block = {
      **norm('LayerNorm_0'),
      **norm('LayerNorm_1'),
      **google_dense_shapes('token_mixing/Dense_0', N, TOKENS),
      **google_dense_shapes('token_mixing/Dense_1', TOKENS, N),
      **google_dense_shapes('channel_mixing/Dense_0', width, HIDDEN),
      **google_dense_shapes('channel_mixing/Dense_1', HIDDEN, width),
    }
    return shapes | {f'MixerBlock_{i}/{name}': shape for i in range(depth) for name, shape in block.items()}
  shapes |= {'cls': (1, 1, width), 'Transformer/posembed_input/pos_embedding': (1, N + 1, width)}
  a, n, m = (0, 1, 0) if network is google_vit_by_kind else (1, 2, 3)
  a, d = f'MultiHeadDotProductAttention_{a}', width // HEADS
  block = {
    **norm('LayerNorm_0'),
    **norm(f'LayerNorm_{n}'),
    **{f'{a}/{z}/kernel': (width, HEADS, d) for z in ('query', 'key', 'value')},
    **{f'{a}/{z}/bias': (HEADS, d) for z in ('query', 'key', 'value')},
    f'{a}/out/kernel': (HEADS, d, width),
    f'{a}/out/bias': (width,),
    **google_dense_shapes(f'MlpBlock_{m}/Dense_0', width, HIDDEN),
    **google_dense_shapes(f'MlpBlock_{m}/Dense_1', HIDDEN, width),
  }
  return shapes | {f'Transformer/encoderblock_{i}/{name}': z for i in range(depth) for name, z in block.items()}


def timm_shapes(network, width, depth, channels, classes):
  def linear(name, inputs, outputs):
    return {f'{name}.weight': (outputs, inputs), f'{name}.bias': (outputs,)}

  def norm(name, size=width):
    return {f'{name}.weight': (size,), f'{name}.bias': (size,)}

  stem = 'patch_embed' if network is timm_vit else 'stem'
  shapes = {f'{stem}.proj.weight': (width, channels, PATCH, PATCH), f'{stem}.proj.bias': (width,)}
  shapes |= {**norm('norm'), **linear('head', width, classes)}
  if network is timm_vit:
    shapes |= {'cls_token': (1, 1, width), 'pos_embed': (1, N + 1, width)}
    block = {**norm('norm1'), **linear('attn.qkv', width, 3 * width), **linear('attn.proj', width, width)}
    block |= {**norm('norm2'), **linear('mlp.fc1', width, HIDDEN), **linear('mlp.fc2', HIDDEN, width)}
  elif network is timm_gmlp:
    block = {**norm('norm'), **linear('mlp_channels.fc1', width, 2 * HIDDEN)}
    block |= {**norm('mlp_channels.gate.norm', HIDDEN), **linear('mlp_channels.gate.proj', N, N)}
    block |= linear('mlp_channels.fc2', HIDDEN, width)
  else:
    block = {**norm('norm1'), **linear('mlp_tokens.fc1', N, TOKENS), **linear('mlp_tokens.fc2', TOKENS, N)}
    block |= {**norm('norm2'), **linear('mlp_channels.fc1', width, HIDDEN)}
    block |= linear('mlp_channels.fc2', HIDDEN, width)
  return shapes | {f'blocks.{i}.{name}': shape for i in range(depth) for name, shape in block.items()}


def random_tensors(network, width=WIDTH, depth=DEPTH, channels=3, classes=CLASSES):
  """Return random tensors of a network."""
  random = np.random.default_rng(0)
  make = google_shapes if network.__name__.startswith('google') else timm_shapes
  shapes = make(network, width, depth, channels, classes)
  return {name: (0.5 * random.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()}
