"""Weights of github.com/google-research/vision_transformer: ViT and MLP-Mixer, as published in .npz files.

The source files are vit_jax/models_vit.py, models_mixer.py and checkpoint.py at the commit c6de1e5 of 2024-05-21. In
published files, all layers of a ViT's block are numbered together (LayerNorm_0, MultiHeadDotProductAttention_1,
LayerNorm_2, MlpBlock_3). The code at that commit numbers each kind of layer from 0. Both can be read. The published
networks take images with values from −1 to 1, so set data.mean and data.std to 0.5.
"""

import functools
import pathlib

import numpy as np

from hbf.errors import UserError
from hbf.interop.network import Network, mixer_config, read_file, read_fixed, to_module, vit_config
from hbf.interop.positions import resize, square_side
from hbf.interop.table import ParameterSource, Params, Table, Tensors, class_token, patch_positions, same
from hbf.models.classifier import ImageClassifier

_POSITIONS = 'Transformer/posembed_input/pos_embedding'


def load(path: str | pathlib.Path) -> tuple[ImageClassifier, dict[str, Params]]:
  """Load a network of Google's code as a Flax module.

  Args:
    path: a published .npz file, or a .safetensors or .pth file with the same names.

  Returns:
    module and variables: `module.apply(variables, images, train=False)` returns logits [batch, classes]. Images are
    float32 [batch, height, width, 3], normalized like the training images of the network. A ViT takes images of any
    size that its patches divide, see `hbf.interop.positions.resize`.

  Raises:
    UserError: the file cannot be read, or has another kind of network. The message lists the tensors that do not fit.
  """
  return to_module(read_file(pathlib.Path(path), read))


def read(tensors: Tensors) -> Network:
  """Return the ViT or Mixer that has these tensors. Errors are as in `load`."""
  is_mixer = any(name.startswith(('MixerBlock_', 'stem/')) for name in tensors)
  if is_mixer:
    return read_fixed(_MIXER, tensors, functools.partial(mixer_config, activation='gelu'))
  return _read_vit(tensors)


def _read_vit(tensors: Tensors) -> Network:
  if any(name.startswith('pre_logits/') for name in tensors):
    raise UserError(
      "it is one of Google's ViTs of 2020 for ImageNet-21k, which have another layer before the head (pre_logits): "
      'hbf has no such layer; use one that was fine-tuned, or one of "How to train your ViT?"'
    )
  by_kind = any('/MlpBlock_0/' in name for name in tensors)
  table = _vit('cls' in tensors, *((0, 1, 0) if by_kind else (1, 2, 3)))
  sizes, params = table.read(tensors)
  if sizes['H'] * sizes['d'] != sizes['D']:
    raise UserError(f'its width of {sizes["D"]} is not {sizes["H"]} heads of {sizes["d"]} dimensions')
  pool = 'cls' if 'cls' in tensors else 'mean'
  return Network(
    origin=table.origin,
    config=vit_config(sizes, sizes['H'], 'gelu', pool),
    params=params,
    channels=sizes['channels'],
    classes=sizes['classes'],
    patches=square_side(len(params['positions'])) ** 2,
    resize=resize,
  )


def _dense(ours: str, theirs: str, inputs: str, outputs: str) -> dict[str, ParameterSource]:
  return {
    **same(f'{ours}/kernel', f'{theirs}/kernel', inputs, outputs),
    **same(f'{ours}/bias', f'{theirs}/bias', outputs),
  }


def _norm(ours: str, theirs: str) -> dict[str, ParameterSource]:
  return {**same(f'{ours}/scale', f'{theirs}/scale', 'D'), **same(f'{ours}/bias', f'{theirs}/bias', 'D')}


def _patches(theirs: str) -> dict[str, ParameterSource]:
  """Return how the patch embedding's kernel and bias are made from Google's convolution `theirs`.

  The kernel of the convolution has the shape [row, column, channel, D].
  """
  kernel = ParameterSource(
    {f'{theirs}/kernel': ('patch', 'patch', 'channels', 'D')}, lambda z: z.reshape(-1, z.shape[-1])
  )
  return {'embedding/kernel': kernel, **same('embedding/bias', f'{theirs}/bias', 'D')}


def _attention(theirs: str) -> dict[str, ParameterSource]:
  """Return how the parameters of stage 1, which is attention, are made from Google's layer `theirs`.

  The layer's kernels for queries, keys and values have the shape [D, H, d]. The kernel of the output has the shape
  [H, d, D].
  """
  projections = [f'{theirs}/{name}' for name in ('query', 'key', 'value')]
  return {
    'stage1/qkv/kernel': ParameterSource(
      {f'{name}/kernel': ('D', 'H', 'd') for name in projections}, _concatenate_kernels
    ),
    'stage1/qkv/bias': ParameterSource({f'{name}/bias': ('H', 'd') for name in projections}, _concatenate_biases),
    'stage1/out/kernel': ParameterSource(
      {f'{theirs}/out/kernel': ('H', 'd', 'D')}, lambda z: z.reshape(-1, z.shape[-1])
    ),
    **same('stage1/out/bias', f'{theirs}/out/bias', 'D'),
  }


def _concatenate_kernels(*kernels: np.ndarray) -> np.ndarray:
  return np.stack(kernels, axis=1).reshape(len(kernels[0]), -1)


def _concatenate_biases(*biases: np.ndarray) -> np.ndarray:
  return np.stack(biases).reshape(-1)


def _vit(has_class_token: bool, attention: int, norm: int, mlp: int) -> Table:
  """Return the table of a ViT whose layers have the given numbers in their names.

  Args:
    has_class_token: True if the head reads a class token. Otherwise it reads the mean of the patches.
    attention: number at the end of the attention layer's name.
    norm: number at the end of the second LayerNorm's name.
    mlp: number at the end of the MLP's name.
  """
  positions = {_POSITIONS: (1, 'N', 'D')}
  tokens = {'positions': ParameterSource(positions, lambda z: z[0])}
  if has_class_token:
    tokens = {
      'class_token': ParameterSource({'cls': (1, 1, 'D'), **positions}, class_token),
      'positions': ParameterSource(positions, patch_positions),
    }
  return Table(
    origin="Google's ViT",
    network={
      **_patches('embedding'),
      **tokens,
      **_norm('norm', 'Transformer/encoder_norm'),
      **_dense('head', 'head', 'D', 'classes'),
    },
    block={
      **_norm('norm_stage1', 'LayerNorm_0'),
      **_attention(f'MultiHeadDotProductAttention_{attention}'),
      **_norm('norm_stage2', f'LayerNorm_{norm}'),
      **_dense('stage2/hidden', f'MlpBlock_{mlp}/Dense_0', 'D', 'hidden'),
      **_dense('stage2/out', f'MlpBlock_{mlp}/Dense_1', 'hidden', 'D'),
    },
    prefix='Transformer/encoderblock_{}/',
  )


_MIXER = Table(
  origin="Google's Mixer",
  network={
    **_patches('stem'),
    **_norm('norm', 'pre_head_layer_norm'),
    **_dense('head', 'head', 'D', 'classes'),
  },
  block={
    **_norm('norm_stage1', 'LayerNorm_0'),
    **_dense('stage1/hidden', 'token_mixing/Dense_0', 'N', 'tokens'),
    **_dense('stage1/out', 'token_mixing/Dense_1', 'tokens', 'N'),
    **_norm('norm_stage2', 'LayerNorm_1'),
    **_dense('stage2/hidden', 'channel_mixing/Dense_0', 'D', 'hidden'),
    **_dense('stage2/out', 'channel_mixing/Dense_1', 'hidden', 'D'),
  },
  prefix='MixerBlock_{}/',
)
