"""Scores of a model on a split: names, units, and if higher or lower is better."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Score:
  """The name, the unit and the format of a number that measures how good a model is.

  Attributes:
    name: key in metrics.jsonl and result.json.
    unit: unit in tables. '': the score has no unit, or the unit of the data.
    better: the function `max` or `min`. It returns the best of several values.
    form: format of a value in tables, such as '.2f'.
  """

  name: str
  unit: str
  better: Callable[..., float]
  form: str = '.2f'

  @property
  def label(self) -> str:
    """The name and unit, as the label of an axis or a column."""
    return f'{self.name}, {self.unit}' if self.unit else self.name


ACCURACY = Score('accuracy', '%', max)
TOP5 = Score('top5', '%', max)
NLL = Score('nll', 'nats', min, '.3f')
ECE = Score('ece', '%', min)
LOSS = Score('loss', 'nats', min, '.3f')  # what training minimizes
SQUARED_LOSS = Score('loss', '', min, '.4f')  # of standardized values

TOKEN_NLL = Score('token_nll', 'nats a token', min, '.4f')
PERPLEXITY = Score('perplexity', 'tokens', min, '.3f')
BITS_PER_BYTE = Score('bits_per_byte', 'bits', min, '.4f')

MEAN_PRECISION = Score('map', '%', max)
F1 = Score('f1', '%', max)
EXACT_MATCH = Score('exact_match', '%', max)
LABEL_ACCURACY = Score('label_accuracy', '%', max)

R2 = Score('r2', '', max, '.4f')
RMSE = Score('rmse', '', min, '.4g')
MAE = Score('mae', '', min, '.4g')

_OF_TEXTS = (TOKEN_NLL, PERPLEXITY, BITS_PER_BYTE)
_OF_LABELS = (MEAN_PRECISION, F1, EXACT_MATCH, LABEL_ACCURACY)
SCORES = (LOSS, ACCURACY, TOP5, NLL, ECE, *_OF_TEXTS, *_OF_LABELS, R2, RMSE, MAE)

# The scores of each task. The first score of a task ranks the checkpoints of a run, and the models of a comparison.
CLASSIFICATION = (ACCURACY, TOP5, NLL, ECE)
MULTI_LABEL = (MEAN_PRECISION, F1, EXACT_MATCH, LABEL_ACCURACY, NLL)
REGRESSION = (R2, RMSE, MAE)
NEXT_TOKEN = (TOKEN_NLL, PERPLEXITY, BITS_PER_BYTE, ACCURACY)
MASKED_TOKEN = (TOKEN_NLL, PERPLEXITY, ACCURACY)
