"""What is measured of a model on a split: each figure's name, unit and better direction, said once.

The log, checkpoints, tables and curves read it here.
"""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Figure:
  """A number that says how good a model is.

  Attributes:
    name: its key in metrics.jsonl, and result.json.
    unit: as a table shows it.
    better: max or min: which of several values is the best.
    form: how a value is written.
  """

  name: str
  unit: str
  better: Callable[..., float]
  form: str = '.2f'

  @property
  def label(self) -> str:
    """Name and unit, of an axis or a column."""
    return f'{self.name}, {self.unit}'


ACCURACY = Figure('accuracy', '%', max)
TOP5 = Figure('top5', '%', max)
NLL = Figure('nll', 'nats', min, '.3f')
ECE = Figure('ece', '%', min)
LOSS = Figure('loss', 'nats', min, '.3f')  # what training minimises

TOKEN_NLL = Figure('token_nll', 'nats a token', min, '.4f')
PERPLEXITY = Figure('perplexity', 'tokens', min, '.3f')
BITS_PER_BYTE = Figure('bits_per_byte', 'bits', min, '.4f')
FIGURES = (LOSS, ACCURACY, TOP5, NLL, ECE, TOKEN_NLL, PERPLEXITY, BITS_PER_BYTE)

# Of a classifier, of a model that tells the next token, and of one that tells masked ones; the first of each ranks
# checkpoints and arms.
CLASSIFICATION = (ACCURACY, TOP5, NLL, ECE)
NEXT_TOKEN = (TOKEN_NLL, PERPLEXITY, BITS_PER_BYTE, ACCURACY)
MASKED_TOKEN = (TOKEN_NLL, PERPLEXITY, ACCURACY)
