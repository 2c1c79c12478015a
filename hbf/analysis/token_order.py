"""How a language model's stages 1 use the order of tokens: python -m hbf.analysis.token_order --workdir runs/text.

Of heads how far they look on average, and how wide they see; of weights that belong to tokens (gMLP) how nearly they
depend on the distance of two tokens alone, which nothing asks of them (Liu et al. 2021, Figure 3). Writes mixing.json
and, of such weights, mixing.png.
"""

import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from absl import logging

matplotlib.use('Agg')
import matplotlib.pyplot as plt

from hbf import markdown
from hbf.analysis.weights import attention_weights
from hbf.arguments import Parser
from hbf.errors import UserError, in_one_line
from hbf.models.language import LanguageModel
from hbf.training.evaluate import restore
from hbf.training.machine import keep_freed_memory
from hbf.training.workdir import write_json

WINDOWS = 32  # of the test text, that distances are averaged over


def distances(model: LanguageModel, params: Any, tokens: jax.Array) -> dict[str, np.ndarray]:
  """How far the heads of each block look: the mean over tokens and windows of Σ w |i − j|, in tokens.

  Tokens of the window's second half count, which have something to look at.

  Args:
    model: the network.
    params: of the network.
    tokens: int32 [B, N].

  Returns:
    [heads] by block, of the blocks whose stage 1 has queries, keys and values.
  """
  length = tokens.shape[1]
  away = np.abs(np.subtract.outer(np.arange(length), np.arange(length)))[length // 2 :]
  weights = attention_weights(model, params, tokens)
  return {
    block: np.asarray((w[:, :, length // 2 :] * away).sum(axis=-1).mean(axis=(0, 2))) for block, w in weights.items()
  }


def spatial(params: Mapping[str, Any], causal: bool) -> dict[str, np.ndarray]:
  """The matrices [N, N] of gMLP's gates by block, row i what token i is made of; NaN where it sees nothing."""
  matrices = {}
  for block, part in params.items():
    if block.startswith('block') and 'spatial' in part['stage1']:
      matrix = np.asarray(part['stage1']['spatial']['kernel'], np.float64).T
      matrices[block] = np.where(np.tri(len(matrix), dtype=bool), matrix, np.nan) if causal else matrix
  return matrices


def toeplitz_share(matrix: np.ndarray) -> float:
  """The share of a matrix's variance that the means of its diagonals have: 1 if it is Toeplitz, about 0 if random.

  NaN entries don't count; of n diagonals of a random matrix of m entries it is about n / m.
  """
  known = ~np.isnan(matrix)
  offsets = np.subtract.outer(np.arange(len(matrix)), np.arange(len(matrix)))[known]
  values = matrix[known]
  where = offsets - offsets.min()
  counts = np.maximum(np.bincount(where), 1)
  means = np.bincount(where, weights=values) / counts
  return 1 - float(np.square(values - means[where]).sum() / np.square(values - values.mean()).sum())


def figures(
  workdir: pathlib.Path, checkpoint: str = 'latest', dir: str = '', root: str = ''
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """What is known of a run's stages 1, by block, for JSON, and the matrices of `spatial`.

  Raises:
    UserError: the run isn't one on texts, or as `hbf.training.evaluate.restore`.
  """
  restored = restore(workdir, checkpoint, jax.devices()[:1], dir=dir, root=root)
  model, params = restored.model, restored.params
  if not isinstance(model, LanguageModel):
    raise UserError(f'{workdir} holds no run on texts: give one of task next_token or masked_token')
  task = restored.task
  tokens = np.asarray(task.dataset.splits['test'][: WINDOWS * task.units], np.int32)
  windows = jnp.asarray(tokens[: len(tokens) // task.units * task.units].reshape(-1, task.units))
  matrices = spatial(params, model.causal)
  shares = {block: toeplitz_share(matrix) for block, matrix in matrices.items()}
  far = distances(model, params, windows)
  blocks = {}
  for block in (f'block{i}' for i in range(model.trunk.depth)):
    stage = params[block]['stage1']
    widths = {name.replace('log_', ''): np.exp(np.asarray(stage[name])).ravel().tolist() for name in _widths(stage)}
    offset = (
      {'position_offset': np.asarray(stage['position_offset']).ravel().tolist()} if 'position_offset' in stage else {}
    )
    away = {'distance': far[block].tolist()} if block in far else {}
    share = {'toeplitz_share': shares[block]} if block in shares else {}
    blocks[block] = widths | offset | away | share
  return {'window': task.units, 'blocks': blocks}, matrices


def _widths(stage: Mapping[str, Any]) -> list[str]:
  return [name for name in ('log_sigma', 'position_log_sigma') if name in stage]


def table(found: Mapping[str, Any]) -> str:
  """Markdown: a row a block."""
  names = list(dict.fromkeys(name for block in found['blocks'].values() for name in block))
  rows = [(block, *(_shown(about.get(name)) for name in names)) for block, about in found['blocks'].items()]
  return markdown.table(('block', *(name.replace('_', ' ') for name in names)), rows)


def _shown(value: Any) -> str:
  if value is None:
    return ''
  return f'{value:.3f}' if isinstance(value, float) else ', '.join(f'{number:.2f}' for number in value)


def draw(matrices: Mapping[str, np.ndarray], path: pathlib.Path) -> None:
  """Writes a PNG of the matrices, block by block; each has its own scale of colors, with 0 in the middle."""
  figure, axes = plt.subplots(
    1, len(matrices), figsize=(3.4 * len(matrices), 3.2), squeeze=False, layout='constrained'
  )
  for axis, (block, matrix) in zip(axes[0], matrices.items(), strict=True):
    bound = np.nanmax(np.abs(matrix))
    image = axis.imshow(matrix, cmap='PuOr', vmin=-bound, vmax=bound)
    axis.set(title=f'{block}, Toeplitz {toeplitz_share(matrix):.2f}', xlabel='from token', ylabel='to token')
    figure.colorbar(image, ax=axis, shrink=0.8)
  figure.savefig(path, dpi=110, metadata={'Software': None})
  plt.close(figure)


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = Parser('hbf.analysis.token_order', __doc__.split('\n')[0])
  parser.add_run('of a run on texts')
  flags = parser.parse_args(arguments)
  keep_freed_memory()
  logging.set_verbosity(logging.ERROR)  # Orbax warns of what is meant
  found, matrices = figures(flags.workdir, flags.checkpoint, dir=flags.data_dir, root=flags.data_root)
  write_json(flags.workdir / 'mixing.json', found)
  if matrices:
    draw(matrices, flags.workdir / 'mixing.png')
  print(f'{flags.workdir}, windows of {found["window"]} tokens:\n\n{table(found)}')
  return 0


if __name__ == '__main__':
  sys.exit(main())
