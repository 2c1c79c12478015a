"""Durations in steps, epochs, examples or percent of the run."""

import dataclasses
import math
from collections.abc import Iterable
from fractions import Fraction

from hbf.errors import UserError
from hbf.options import DURATION_PATTERN


@dataclasses.dataclass(frozen=True)
class Clock:
  """What a duration is measured against.

  Attributes:
    examples: of the training split, an epoch.
    batch_size: examples a step.
    epochs: length of the run; may be a fraction.
  """

  examples: int
  batch_size: int
  epochs: float

  @property
  def steps(self) -> int:
    """Steps of the run: the last epoch is completed, so the last batch may reach into one more."""
    total = Fraction(str(self.epochs)) * self.examples  # 0.1 is meant, not the nearest binary number
    return -(-total.numerator // (total.denominator * self.batch_size))

  def epochs_of(self, steps: int) -> float:
    """Return a length in epochs, with few decimals, for which a run has so many steps."""
    # Rounded down, by less than a tenth of a step: a run completes its last step.
    scale = 10 ** (len(str(self.examples // self.batch_size)) + 1)
    return (steps * self.batch_size * scale // self.examples) / scale

  def epoch(self, step: int) -> float:
    """Epochs seen after `step` steps."""
    return step * self.batch_size / self.examples

  def to_examples(self, what: str, duration: str) -> Fraction:
    """Examples in a duration such as '50steps', '1epoch', '0.5epochs', '10000examples' or '5%'.

    Raises:
      UserError: `duration` isn't one; the message names `what`.
    """
    match = DURATION_PATTERN.fullmatch(duration)
    if not match:
      raise UserError(f"{what}: {duration!r} isn't a duration; write 500steps, 1epoch, 10000examples or 5%")
    unit = {
      'step': Fraction(self.batch_size),
      'epoch': Fraction(self.examples),
      'example': Fraction(1),
      '%': Fraction(self.steps * self.batch_size, 100),
    }[match[2].rstrip('s')]
    return Fraction(match[1]) * unit

  def to_steps(self, what: str, duration: str) -> int:
    """Steps in a duration, rounded to the nearest."""
    return round(self.to_examples(what, duration) / self.batch_size)

  def every(self, what: str, duration: str) -> 'Every':
    """A test for the steps at which something with this period is due.

    Raises:
      UserError: the duration isn't one, or is zero.
    """
    period = self.to_examples(what, duration)
    if not period:
      raise UserError(f'{what}: a period must be longer than {duration}')
    return Every(period, self.batch_size)

  def calls(self, start: int, most: int, events: Iterable['Every']) -> list[int]:
    """Cuts the steps after `start` into calls of at most `most` that end wherever an event is due: their lengths."""
    counts, stop, events = [], self.steps, tuple(events)
    while start < stop:
      counts.append(min(start + most, stop, *(event.after(start) for event in events)) - start)
      start += counts[-1]
    return counts


@dataclasses.dataclass(frozen=True)
class Every:
  """True at the first step at which another period is complete; periods need not be whole steps, and never drift."""

  period: Fraction
  batch_size: int

  def __call__(self, step: int) -> bool:
    """Whether a period ended within step `step`, counted from 1."""
    return self.after(step - 1) == step

  def after(self, step: int) -> int:
    """The first step after `step` within which a period ends."""
    complete = step * self.batch_size // self.period
    return math.ceil((complete + 1) * self.period / self.batch_size)
