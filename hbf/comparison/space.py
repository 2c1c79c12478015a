"""The space of a search: distributions of config keys, from which each trial gets random options."""

import dataclasses
import re
import zlib
from collections.abc import Sequence

import numpy as np

from hbf.errors import UserError

FORM = "expected 'KEY=LOW..HIGH', 'KEY=A|B', or 'LABEL: KEY=…' for one arm"


@dataclasses.dataclass(frozen=True)
class Option:
  """A config key with the distribution from which each trial gets a value.

  Attributes:
    label: label of the arm that has the option. '' stands for all arms.
    key: the config key, such as 'model.heads'.
    choices: equally likely values. () if the value comes from a range.
    low: lower end of the range. In a range, the logarithm of the value is uniformly distributed.
    high: upper end of the range.
  """

  label: str
  key: str
  choices: tuple[str, ...] = ()
  low: float = 1.0
  high: float = 1.0

  def at(self, quantile: float) -> str:
    """Return the value at a quantile of the distribution. The quantile is at least 0 and less than 1."""
    if self.choices:
      return self.choices[int(quantile * len(self.choices))]
    return f'{self.low * (self.high / self.low) ** quantile:.3g}'


def parse_space(lines: Sequence[str]) -> tuple[Option, ...]:
  """Parse lines such as 'optimizer.learning_rate=4e-3..3e-2' or 'vit: model.heads=4|8'.

  Raises:
    UserError: a line has another form, or the ends of a range are not 0 < LOW < HIGH.
  """
  return tuple(map(_parse, lines))


def options_of(space: Sequence[Option], label: str) -> dict[str, Option]:
  """Return the options of an arm by key. For a key, an option for this arm replaces an option for all arms."""
  return {option.key: option for wanted in ('', label) for option in space if option.label == wanted}


def draw(space: Sequence[Option], label: str, trials: int) -> list[dict[str, str]]:
  """Draw values of an arm's options for each trial.

  A value is drawn as a quantile, which depends only on the key and on the index of the trial. So arms with the same
  distribution of a key get the same values, and a longer search begins with the values of a shorter one. Trials are
  independent of each other, as `hbf.comparison.tune.expected_best` assumes.

  Args:
    space: the options of all arms.
    label: label of the arm.
    trials: number of trials.

  Returns:
    The values by key, for each trial.
  """
  own = options_of(space, label)
  quantiles = {key: np.random.default_rng(zlib.crc32(key.encode())).random(trials) for key in own}
  return [{key: option.at(quantiles[key][trial]) for key, option in own.items()} for trial in range(trials)]


def corners(space: Sequence[Option], label: str) -> list[dict[str, str]]:
  """Return the fewest values of an arm's options that contain every choice, and both ends of every range."""
  own = options_of(space, label)
  values = {key: option.choices or (f'{option.low:.3g}', f'{option.high:.3g}') for key, option in own.items()}
  count = max(map(len, values.values()), default=1)
  return [{key: texts[index % len(texts)] for key, texts in values.items()} for index in range(count)]


def _parse(line: str) -> Option:
  match = re.fullmatch(r'(?:([^\s:=]+):\s*)?([\w.]+)=(\S+)', line.strip())
  if not match:
    raise UserError(f'space {line!r} is no distribution of a key: {FORM}')
  label, key, values = match[1] or '', match[2], match[3]
  bounds = re.fullmatch(r'([\d.]+(?:e-?\d+)?)\.\.([\d.]+(?:e-?\d+)?)', values)
  if not bounds:
    return Option(label, key, tuple(values.split('|')))
  try:
    low, high = map(float, bounds.groups())
  except ValueError:
    raise UserError(f'the range of space {line!r} does not have two numbers: {FORM}') from None
  if not 0 < low < high:
    raise UserError(f'space {line!r} is no range: it is uniform in the logarithm, so it needs 0 < LOW < HIGH')
  return Option(label, key, low=low, high=high)
