"""Names of networks in tables and pictures."""

_NAMES = {'hyperbf': 'HyperBF', 'vit': 'ViT'}


def network_name(model: str) -> str:
  """Return the name of a network for readers. `model` is its name in a config."""
  return _NAMES.get(model, model)
