"""Tests of the checks that a config passes before anything is written."""

import json
import pathlib
import runpy

import ml_collections
import pytest

from dgr2_jax.training import validation
from tests.models import huggingface_files

_CONFIGS = pathlib.Path(__file__).parents[2] / 'configs'


def _config(path=_CONFIGS / 'quickstart.py', *variant):
  config = runpy.run_path(str(path))['get_config'](*variant)
  if config.data.source != 'embedded':
    config.data.path = 'somewhere'
  return config


def _check(**changes):
  config = _config()
  config.recipe = validation.RECIPE[1:]  # without mid_train
  config.update_from_flattened_dict(
      {k.replace('__', '.'): v for k, v in changes.items()})
  validation.check(config)


@pytest.mark.parametrize('path, variant', [
    *((path, ()) for path in sorted(_CONFIGS.glob('*.py'))),
    *((_CONFIGS / 'quickstart.py', (variant,)) for variant in (
        'short', 'smoke', 'full', 'full,smoke', 'smoke,generative')),
    (_CONFIGS / 'beauty_small.py', ('sasrec',)),
    *((_CONFIGS / f'beauty_qwen3_{size}.py', ('published',))
      for size in ('0_6b', '8b'))], ids=str)
def test_configs_pass(path, variant, tmp_path):
  config = _config(path, *variant)
  if config.model.get('huggingface'):
    checkpoint = json.loads(
        huggingface_files.GOLDEN.read_text())['qwen3_untied']['config']
    (tmp_path / 'config.json').write_text(json.dumps(checkpoint))
    config.model.huggingface = str(tmp_path)
  validation.check(config)


@pytest.mark.parametrize('field, value, expected', [
    ('boosted__seed', -1, 'at least 0 and at most'),
    ('data__num_candidates', 1, 'at least 2'),
    ('data__max_train_requests', -1, 'at least 0'),
    ('data__retriever__backward', -.1, 'at least 0'),
    ('data__retriever__kind', 'oracle', 'one of cooccurrence, file, sasrec'),
    ('semantic_ids__svd_dim', 0, 'at least 1'),
    ('prompt__pad_multiple', 0, 'at least 1'),
    ('tokenizer__pad_vocab_to', -64, 'at least 1'),
    ('model__width', -8, 'at least 1'),
    ('model__dtype', 'float99', 'one of float32'),
    ('canvas__block_size', 0, 'at least 1'),
    ('ar_sft__steps', 0, 'at least 1'),
    ('ar_sft__batch_size', 0, 'at least 1'),
    ('cft__learning_rate', float('inf'), 'a number above 0'),
    ('cft__schedule', 'linear', 'one of cosine, constant'),
    ('cft__best_metric', 'ndcg@7', 'one of recall@1'),
    ('rl__best_metric', 'overflow_rate', 'one of recall@1'),
    ('opd__rollout__refill', 2, 'expected 1; every group'),
    ('rl__rollout__top_k', 1, 'at least 2, or 0; nothing is learned'),
    ('rl__reward__invalid', .5, 'at most 0'),
    ('rl__clip_low', 1.5, 'from 0 to 1'),
    ('rl__reward__overlong_buffer', 999, 'expected at most'),
    ('cft__b2', 1., 'below 1'),
    ('cft__eval_threshold', 1.5, 'above 0 and at most 1'),
    ('opd__eval_threshold', 0., 'above 0 and at most 1'),
    ('evaluate__thresholds', (.9, 0.), 'one or more different numbers'),
    ('rl__rollout__top_p', 0., 'above 0 and at most 1'),
    ('evaluate__thresholds', (), 'one or more different numbers'),
    ('evaluate__thresholds', (.9, 1.5), 'one or more different numbers'),
    ('evaluate__thresholds', (.9, .9), 'one or more different numbers'),
    ('evaluate__thresholds', ('a',), 'one or more different numbers'),
    ('evaluate__timing_requests', 0, 'at least 1'),
    ('evaluate__verify__steps', 0, 'at least 1'),
    ('evaluate__verify__window', 'left', 'one of pivot, grid'),
    ('evaluate__verify__threshold', 0., 'above 0 and at most 1'),
])
def test_bad_values_name_the_field(field, value, expected):
  name = field.replace('__', '.')
  with pytest.raises(ValueError, match=f'config.{name} is .*{expected}'):
    _check(**{field: value})


@pytest.mark.parametrize('field, value, message', [
    ('steps', 0, 'rqvae.steps is 0: expected a whole number of at least 1'),
    ('latent', 2.5, 'rqvae.latent is 2.5: expected a whole number'),
    ('hidden', (64, 0), r'rqvae.hidden is \(64, 0\): expected one or more'),
    ('decay', 1., 'rqvae.decay is 1.0: expected a number from 0 to below 1'),
    ('diversity_weight', 'x', 'rqvae.diversity_weight is .x.: expected'),
    ('init', 'zeros', 'rqvae.init is .zeros.: expected one of'),
    ('depth', 3, 'rqvae.depth is no field'),
    ('embeddings', dict(kind='npy'), 'embeddings.path is'),
    ('embeddings', dict(kind='bert'), 'embeddings.kind is .bert.'),
    ('embeddings', dict(url='x'), 'embeddings has a field too many'),
])
def test_rqvae_fields(field, value, message):
  config = _config()
  config.semantic_ids.rqvae = {}
  validation.check(config)  # all fields have defaults
  config.semantic_ids.rqvae = {field: value}
  with pytest.raises(ValueError, match=message):
    validation.check(config)


@pytest.mark.parametrize('field, value, message', [
    ('max_length', 1, 'mid_train.max_length is 1: expected a whole number'),
    ('held_out', 1., 'mid_train.held_out is 1.0: expected a number above 0'),
    ('held_out', 0., 'mid_train.held_out is 0.0: expected a number above 0'),
    ('text', None, 'mid_train.text is None: expected a path'),
    ('text', '', 'mid_train: text is empty'),
    ('weights', dict(persona=-1.), 'mid_train.weights.persona is -1.0'),
    ('weights', dict(persona=0.), 'mid_train: weights are all 0'),
    ('weights', dict(recall=1.), 'mid_train: weights.recall is no task'),
    ('weights', 3, 'mid_train: '),
    ('best_metric', 'ndcg@3', 'mid_train.best_metric is .*expected one of log'),
    ('eval_threshold', .5, 'mid_train.eval_threshold is no field'),
])
def test_fields_of_mid_training(field, value, message):
  config = _config(_CONFIGS / 'quickstart.py', 'full')
  with config.unlocked():
    if field in config.mid_train:
      del config.mid_train[field]  # its type may change
    config.mid_train[field] = value
  with pytest.raises(ValueError, match=f'config.{message}'):
    validation.check(config)
  with config.unlocked():
    del config.mid_train[field]
  if field != 'eval_threshold':
    with pytest.raises(ValueError, match=f'mid_train.{field} is missing'):
      validation.check(config)


@pytest.mark.parametrize('changes, message', [
    (dict(prompt__response_format='json'), 'evaluate.constrained_ar'),
    (dict(prompt__answer_order='target'), 'prompt.trace.grades'),
    (dict(canvas__clean_stream='block_causal', opd__teacher='ar'),
     'cft.ar_weight is 0.5'),
    (dict(data__source='directory'), 'data.path is empty'),
    (dict(canvas__block_size=7), 'canvas.block_size=7 does not divide the'),
    (dict(model__head_dim=15), 'head_dim=15'),
    (dict(model__num_kv_heads=3), 'num_kv_heads=3'),
    (dict(canvas__alignment='left'), 'alignment='),
    (dict(recipe=('ar_sft', 'cft', 'convert')), 'config.recipe is'),
    (dict(recipe=('ar_sft', 'convert')), 'config.recipe is'),
    (dict(recipe=('ar_sft', 'convert', 'cft', 'sft')), 'config.recipe is'),
    (dict(opd__teacher='self', canvas__clean_stream='block_causal',
          cft__ar_weight=0.), 'config.opd.teacher'),
    (dict(rl__rollout__num_rollouts=1), 'rl.rollout.num_rollouts is 1'),
    (dict(ar_rl__rollout__temperature=0.), 'ar_rl.rollout.temperature is 0'),
    (dict(model__canvas_chunk=4), 'config.model.canvas_chunk is 4'),
    (dict(opd__teacher='rl'), 'config.opd.teacher is'),
    (dict(prompt__response_format='json', prompt__answer_order='target',
          evaluate__constrained_ar=False), 'prompt.trace.grades'),
    (dict(opd__divergence='both'), 'config.opd: divergence='),
    (dict(opd__divergence='none', opd__elsewhere='none'), 'elsewhere=.none.'),
    (dict(opd__divergence='none', opd__ar_weight=.5), 'ar_weight=0.5'),
    *((change, 'opd.rollout.num_rollouts is 4.*equal') for change in (
        dict(opd__rollout__temperature=0.), dict(opd__rollout__top_k=1))),
    *((dict.fromkeys((f'{stage}__reasoning_weight', f'{stage}__answer_weight'),
                     0.), f'config.{stage}: reasoning_weight and answer_weight')
      for stage in ('cft', 'opd')),
    (dict(rl__rollout__canvases='two'), 'rl.rollout.canvases is .* all, one'),
    (dict(rl__rollout__canvases='one'), "rl.rollout.canvases is 'one'"),
    (dict(rl__rollout__updates=3), 'rl.steps is .*rollout.updates=3'),
    (dict(ar_rl__reward__condition='none'), 'config.ar_rl.reward: .*condition'),
])
def test_fields_that_contradict_each_other(changes, message):
  with pytest.raises(ValueError, match=message):
    _check(**changes)


def test_wrong_types_and_names_of_a_forked_config():
  config = ml_collections.ConfigDict(dict(cft=dict(steps='10')))
  with pytest.raises(ValueError, match="config.cft.steps is '10'"):
    validation.check(config)
  config = _config()
  with config.unlocked():
    config.model.widht = 8
  with pytest.raises(ValueError, match='config.model .*widht'):
    validation.check(config)
  config = _config()
  with config.unlocked():
    config.recipe = validation.RECIPE[1:]  # without mid_train
    config.rl.clip_hihg = .3
  with pytest.raises(ValueError, match='config.rl.clip_hihg is no field .*'
                     'clip_high'):
    validation.check(config)
  config = _config()
  with config.unlocked():
    del config.prompt.evidence
  with pytest.raises(ValueError, match='config.prompt .*evidence'):
    validation.check(config)


@pytest.mark.parametrize('section, field', [
    ('cft', 'steps'), ('rl', 'batch_size'), ('opd', 'teacher'),
    ('rl', 'reward'), ('opd.rollout', 'canvases')])
def test_missing_fields_of_a_stage(section, field):
  config = _config()
  config.recipe = validation.RECIPE[1:]  # without mid_train
  with config.unlocked():
    part = config
    for name in section.split('.'):
      part = part[name]
    del part[field]
  with pytest.raises(ValueError, match=f'config.{section}.{field} is missing'):
    validation.check(config)


def test_a_section_that_is_none():
  config = _config()
  with config.unlocked():
    del config.cft
    config.cft = 3
  with pytest.raises(ValueError, match='config.cft is missing, or no section'):
    validation.check(config)


def test_absent_sections_are_not_checked():
  validation.check(ml_collections.ConfigDict(dict(seed=0)))


def test_optional_fields_of_a_stage():
  config = _config()
  config.opd.teacher_dtype = 'bfloat16'
  del config.rl.kl_weight
  for name in ('cft', 'opd', 'rl'):
    config[name].accumulate = 4
    config[name].optimizer = dict(
        mu_dtype='bfloat16', lora=dict(matrices=('query|value',), rank=8))
  validation.check(config)


@pytest.mark.parametrize('stage, fields, message', [
    ('cft', dict(accumulate=3), r'cft\.accumulate is 3: .*cft\.batch_size=16'),
    ('cft', dict(accumulate=0), r'cft\.accumulate is 0: .*at least 1'),
    ('cft', dict(teacher_dtype='bfloat16'), r'cft\.teacher_dtype is no field'),
    ('opd', dict(teacher_dtype='int8'), r'opd\.teacher_dtype is .int8.'),
    ('rl', dict(optimizer=dict(kind='sgd')), r"rl.*kind='sgd'"),
    ('rl', dict(optimizer=dict(rank=3)), 'rl.optimizer.*rank'),
    ('rl', dict(optimizer=dict(lora=dict(matrices=('w',)))), "rl.*'w', which")])
def test_optional_fields_that_are_wrong(stage, fields, message):
  config = _config()
  config.recipe = validation.RECIPE[1:]  # without mid_train
  for name, value in fields.items():
    config[stage][name] = value
  with pytest.raises(ValueError, match=message):
    validation.check(config)


def test_profile_steps():
  config = _config()
  for steps in ((), (5, 5), (5, 7)):
    config.profile_steps = steps
    validation.check(config)
  for steps in ((7, 5), (0, 2), (3,), 3):
    with config.unlocked():
      del config.profile_steps
      config.profile_steps = steps
    with pytest.raises(ValueError, match='profile_steps'):
      validation.check(config)
