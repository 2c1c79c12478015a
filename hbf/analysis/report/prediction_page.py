"""A page of what decides the answers to images of one's own."""

import pathlib
from collections.abc import Sequence

import numpy as np

from hbf.analysis.report.explain import about
from hbf.analysis.report.page import render
from hbf.analysis.report.sections.own import sections
from hbf.analysis.trained_run import TrainedRun
from hbf.training.predict import read_image
from hbf.training.workdir import replace_text


def write_page(workdir: pathlib.Path, checkpoint: str, average: bool, paths: Sequence[str], page: str) -> None:
  """Writes a page of images, by a run whose training data are there.

  Args:
    workdir: of a run on images.
    checkpoint: 'latest', 'best' or a step.
    average: whether the moving average of the parameters answers.
    paths: of images that can be read.
    page: file to write.

  Raises:
    UserError: the run's data aren't there, or there are too many images, or none.
  """
  subject = TrainedRun.of(workdir, checkpoint, average=average)
  read = {path: np.asarray(read_image(path, subject.task.shape)) for path in paths}
  made = sections(subject, read)
  path = pathlib.Path(page).expanduser()
  path.parent.mkdir(parents=True, exist_ok=True)
  replace_text(path, render(f'{len(read)} images, by {about(subject)}', workdir.name, made))
