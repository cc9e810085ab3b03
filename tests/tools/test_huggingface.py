"""From a Hugging Face directory to a recipe's weights, and back."""

import dataclasses
import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from configs import quickstart
from dgr2_jax.data import prepare
from dgr2_jax.data import tokenizer as tokenizer_lib
from dgr2_jax.data import tokens
from dgr2_jax.decoding import block_decoder
from dgr2_jax.decoding import commit
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import huggingface
from dgr2_jax.models import huggingface_weights
from dgr2_jax.models import transformer
from dgr2_jax.tools import huggingface as huggingface_tool
from dgr2_jax.training import checkpoints as checkpoints_lib
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import losses
from dgr2_jax.training import stages
from dgr2_jax.training import validation
from dgr2_jax.training import workdir as workdir_lib
from tests.models import huggingface_files as files
from tests.models import test_huggingface

ROOT = pathlib.Path(__file__).parents[2]
ROWS = 320  # more than the tokenizer's ids, as in Qwen3


def add_tokenizer(directory):
  text = tokenizers.Tokenizer(tokenizers.models.BPE())
  text.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
      add_prefix_space=False)
  text.decoder = tokenizers.decoders.ByteLevel()
  text.train_from_iterator(
      ['gentle shampoo', 'gentle soap'] * 5, tokenizers.trainers.BpeTrainer(
          vocab_size=280, show_progress=False,
          initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
  text.add_special_tokens([tokens.PAD, tokens.EOS])
  text.save(str(directory / 'tokenizer.json'))


@pytest.fixture(scope='module')
def pretrained(tmp_path_factory):
  """A Qwen3 checkpoint with a tokenizer of fewer ids than rows."""
  golden = test_huggingface.GOLDEN['qwen3_untied']
  shapes = golden['tensors'] | {
      name: [ROWS, 24] for name in ('model.embed_tokens.weight',
                                    'lm_head.weight')}
  directory = files.write(
      tmp_path_factory.mktemp('pretrained'),
      golden['config'] | dict(vocab_size=ROWS), files.weights(shapes))
  add_tokenizer(directory)
  return directory


def get_config(pretrained, variant='smoke'):
  config = quickstart.get_config(variant)
  config.model = dict(huggingface=str(pretrained), remat='full')
  config.tokenizer.update(kind='huggingface', path=str(pretrained))
  return config


@pytest.fixture(scope='module')
def experiment(pretrained, tmp_path_factory):
  """A prepared run that starts from the checkpoint."""
  config = get_config(pretrained)
  validation.check(config)
  workdir = tmp_path_factory.mktemp('workdir')
  (workdir / 'config.json').write_text(
      json.dumps(workdir_lib.to_json(config)))
  prepare.prepare(config, workdir / 'data')
  return experiment_lib.Experiment(config, workdir)


def test_recipe_starts_with_the_checkpoint(experiment, pretrained):
  tokenizer, config = experiment.data.tokenizer, experiment.model.config
  first = tokenizer.mask_id
  assert first < ROWS and config.vocab_size == tokenizer.vocab_size
  assert (config.width, config.remat) == (24, 'full')
  params = experiment.initial_params()
  stored = huggingface.read_config(pretrained)
  before = huggingface_weights.load(
      pretrained, stored, test_huggingface.shardings(stored))
  test_huggingface.assert_equal(params['layers'], before['layers'])
  prompt = np.random.default_rng(0).integers(0, first, (2, 16))
  want, got = (test_huggingface.logits(c, p, prompt)
               for c, p in ((stored, before), (config, params)))
  np.testing.assert_allclose(got[..., :first], want[..., :first], atol=1e-6)
  # The checkpoint's spare rows were never trained: the new tokens start afresh.
  assert (params['embedding'][first] != before['embedding'][first]).all()


def test_mid_training_starts_with_the_checkpoint(pretrained, tmp_path):
  """The first stage of a recipe that has both; `ar_sft` goes on from it."""
  config = get_config(pretrained, 'full,smoke,cooccurrence')
  config.model.update(unroll_layers=False)  # as in beauty_qwen3_8b.py
  config.data.embedded.update(num_users=120, num_items=60)
  config.data.max_train_requests = 32
  config.semantic_ids.rqvae.steps = 2
  config.boosted.iterations = 2
  config.mid_train.update(
      steps=4, eval_every=2, eval_requests=8, batch_size=4, log_every=1,
      max_length=64, text=str(ROOT / 'LICENSE'), learning_rate=1e-2)
  validation.check(config)
  for stage in ('prepare', 'mid_train'):
    stages.run(config, tmp_path, stage)
  experiment = experiment_lib.Experiment(config, tmp_path)
  assert experiment.before('ar_sft') == 'mid_train'
  before, after = experiment.initial_params(), experiment.restore('mid_train')
  known = huggingface_weights.load(
      pretrained, huggingface.read_config(pretrained),
      test_huggingface.shardings(huggingface.read_config(pretrained)))
  test_huggingface.assert_equal(before['layers'], known['layers'])
  assert jax.tree.map(jnp.shape, before) == jax.tree.map(jnp.shape, after)
  assert (before['embedding'] != after['embedding']).any()
  losses = [line['train/loss'] for line in map(
      json.loads, (tmp_path / 'metrics.jsonl').read_text().splitlines())
            if 'train/loss' in line]
  assert losses[-1] < losses[0]


def test_config_errors(experiment, pretrained, tmp_path, monkeypatch):
  config = get_config(pretrained)
  config.tokenizer.kind = 'bpe'
  with pytest.raises(ValueError, match="tokenizer.kind is 'bpe': expected"):
    validation.check(config)
  config = get_config(test_huggingface.checkpoint(tmp_path, 'qwen3_untied'))
  other = experiment_lib.Experiment(config, experiment.workdir)
  with pytest.raises(ValueError, match='a token of id 2.., .* only 40 rows'):
    other.initial_params()
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ValueError, match='needs the package safetensors'):
    validation.check(get_config(pretrained))


@pytest.fixture(scope='module')
def exported(experiment, tmp_path_factory):
  """The export of a stage that was complete without any training."""
  params = experiment.initial_params()
  best = checkpoints_lib.Best(0, 0.)
  checkpoints = checkpoints_lib.Checkpoints(
      experiment.workdir / 'checkpoints' / 'cft', keep=1)
  checkpoints.save(0, {}, params, best)
  checkpoints.mark_complete(0, best)
  output = tmp_path_factory.mktemp('exported') / 'out'
  huggingface_tool.main([f'--workdir={experiment.workdir}', '--stage=cft',
                         f'--output={output}'])
  return output, params


def test_export_holds_the_stage(experiment, exported):
  directory, params = exported
  config, again = test_huggingface.load(directory)
  assert config == dataclasses.replace(experiment.model.config, remat='none')
  test_huggingface.assert_equal(again, params)
  content = json.loads((directory / 'config.json').read_text())
  tokenizer = experiment.data.tokenizer
  assert content['block_diffusion'] == dict(
      block_size=12, clean_stream='token_causal', alignment='shifted',
      mask_token_id=tokenizer.mask_id)
  # The exported tokenizer has every token with its id, and so a start from the
  # export adds none.
  again = tokenizer_lib.from_huggingface(
      directory, [tokens.PAD, tokens.EOS, tokens.HISTORY], 64)
  assert again.new_ids == [] and again.vocab_size == tokenizer.vocab_size
  pieces = [tokens.Special(tokens.HISTORY), tokens.Text('gentle shampoo')]
  assert again.encode(pieces) == tokenizer.encode(pieces)
  np.testing.assert_array_equal(again.banned, tokenizer.banned)


@test_huggingface.live
def test_transformers_decodes_the_same(experiment, exported):
  import torch
  import transformers

  directory, params = exported
  tokenizer = experiment.data.tokenizer
  theirs = transformers.AutoTokenizer.from_pretrained(directory)
  assert theirs.encode(tokens.HISTORY + 'gentle soap') == tokenizer.encode(
      [tokens.Special(tokens.HISTORY), tokens.Text('gentle soap')])
  prompt = experiment.eval_batches('test', 1)[0]
  ids = prompt['prompt'][:, :prompt['prompt_length'][0]]
  model = transformers.AutoModelForCausalLM.from_pretrained(directory)
  want = model.generate(torch.tensor(ids), max_new_tokens=24, do_sample=False)
  rollout = block_decoder.decode(
      transformer.Transformer(experiment.model.config), params,
      jnp.asarray(ids), jnp.asarray(prompt['prompt_length']),
      jnp.asarray(prompt['example_id']), jax.random.key(0),
      commit.Threshold(1.),
      vocabulary=experiment.vocabulary, canvas=canvas_lib.AUTOREGRESSIVE,
      config=block_decoder.DecodeConfig(
          max_response=24, max_denoising_steps=24))
  want = want[0, ids.shape[1]:].tolist()
  assert np.asarray(rollout.tokens)[0, 0, :len(want)].tolist() == want


def test_export_errors_are_one_line(experiment, tmp_path):
  with pytest.raises(SystemExit, match='error: .*holds no complete stage'):
    huggingface_tool.main([f'--workdir={experiment.workdir}', '--stage=opd',
                           f'--output={tmp_path / "out"}'])
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('stage', ['mid_train', 'ar_sft', 'ar_rl'])
def test_what_comes_before_the_conversion_decodes_token_by_token(stage):
  assert losses.canvas_of(None, stage).block_size == 1
