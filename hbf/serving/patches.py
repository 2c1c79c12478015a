"""Training patches nearest to the centers that vote for an answer, for the page of `hbf serve`."""

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from hbf.analysis.capture import capture
from hbf.analysis.centers import census
from hbf.analysis.relevance import tokens_of_votes, votes
from hbf.analysis.report.drawing import png
from hbf.analysis.report.sections.centers import TRAINING, marked, patches
from hbf.analysis.report.sections.relevance import VOTERS
from hbf.analysis.trained_run import TrainedRun
from hbf.errors import UserError


def nearest_patches(
  workdir: pathlib.Path, checkpoint: str, average: bool, **moved: str
) -> Callable[[np.ndarray], list[dict[str, Any]]]:
  """Return a function that finds the centers of the last block that contribute most to the answer to an image.

  The function takes an image, uint8 [H, W, C]. It returns a dictionary for each of these centers, with five keys:

  - answer: the name of the class that is the answer,
  - center: the index of the center,
  - vote: the center's contribution to the excess logit of the answer,
  - patch: a picture of the image that marks the patch with the greatest part of this contribution, as a data URL. If
    this is the class token, no patch is marked,
  - nearest: a picture of the training patches nearest to the center, as a data URL.

  The training patches come from at most `TRAINING` training images, which are searched before the function is
  returned.

  Args:
    workdir: folder of a run on images.
    checkpoint: 'latest', 'best' or a step.
    average: True to take the moving average of the parameters.
    **moved: `dir` and `root`, if the training data have moved, as in `hbf.training.evaluate.evaluate_workdir`.

  Raises:
    UserError: the training data are missing, or stage 2 of the last block has no centers.
  """
  run = TrainedRun.of(workdir, checkpoint, average=average, **moved)
  training = run.read('train', TRAINING)
  found = census(run, training.images).get(run.last_block)
  if found is None:
    raise UserError(f'{workdir} holds a network whose last block has no centers in stage 2: leave out --patches')

  one = _OneByOne(workdir, run.restored, average)

  def explain(image: np.ndarray) -> list[dict[str, Any]]:
    answer = np.asarray(capture(run.model, run.params, run.normalized(image[None])).logits).argmax(axis=1)
    cast = votes(one, image[None], answer)  # [1, N, U]
    sums, tokens = cast[0].sum(axis=0), tokens_of_votes(run, cast)[0]
    return [
      {
        'answer': run.classes[int(answer[0])],
        'center': int(center),
        'vote': float(sums[center]),
        'patch': png(marked(run, run.last_block, image, int(tokens[center]))),
        'nearest': png(patches(run, run.last_block, training, found, int(center))),
      }
      for center in np.argsort(-sums, kind='stable')[:VOTERS]
    ]

  explain(training.images[0])  # compiles its programs
  return explain


class _OneByOne(TrainedRun):
  """A run whose batches have one image, so that a single image is not padded to a larger batch."""

  _batch = 1
