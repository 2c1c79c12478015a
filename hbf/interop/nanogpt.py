"""Weights of nanoGPT (github.com/karpathy/nanoGPT): state_dicts of its GPT, as in model.py of November 2025.

nanoGPT's checkpoints ckpt.pt can be read. nanoGPT also writes GPT-2's weights in this layout.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from hbf.errors import UserError
from hbf.interop import tensors as files
from hbf.interop.pytorch import linear, norm
from hbf.interop.table import Params, Table, Tensors, same
from hbf.models.language import LanguageModel
from hbf.nn.projections import check_heads
from hbf.nn.registry import make_stages
from hbf.nn.trunk import Trunk

_EPSILON = 1e-5  # of nanoGPT's LayerNorms


def load(path: str | pathlib.Path, heads: int) -> tuple[LanguageModel, dict[str, Params]]:
  """Load a GPT of nanoGPT as a Flax module.

  Args:
    path: a ckpt.pt, or a .pth, .npz or .safetensors file of the state_dict. Nothing in the file is run.
    heads: number of heads of the attention, `n_head` in nanoGPT. The tensors do not show this number.

  Returns:
    module and variables: `module.apply(variables, tokens, train=False)` returns logits [B, N, vocabulary]. Tokens are
    int32 [B, N], with N up to nanoGPT's `block_size`.

  Raises:
    UserError: the file cannot be read, or holds another kind of network. The message lists the tensors that do not
      fit.
  """
  tensors = files.read(pathlib.Path(path))
  try:
    model, params = _read(tensors, heads)
  except UserError as error:
    raise UserError(f'{path}: {error}') from error
  return model, {'params': jax.tree.map(jnp.asarray, params)}


def _read(tensors: Tensors, heads: int) -> tuple[LanguageModel, Params]:
  sizes, params = _GPT.read(_with_biases(_without_copies(tensors)))
  check_heads(sizes['D'], heads)
  mlp = {'hidden': sizes['hidden'], 'activation': 'gelu_erf'}
  stages = make_stages('vit', heads, {'qkv_bias': True}, mlp)
  trunk = Trunk(sizes['depth'], *stages, norm_epsilon=_EPSILON)
  return LanguageModel(trunk, sizes['V'], sizes['length'], sizes['D']), params


def _without_copies(tensors: Tensors) -> Tensors:
  """Return the tensors without the head, which equals the token embedding, and without causal masks.

  nanoGPT stores causal masks only with older versions of PyTorch.

  Raises:
    UserError: the head differs from the token embedding.
  """
  head, vectors = (tensors.get(name) for name in ('lm_head.weight', 'transformer.wte.weight'))
  if head is not None and (vectors is None or not np.array_equal(head, vectors)):
    raise UserError('its lm_head.weight differs from its transformer.wte.weight: in nanoGPT both are the same')
  return {name: z for name, z in tensors.items() if name != 'lm_head.weight' and not name.endswith('.attn.bias')}


def _with_biases(tensors: Tensors) -> Tensors:
  """Return the tensors. If the network was trained with bias=False, biases of 0 are added."""
  if any(name.endswith('.bias') for name in tensors):
    return tensors
  layers = [name for name in tensors if name.endswith('.weight') and '.wte.' not in name and '.wpe.' not in name]
  return {**tensors, **{f'{name.removesuffix("weight")}bias': np.zeros(len(tensors[name]), 'f') for name in layers}}


_GPT = Table(
  origin="nanoGPT's GPT",
  network={
    **same('embedding/embedding', 'transformer.wte.weight', 'V', 'D'),
    **same('positions', 'transformer.wpe.weight', 'length', 'D'),
    **norm('norm', 'transformer.ln_f'),
  },
  block={
    **norm('norm_stage1', 'ln_1'),
    **linear('stage1/qkv', 'attn.c_attn', 'D', '3D'),
    **linear('stage1/out', 'attn.c_proj', 'D', 'D'),
    **norm('norm_stage2', 'ln_2'),
    **linear('stage2/hidden', 'mlp.c_fc', 'D', 'hidden'),
    **linear('stage2/out', 'mlp.c_proj', 'hidden', 'D'),
  },
  prefix='transformer.h.{}.',
)
