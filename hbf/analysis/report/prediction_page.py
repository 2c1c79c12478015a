"""A page that explains the answers to a user's own images."""

import contextlib
import pathlib
from collections.abc import Sequence

from hbf.analysis.report.explain import about
from hbf.analysis.report.page import render
from hbf.analysis.report.sections.predictions import sections
from hbf.analysis.trained_run import TrainedRun
from hbf.arguments import home_path
from hbf.training.predict import read_image
from hbf.training.workdir import replace_text


def write_page(
  workdir: pathlib.Path, checkpoint: str, average: bool, paths: Sequence[str], page: str, **moved: str
) -> None:
  """Write a page that explains a run's answers to a user's images. The training data of the run are needed.

  Args:
    workdir: folder of a run on images.
    checkpoint: 'latest', 'best' or a step.
    average: True to take the moving average of the parameters.
    paths: image files that can be read.
    page: path of the HTML file to write.
    **moved: new values of the config keys `data.dir` and `data.root`, as arguments `dir` and `root`, if the training
      data have moved.

  Raises:
    UserError: the training data are missing, no image is given, more images are given than fit on a page, or the page
      cannot be written.
  """
  run = TrainedRun.of(workdir, checkpoint, average=average, **moved)
  images = {path: read_image(path, run.task.shape) for path in paths}
  made = sections(run, images)
  path = pathlib.Path(home_path(page))
  with contextlib.suppress(OSError):  # after this error, writing the page fails too, with a message
    path.parent.mkdir(parents=True, exist_ok=True)
  replace_text(path, render(f'{len(images)} images, answered by {about(run)}', workdir.name, made))
