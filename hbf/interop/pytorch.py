"""Entries of tables (`hbf.interop.table`): parameters that are made from the tensors of PyTorch's layers.

A linear layer has a weight [out, in], and a convolution has a weight [out, in, row, column].
"""

import numpy as np

from hbf.interop.table import ParameterSource, class_token, patch_positions, same


def linear(ours: str, theirs: str, inputs: str, outputs: str) -> dict[str, ParameterSource]:
  """Return how the kernel and bias of the linear layer `ours` are made from PyTorch's layer `theirs`.

  `inputs` and `outputs` are the names of the layer's two sizes, such as 'D'.
  """
  kernel = ParameterSource({f'{theirs}.weight': (outputs, inputs)}, np.transpose)
  return {f'{ours}/kernel': kernel, **same(f'{ours}/bias', f'{theirs}.bias', outputs)}


def norm(ours: str, theirs: str, size: str = 'D') -> dict[str, ParameterSource]:
  """Return how the scale and bias of the LayerNorm `ours` are made from PyTorch's layer `theirs`.

  `size` is the name of the layer's size.
  """
  return {**same(f'{ours}/scale', f'{theirs}.weight', size), **same(f'{ours}/bias', f'{theirs}.bias', size)}


def patches(theirs: str) -> dict[str, ParameterSource]:
  """Return how the patch embedding's kernel and bias are made from PyTorch's convolution `theirs`."""
  kernel = ParameterSource({f'{theirs}.weight': ('D', 'channels', 'patch', 'patch')}, _flatten_patches)
  return {'embedding/kernel': kernel, **same('embedding/bias', f'{theirs}.bias', 'D')}


def _flatten_patches(kernel: np.ndarray) -> np.ndarray:
  return kernel.transpose(2, 3, 1, 0).reshape(-1, len(kernel))


# The parameters of a ViT outside its blocks.
NORM_AND_HEAD = {**norm('norm', 'norm'), **linear('head', 'head', 'D', 'classes')}
VIT = {
  **patches('patch_embed.proj'),
  'class_token': ParameterSource({'cls_token': (1, 1, 'D'), 'pos_embed': (1, 'N', 'D')}, class_token),
  'positions': ParameterSource({'pos_embed': (1, 'N', 'D')}, patch_positions),
  **NORM_AND_HEAD,
}
