"""The traits of a stage: facts about a stage that are not options, such as the masks that it accepts."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class StageTraits:
  """The traits of a stage, stored in its class variable `traits`. A stage without this variable has the defaults.

  Attributes:
    units: name of the option that sets the number of the stage's units, such as 'hidden' or 'centers'. None if the
      stage has no units.
    unit_share: the default number of units of the stage, divided by `model.expansion` × `model.width`.
    masks: the attention masks that a stage 1 accepts: 'any', 'keys' (masks that hide a token from all tokens or from
      none) or 'none'.
    causal: True if a stage 1 can restrict a token to itself and the tokens before it.
    decodes: True if a stage 1 keeps earlier tokens in a cache (`hbf.nn.cache`), so a text can be continued.
  """

  units: str | None = None
  unit_share: float = 1.0
  masks: str = 'none'
  causal: bool = False
  decodes: bool = False


# The traits of a stage that works on every token alone. It fits every context, because no token sees another.
TOKENWISE = StageTraits(masks='any', causal=True, decodes=True)


def traits_of(stage: Any) -> StageTraits:
  """Return the traits of a stage, given as a module or its class. For None, return the defaults."""
  return getattr(stage, 'traits', StageTraits())
