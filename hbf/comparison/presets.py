"""Named comparisons: configs, arms, seeds and published scores."""

from collections.abc import Mapping, Sequence

from hbf.comparison.grid import Comparison

DATA = ('cifar10', 'cifar100', 'tiny_imagenet')
RATES = ('2e-3', '4e-3', '8e-3')
SMALL = {
  'vit': 'vit',
  'vit-gelu': 'vit model.stage2.activation=gelu',
  'hyperbf': 'hyperbf',
}
TEXT = {
  'gpt': 'vit model.stage2.activation=gelu model.stage1.relative_positions=none',  # as in nanoGPT
  'gpt-places': 'vit model.stage2.activation=gelu',
  'hyperbf': 'hyperbf',
}
TEXT_RATES = ('1e-3', '2e-3', '4e-3')
LAPTOP = {**SMALL, 'gated': 'gated', 'gmlp': 'gmlp'}
STRONG = {label: LAPTOP[label] for label in ('vit-gelu', 'hyperbf', 'gated')}
RELATIVE_POSITIONS = 'model.stage1.relative_positions=gaussian'
LAPTOP_STAGE2 = (
  'model.stage2.normalize_inputs=True model.stage2.norm_affine=False model.stage2.normalization=none '
  'model.stage2.sigma_per=layer'
)
LEADERS = {
  'hyperbf-places': f'hyperbf {RELATIVE_POSITIONS}',
  'gated-places': f'gated {RELATIVE_POSITIONS}',
  'gmlp': 'gmlp',
  'hyperbf-laptop': f'hyperbf {RELATIVE_POSITIONS} {LAPTOP_STAGE2}',
}
BEST_RATES = {'gmlp': '4e-3', 'hyperbf-places': '4e-3', 'gated-places': '8e-3'}  # found by 'rivals-rates'
BEST = {label: f'{LEADERS[label]} optimizer.learning_rate={rate}' for label, rate in BEST_RATES.items()}
# Variants of the arms in `BEST`.
FORMS = {
  'hyperbf-places-8-heads': f'{BEST["hyperbf-places"]} model.heads=8',
  'gated-places-8-heads': f'{BEST["gated-places"]} model.heads=8',
  'gmlp-multiplicative': f'{BEST["gmlp"]} model.stage1.gate=multiplicative',
}
# Options of searches with six epochs. One training image in ten is held out.
SIX_EPOCHS = ('--config.model.pool=sequence', '--config.train.epochs=6.0', '--config.data.validation=0.1')
# The space from which `--tune` draws the options of every arm. 'LABEL: KEY=…' would add an option of one arm.
SPACE = (
  'optimizer.learning_rate=4e-3..3e-2',
  'optimizer.weight_decay=0.01..0.3',
  'train.label_smoothing=0.0|0.1',
)
# Options for every arm: the optimizer Muon, and a network of two resolutions.
TWO_RESOLUTIONS = (
  '--config.optimizer.name=muon',
  '--config.optimizer.learning_rate=12e-3',
  '--config.model.merge=2',
  '--config.model.width=48',
)
# Options of every arm in preset 'claim'. Without regularization, models would memorize the training images, because
# training is long.
CLAIM = (
  *TWO_RESOLUTIONS,
  '--config.train.label_smoothing=0.1',
  "--config.data.transforms=(('flip',),('shift',4),('erase',0.5))",
)
# The space of preset 'claim-tune'. The two leading arms also choose the form of their relative positions.
CLAIM_SPACE = (
  'optimizer.learning_rate=4e-3..3e-2',
  'optimizer.weight_decay=0.01..0.3',
  'hyperbf: model.stage1.relative_positions=gaussian|adaptive',
  'vit-swiglu: model.stage1.relative_positions=gaussian|adaptive',
)
ADAPTIVE = 'model.stage1.relative_positions=adaptive'
ABSOLUTE = 'model.stage1.relative_positions=none'
# Options of a stage 2 whose kernels are balls with a soft edge. Each center has coefficients that are linear in the
# token.
LINEAR_BALLS = (
  'model.stage2.kernel=ball_silu model.stage2.coefficients=linear model.stage2.normalization=none '
  'model.stage2.normalize_inputs=False model.stage2.metric=identity model.stage2.centers_init=normal '
  'model.stage2.coefficients_scale=0.3'
)
# The arms of preset 'text-muon': HyperBF, and GPTs with the same relative positions. Each has the stage 2 that was
# best on images.
TEXT_MUON = {
  'hyperbf': f'hyperbf {LINEAR_BALLS}',
  'gpt-places': 'vit model.stage2.activation=gelu',
  'gpt-swiglu': 'vit model.stage2.activation=swiglu',
}
MUON = ('--config.optimizer.name=muon', '--config.optimizer.learning_rate=8e-3')
# The arms of preset 'rivals-muon', and the space of its search. Each arm has options of its own.
RIVALS_MUON = {'hyperbf': f'hyperbf {LINEAR_BALLS}', 'gmlp': 'gmlp'}
RIVALS_MUON_SPACE = (
  'optimizer.learning_rate=4e-3..3e-2',
  'optimizer.weight_decay=0.01..0.3',
  'hyperbf: model.stage1.relative_positions=gaussian|adaptive',
  'hyperbf: model.heads=4|8',
  'gmlp: model.stage1.activation=relu|gelu',
)
# HyperBF, its rivals, and controls that isolate the cause of an advantage. The number of centers of the first arm
# sets the number of parameters of all arms.
CONTROLS = {
  'hyperbf': f'hyperbf model.stage2.centers=119 {LINEAR_BALLS} {ADAPTIVE}',
  'vit-swiglu': 'vit model.stage2.activation=swiglu',
  'vit-adaptive': f'vit model.stage2.activation=swiglu {ADAPTIVE}',
  'vit-gelu': 'vit model.stage2.activation=gelu',
  'vit-normalized': 'vit model.stage2.activation=gelu model.stage2.normalize=True',
  'gated-softmax': 'gated_softmax+none',
  'hyperbf-fixed': f'hyperbf {LINEAR_BALLS}',
  'hyperbf-gaussian': f'hyperbf {ADAPTIVE}',
  'hyperbf-absolute': f'hyperbf {LINEAR_BALLS} {ABSOLUTE}',
  'positional': f'positional {LINEAR_BALLS}',
  'positional-swiglu': 'positional+mlp model.stage2.activation=swiglu',
  'vit-absolute': f'vit model.stage2.activation=swiglu {ABSOLUTE}',
  # Rotary positions need heads of a multiple of four dimensions.
  'vit-rotary': 'vit model.stage2.activation=swiglu model.heads=4 model.stage1.relative_positions=rotary',
}
# The best options of HyperBF and of the ViT with SwiGLU in the search of 'claim-tune'
# (docs/research/claim-trials.md).
BEST_OF_CLAIM = ('--config.optimizer.learning_rate=9e-3', '--config.optimizer.weight_decay=0.06')
# HyperBF with the relative positions of this search, and changes of the recipe: one for each arm of 'screen'.
BEST_HYPERBF = f'hyperbf model.stage2.centers=119 {LINEAR_BALLS}'
CHANGES = {
  'plain': '',
  'unsmoothed': 'train.label_smoothing=0.0',
  'unerased': "data.transforms=(('flip',),('shift',4))",
  'cutout': "data.transforms=(('flip',),('shift',4),('cutout',12))",
  'alternate': "data.transforms=(('alternate_flip',),('shift',4),('erase',0.5))",
  'whiten': 'model.whiten=True',
  'mimetic': 'model.stage1.mimetic=0.5',
  'average': 'train.average=0.99',
  'linear': 'optimizer.schedule=linear',
  'wsd': 'optimizer.schedule=wsd',
}
# Resolutions of a network with 1.8e14 training operations. A label has the side of a patch, and the blocks before
# which tokens are merged. The plain resolutions of 'claim' are 4-2.
RESOLUTIONS = {
  '4-2': '',
  '2-2': 'model.patch=2',
  '2-1': 'model.patch=2 model.merge=1',
  '2-1-3': 'model.patch=2 model.width=32 model.merge=(1,3)',
}
RESOLVED = {'positional': f'positional model.stage2.centers=151 {LINEAR_BALLS}', 'vit': CONTROLS['vit-swiglu']}
# Controls for the arm positional-2-2. Two have free filters instead of Gaussians over positions, of which one starts
# its filters as these Gaussians. One has another stage 2.
_FREE = f'convolution+hyperbf {LINEAR_BALLS} {RESOLUTIONS["2-2"]}'
OF_POSITIONAL = {
  'convolution-2-2': _FREE,
  'convolution-gaussian-2-2': f'{_FREE} model.stage1.filters_init=gaussian',
  'positional-swiglu-2-2': f'{CONTROLS["positional-swiglu"]} {RESOLUTIONS["2-2"]}',
}
# Stages that compare contents, in windows: they take fewer operations than over all small patches.
WINDOWED = {
  f'{label}-window-2-2': f'{CONTROLS[arm]} {RESOLUTIONS["2-2"]} model.window=8'
  for label, arm in (('vit', 'vit-swiglu'), ('hyperbf', 'hyperbf-fixed'))
}
RIVALS = ('--config.model.pool=mean', '--config.train.epochs=2.0')


def _arms(models: Mapping[str, str]) -> tuple[str, ...]:
  return tuple(f'{label}: {model}' for label, model in models.items())


def _at_rates(models: Mapping[str, str], rates: Sequence[str] = RATES) -> tuple[str, ...]:
  """Return an arm for each model and learning rate. `models` has the texts 'MODEL key=value …' by label."""
  pairs = [(rate, label) for rate in rates for label in models]
  return _arms({f'{label}-{rate}': f'{models[label]} optimizer.learning_rate={rate}' for rate, label in pairs})


PRESETS = {
  # CBMM Memo 143, Table 2. The memo trains one seed for 100 epochs, and reports the best test epoch.
  'memo': Comparison(
    configs=tuple(f'configs/{data}.py:recipe=memo' for data in DATA),
    arms=('vit', 'hyperbf'),
    seeds=(0, 1, 2),
    published={
      'cifar10/vit': 75.61,
      'cifar10/hyperbf': 75.12,
      'cifar100/vit': 49.90,
      'cifar100/hyperbf': 48.30,
      'tiny_imagenet/vit': 32.03,
      'tiny_imagenet/hyperbf': 31.14,
    },
  ),
  # For a laptop: it takes one to two hours on two cores.
  'small': Comparison(
    configs=('configs/cifar10.py:recipe=small',),
    arms=_arms(SMALL),
    seeds=(0, 1, 2),
    # This rate was best for each arm in 'rates'.
    overrides=('--config.train.epochs=5.0', '--config.optimizer.learning_rate=4e-3'),
    operations='match',
  ),
  # Learning rates for the arms of 'small'. Choose a rate on held-out images with `--report --split=validation`.
  'rates': Comparison(
    configs=('configs/cifar10.py:recipe=small',),
    arms=_at_rates(SMALL),
    seeds=(0, 1),
    overrides=('--config.train.epochs=2.0', '--config.data.validation=0.1'),
  ),
  # A run takes an hour on one core, so the preset takes eight hours on two cores. --config takes other data sets.
  'laptop': Comparison(
    configs=('configs/cifar10.py:recipe=laptop',),
    arms=_arms(LAPTOP),
    seeds=(0, 1, 2),
    overrides=('--config.model.pool=sequence',),
    operations='match',
    parameters=300_000,
  ),
  # The search for the arms of 'laptop' with `--tune=12`. `--preset=laptop --tuned=…` trains with the best options.
  'laptop-tune': Comparison(
    configs=('configs/cifar10.py:recipe=laptop',),
    arms=_arms(LAPTOP),
    overrides=SIX_EPOCHS,
    operations='match',
    parameters=300_000,
    space=SPACE,
  ),
  # Changes of the recipe of 'claim', each against the plain recipe. See `--report --split=validation`.
  'screen': Comparison(
    configs=('configs/cifar10.py:recipe=laptop',),
    arms=_arms({label: f'{BEST_HYPERBF} {change}' for label, change in CHANGES.items()}),
    seeds=(0, 1),
    overrides=(*CLAIM, *BEST_OF_CLAIM, '--config.data.validation=0.1'),
    operations='3e13',
    parameters=300_000,
  ),
  # Resolutions of HyperBF over positions and of ViT, at equal parameters and operations.
  'resolutions': Comparison(
    configs=('configs/cifar10.py:recipe=laptop',),
    arms=_arms(
      {f'{label}-{name}': f'{RESOLVED[label]} {shape}' for name, shape in RESOLUTIONS.items() for label in RESOLVED}
      | OF_POSITIONAL
      | WINDOWED
    ),
    seeds=(6,),
    overrides=(
      *CLAIM,
      '--config.optimizer.learning_rate=0.00896',
      '--config.optimizer.weight_decay=0.0606',
      '--config.data.validation=0.1',
    ),
    operations='1.8e14',
    parameters=300_000,
  ),
  # HyperBF and its controls at equal training operations, each with its best options: `--tuned=…/tuning.json`.
  'claim': Comparison(
    configs=('configs/cifar10.py:recipe=laptop',),
    arms=_arms(CONTROLS),
    seeds=(0, 1, 2, 3, 4),
    overrides=CLAIM,
    operations='1.8e14',
    parameters=300_000,
  ),
  # The search for 'claim' with `--tune=12`, at a sixth of its operations.
  'claim-tune': Comparison(
    configs=('configs/cifar10.py:recipe=laptop',),
    arms=_arms(CONTROLS),
    overrides=(*CLAIM, '--config.data.validation=0.1'),
    operations='3e13',
    parameters=300_000,
    space=CLAIM_SPACE,
  ),
  # For a GPU. The published scores are those of the ViT of Lee et al. 2021, with these sizes, epochs and tricks.
  'strong': Comparison(
    configs=tuple(f'configs/{data}.py:recipe=strong' for data in DATA),
    arms=_arms(STRONG),
    seeds=(0, 1, 2),
    published={'cifar10/vit-gelu': 93.58, 'cifar100/vit-gelu': 73.81, 'tiny_imagenet/vit-gelu': 57.07},
    operations='match',
  ),
  # Learning rates for the arms of 'laptop', on held-out images. Shorter trials would favor rates that are too high.
  'laptop-rates': Comparison(
    configs=('configs/cifar10.py:recipe=laptop',),
    arms=_at_rates(LAPTOP),
    seeds=(0,),
    overrides=SIX_EPOCHS,
  ),
  # Text by characters, as in nanoGPT's run on a CPU. Its published score is an estimate from random batches.
  'text': Comparison(
    configs=('configs/shakespeare.py:recipe=characters',),
    arms=_arms(TEXT),
    seeds=(0, 1, 2),
    published={'shakespeare/gpt': 1.88},
    operations='match',
  ),
  # Learning rates for the arms of 'text', on the held-out end of train.
  'text-rates': Comparison(
    configs=('configs/shakespeare.py:recipe=characters',),
    arms=_at_rates(TEXT, TEXT_RATES),
    seeds=(0,),
    overrides=('--config.data.validation=0.1', '--config.train.epochs=1.7'),  # less text, but as many steps as 'text'
  ),
  # HyperBF and GPTs with the same relative positions, trained by Muon. Use `--tuned` after 'text-muon-tune'.
  'text-muon': Comparison(
    configs=('configs/shakespeare.py:recipe=characters',),
    arms=_arms(TEXT_MUON),
    seeds=(0, 1, 2),
    overrides=MUON,
    operations='match',
  ),
  # The search for 'text-muon' with `--tune=12`, on the held-out end of train, at a fifth of its operations.
  'text-muon-tune': Comparison(
    configs=('configs/shakespeare.py:recipe=characters',),
    arms=_arms(TEXT_MUON),
    overrides=(*MUON, '--config.data.validation=0.1'),
    operations='2e12',
    space=('optimizer.learning_rate=2e-3..2e-2', 'optimizer.weight_decay=0.01..0.3'),
  ),
  # The arms of 'text-muon' with the parameters of nanoGPT's GPT. Use `--tuned` after 'text-muon-tune'.
  'text-muon-nanogpt': Comparison(
    configs=('configs/shakespeare.py:recipe=characters',),
    arms=_arms(TEXT_MUON),
    seeds=(3, 4, 5),
    overrides=MUON,
    like=f'gpt: {TEXT_MUON["gpt-places"]}',
    operations='match',
  ),
  # As many steps as in 'text'. A step has ten times as many tokens, in windows that are four times as long.
  'text-long': Comparison(
    configs=('configs/shakespeare.py:recipe=characters',),
    arms=(*_arms(TEXT), 'gmlp', 'linear'),
    seeds=(0,),
    overrides=('--config.data.length=256', '--config.train.batch_size=32', '--config.train.epochs=16.3'),
  ),
  # Prediction of masked tokens from the tokens around them.
  'text-masked': Comparison(
    configs=('configs/shakespeare.py:recipe=characters',),
    arms=('vit: vit model.stage2.activation=gelu', 'hyperbf', 'gmlp', 'amlp'),
    seeds=(0,),
    overrides=('--config.task=masked_token',),
  ),
  # Learning rates for the best arms of 'rivals' and for variants, on held-out images. A fourth rate is needed,
  # because the greatest of the three rates in `RATES` was best for one arm.
  'rivals-rates': Comparison(
    configs=('configs/cifar10.py:recipe=small',),
    arms=(*_at_rates(LEADERS, (*RATES, '16e-3')), *_arms(FORMS)),
    seeds=(0,),
    overrides=(*RIVALS, '--config.data.validation=0.1'),
    like='vit',
  ),
  # The best arms of 'rivals', each with the learning rate that was best in 'rivals-rates'.
  'rivals-best': Comparison(
    configs=('configs/cifar10.py:recipe=small',),
    arms=_arms(BEST),
    seeds=(0, 1, 2),
    overrides=RIVALS,
    like='vit',
    operations='match',
  ),
  # HyperBF with ball kernels against gMLP, trained by Muon. Use `--tuned` after 'rivals-muon-tune'.
  'rivals-muon': Comparison(
    configs=('configs/cifar10.py:recipe=small',),
    arms=_arms(RIVALS_MUON),
    seeds=(0, 1, 2),
    overrides=(*RIVALS, *MUON),
    like='vit',
    operations='match',
  ),
  # The search for 'rivals-muon' with `--tune=8`, on held-out images. A trial is as long as a final run.
  'rivals-muon-tune': Comparison(
    configs=('configs/cifar10.py:recipe=small',),
    arms=_arms(RIVALS_MUON),
    overrides=(*RIVALS, *MUON, '--config.data.validation=0.1'),
    like='vit',
    operations='match',
    space=RIVALS_MUON_SPACE,
  ),
  # Every model, with mean pooling, because some models have no class token. It takes two hours on two cores.
  'rivals': Comparison(
    configs=('configs/cifar10.py:recipe=small',),
    arms=(
      'vit',
      'hyperbf',
      'unified',
      'gated',
      'gmlp',
      'amlp',
      'mixer',
      'linear',
      'linear-gaussian: linear model.stage1.features=gaussian',
      'pooling',
      'identity',
      'vit-gelu: vit model.stage2.activation=gelu',
      'vit-swiglu: vit model.stage2.activation=swiglu',
      'vit-unit: vit model.stage1.qk_norm=True',
      'softmax+hyperbf',
      'hyperbf+mlp',
      'hyperbf-heads: hyperbf model.stage2.heads=4',
      'hyperbf-nested: hyperbf model.stage2.nested=True',
      f'vit-places: vit {RELATIVE_POSITIONS}',
      *_arms({label: model for label, model in LEADERS.items() if label != 'gmlp'}),
    ),
    seeds=(0, 1),
    overrides=RIVALS,
  ),
}
