# %% [markdown]
# # The recipe on the embedded catalogue
#
# From purchases to a re-ranker that writes many tokens a forward: every stage
# of `configs/quickstart.py`, shortened (`:short`) to some three minutes on two
# idle CPU cores, and the report that ends it. The embedded catalogue is made up,
# needs no download, and its best possible ranking is known.

# %%
import json
import pathlib
import runpy
import textwrap

import matplotlib.pyplot as plt
import numpy as np

import dgr2_jax
from dgr2_jax.data import traces
from dgr2_jax.evaluation import examples, report, tables
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import stages, workdir

ROOT = pathlib.Path(dgr2_jax.__file__).parents[1]
WORKDIR = pathlib.Path('/tmp/dgr2_recipe')
get_config = runpy.run_path(ROOT / 'configs' / 'quickstart.py')['get_config']

config = get_config('short')
for line in workdir.differences(
    workdir.to_json(get_config()), workdir.to_json(config)):
  print(line.replace('there', 'in the quickstart').replace('now', 'here'))


def run(stage):
  """As `python -m dgr2_jax.main --stage=STAGE`; a complete stage is kept."""
  with workdir.open_workdir(WORKDIR, config) as directory:
    stages.run(config, directory, stage)


# %% [markdown]
# ## prepare: requests, prompts and responses
#
# A request is a shopper's purchases and the ten items that a retriever thinks
# come next. The prompt names categories, brands and facts that are counted in
# the training data, such as how often two items were bought together. The
# response first reasons, with a grade for every candidate, and then gives an
# order behind `<|answer|>`. A boosted ranker on the same facts graded what the
# model is taught.

# %%
run('prepare')
experiment = experiment_lib.Experiment(config, WORKDIR)
data = experiment.data
request = data.requests('train')[0]
target = request.candidates.tolist().index(request.target)
for what, indices in (('bought', request.history),
                      ('candidate', request.candidates)):
  for number, item in enumerate(data.describe(indices), 1):
    mark = examples.TARGET_MARK * (what == 'candidate' and number == target + 1)
    print(f'{what:9} {number:2} ', ' | '.join(examples.describe(item)), mark)
batch = experiment.eval_batches('train', 1, 1)[0]  # the same request
for what in ('prompt', 'response'):
  ids, length = np.ravel(batch[what]), int(np.ravel(batch[f'{what}_length'])[0])
  print(f'\nA {what} of {length} tokens:')
  print(data.tokenizer.decode(ids[:length].tolist()))

# %% [markdown]
# ## Training
#
# | stage | what it does |
# |---|---|
# | `ar_sft` | an autoregressive (AR) re-ranker, the teacher, learns responses |
# | `convert` | the same weights, with a mask token |
# | `cft` | conversion fine-tuning: they learn to fill in masked blocks |
# | `opd` | on-policy distillation: its own AR stream scores the student's responses |
# | `rl` | the student is rewarded for its own responses |
#
# Each stage starts from the weights of the one before. An on-policy stage keeps
# those it began with unless later ones validate better. (The quickstart also
# has `ar_rl`, reinforcement learning of the teacher.) Below, what validations
# saw: on-policy stages are validated on sampled responses.

# %%
for stage in config.recipe:
  run(stage)
metrics = report.read_metrics(WORKDIR / 'metrics.jsonl')
print('stage    step  Recall@1  valid  reward  tokens a forward')
for m in metrics:
  if 'validation/reward' in m:
    print(f'{m["stage"]:8} {m["step"]:4} {m["validation/recall@1"]:9.3f} '
          f'{m["validation/valid_rate"]:6.3f} {m["validation/reward"]:7.3f} '
          f'{m["validation/tokens_per_forward"]:17.2f}')

# %%
fig, panels = plt.subplots(1, 2, figsize=(9, 3), layout='constrained')
for panel, names, key, label in (
    (panels[0], ('ar_sft', 'cft'), 'train/loss', 'loss, nats a token'),
    (panels[1], ('opd', 'rl'), 'validation/reward',
     'reward in validation')):
  for name in names:
    points = [(m['step'], m[key]) for m in metrics
              if m['stage'] == name and key in m]
    if points:
      panel.plot(*zip(*points), marker='.', label=name)
  panel.set(xlabel='step of the stage', ylabel=label)
  panel.legend()
plt.show()

# %% [markdown]
# ## evaluate: the report
#
# All weights answer the test requests whose target is among the ten. `pre_rank`
# is the retriever's order, `gbdt` the boosted ranker, `naive` the teacher's
# weights decoded in blocks without further training. A response that is not
# exactly one permutation is invalid and leaves the retriever's order. The same
# tables, figures and worked examples are in `report.html`.
#
# `ar` has had 400 steps, a third of the quickstart's, and its reasoning has not
# come true yet; the student, which trained on from its weights, passes it by far.
# Shares of `ar`'s gain say little then.

# %%
run('evaluate')
content = json.loads((WORKDIR / 'report.json').read_text(encoding='utf-8'))

# %%
rows, dataset = content['rows'], content['dataset']
value = np.array([row['recall@1'] for row in rows])
low, high = np.array([row['interval']['recall@1'] for row in rows]).T
plt.figure(figsize=(7, 3))
plt.bar([row['name'] for row in rows], value,
        yerr=[value - low, high - value], capsize=4, color='#7cb5f2')
plt.axhline(dataset['oracle']['recall@1'], color='k', linestyle=':',
            label='oracle, who knows how shoppers are drawn')
plt.ylabel('Recall@1, 95 % interval')
plt.ylim(0, 1)
plt.legend(loc='upper left')
plt.show()

# %% [markdown]
# ## Speed against quality
#
# The last weights can be decoded in several ways. AR writes a token a forward.
# With a threshold tau, a forward commits every token that is at least so
# probable: the lower tau, the fewer forwards, and the more often tokens that
# were written side by side do not fit together. *verify* drafts a block and
# keeps what the AR mode of the same weights agrees with. Read quality together
# with the share of valid responses.

# %%
fig, panels = plt.subplots(1, 2, figsize=(9, 3.2), layout='constrained')
for panel, key, label in ((panels[0], 'recall@1', 'Recall@1'),
                          (panels[1], 'valid_rate', 'valid responses')):
  ar, = (p for p in content['frontier'] if p['mode'] == 'ar')
  for point in content['frontier']:
    line, = panel.plot(point['tokens_per_forward'], point[key], 'o')
    if key in (point['ci'] or ()):
      panel.vlines(point['tokens_per_forward'],
                   *(ar[key] + np.array(point['ci'][key])),
                   color=line.get_color())
    panel.annotate(tables.mode_name(point),
                   (point['tokens_per_forward'], point[key]),
                   xytext=(5, 5), textcoords='offset points')
  panel.set(xlabel='response tokens a forward', ylabel=label)
  panel.margins(.2)
plt.show()

# %% [markdown]
# ## One example

# %%
example = content['examples'][0]
print(examples.heading(0, example))
print(examples.verdict(example))
print(tables.as_text(examples.orders(example)))
words = traces.readable(
    [token['text'] for token in example['tokens']
     if not token['is_answer']][:-1],  # without <|answer|>
    data.template.config.trace, len(request.candidates))
print(textwrap.fill(words or example['trace'], 80))

# %% [markdown]
# Next: `look_inside.ipynb` goes on from this model and shows which tokens are
# committed when, and what goes wrong. `your_data.ipynb` trains on your files.
# `make quickstart` runs the whole recipe; experiments/quickstart/ has what it
# gave.
