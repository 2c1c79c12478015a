"""What heads look at."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hbf.analysis.heads import between_patches, differing, heads, maps
from hbf.analysis.report.drawing import colored, enlarged, framed, in_rows, panel, png, rgb
from hbf.analysis.report.page import Drawing, Lacks, Section, Shown, Table, Text
from hbf.analysis.trained_run import TrainedRun

IMAGES = 100  # that figures are means over
SHOWN = 3  # images with maps
SIDE = 64  # pixels, of a map


def section(subject: TrainedRun) -> Section:
  """Of every block; raises `Lacks` for a model whose stage 1 gives no weights away."""
  images = subject.read('test', IMAGES).images
  found = heads(subject, images)
  if not found:
    raise Lacks('This model’s stage 1 is neither softmax nor HyperBF attention, whose weights can be shown.')
  depth = differing(subject, images)
  numbers: dict[str, Any] = {
    block: {'distance': of_block.distance.tolist(), 'tokens': of_block.tokens.tolist()}
    for block, of_block in found.items()
  }
  even = float(between_patches(subject).mean())
  numbers |= {'distance_of_even_weights': even, 'tokens_differ': depth.tolist()}
  rows = [(block, _listed(h.distance), _listed(h.tokens)) for block, h in found.items()]
  header = ('block', 'mean distance of what each head looks at, patches', 'effective number of tokens')
  count = subject.grid[0] * subject.grid[1] + subject.first_patch
  parts: list[Any] = [
    Table(header, rows, f'Heads, from near to far; even weights would have {even:.1f} patches and {count} tokens.'),
    _drawing(depth),
    *_maps(subject, images[:: max(1, len(images) // SHOWN)][:SHOWN]),
    Text('Colors run from 0 (dark) to the largest weight of the map (light).'),
  ]
  command = 'hbf.analysis.heads.heads(subject, images); hbf.analysis.heads.maps(subject, images, token)'
  return Section('attention', 'Attention', parts, numbers, command)


def _listed(values: np.ndarray) -> str:
  return ', '.join(f'{value:.1f}' for value in np.sort(values))


def _drawing(depth: np.ndarray) -> Drawing:
  figure, axis = panel()
  axis.plot(np.arange(len(depth)), depth, marker='o')
  axis.set(xlabel='after block', ylabel='‖X − 1x̄ᵀ‖ / ‖X‖', ylim=(0, 1), xticks=range(len(depth)))
  axis.set_xticklabels(['tokens', *(str(i) for i in range(len(depth) - 1))])
  return Drawing(
    [figure], 'How far the tokens of an image are from all being the same: attention alone would take it to 0.'
  )


def _maps(subject: TrainedRun, images: np.ndarray) -> list[Shown]:
  """What the token in the middle of each image takes of every patch."""
  rows, columns = subject.grid
  middle = rows // 2 * columns + columns // 2
  found = maps(subject, images, subject.first_patch + middle)
  return [_map(subject, image, {block: w[i] for block, w in found.items()}) for i, image in enumerate(images)]


def _map(subject: TrainedRun, image: np.ndarray, found: Mapping[str, np.ndarray]) -> Shown:
  """An image beside a row of heads a block."""
  rows, columns = subject.grid
  times = max(1, SIDE // rows)
  large = enlarged(rgb(image), max(1, SIDE // image.shape[0]))
  side = large.shape[0] // rows
  marked = framed(large, rows // 2 * side, columns // 2 * side, side, 2)
  images = [(png(marked), 'the patch that looks')]
  for block, of_heads in found.items():
    sheets = np.stack([enlarged(colored(head, 0, head.max()), times) for head in of_heads])
    images.append((png(in_rows(sheets, min(len(sheets), 4), gap=3)), block))
  return Shown(images, 'What the heads of each block take for this patch.', 190)
