# %% [markdown]
# # Block diffusion on one page
#
# A small transformer learns to sort twelve digits: once token by token, once
# block by block, with the same weights. Every function here is the one that the
# recipe uses. It takes a few minutes on two CPU cores.

# %%
import tempfile

from IPython.display import Image
import jax
import jax.numpy as jnp
from matplotlib import animation
import matplotlib.pyplot as plt
import numpy as np
import optax

from dgr2_jax.decoding import block_decoder, commit, verification
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.models import transformer, vocabulary
from dgr2_jax.objectives import denoising

STEPS = 600
P, L, B = 12, 16, 8  # tokens of a prompt, a response and a block
EOS, MASK = 10, 11
VOCABULARY = vocabulary.Vocabulary(
    size=16, mask_id=MASK, eos_id=EOS, banned=tuple(range(MASK, 16)))
rng = np.random.default_rng(0)


def batch_of(n):
  """n prompts of random digits, and the digits in order as responses."""
  prompt = rng.integers(0, 10, (n, P), np.int32)
  response = np.full((n, 1, L), EOS, np.int32)
  response[:, 0, :P] = np.sort(prompt)
  return dict(
      prompt=prompt, prompt_length=np.full(n, P), response=response,
      response_length=np.full((n, 1), P + 1), is_answer=response < 0,
      supervised_from=np.zeros((n, 1), int), example_id=np.arange(n))


def text(tokens):
  return ' '.join({EOS: '$', MASK: '·'}.get(t, str(t)) for t in tokens)


one = batch_of(1)
print('prompt  ', text(one['prompt'][0].tolist()))
print('response', text(one['response'][0, 0].tolist()))
print('$ ends a response and fills its last block')

# %% [markdown]
# ## Noise
#
# A response is cut into blocks. Every block is shown twice, under two masks
# that share its tokens out, so that each token is predicted once. A block's
# first token, its seed, is in neither: decoding knows it from the block before.

# %%
BLOCKS = canvas_lib.CanvasConfig(block_size=B)
LOSS = denoising.DenoisingConfig(reasoning_weight=1., ar_weight=1.)
noised = denoising.noised_canvas(one, jax.random.key(1), BLOCKS, LOSS)
for start, masked in zip(noised.start[0, 0].tolist(), noised.masked[0, 0]):
  shown = np.where(masked, MASK, one['response'][0, 0, start:start + B])
  print(f'tokens {start:2} to {start + B - 1:2}:  {text(shown.tolist())}')

# %% [markdown]
# ## Who sees whom
#
# Prompt, clean response and noised blocks lie on one canvas and are read in one
# forward. The picture is measured, not drawn: one token is changed at a time,
# and a cell is dark where the state that predicts the token of its row changed.
# On the clean stream a token depends on those before it, as in any language
# model. In a block it depends on the blocks before and on what its own block
# shows.

# %%
MODEL = transformer.Transformer(transformer.ModelConfig(
    vocab_size=VOCABULARY.size, num_layers=2, width=64, num_heads=4,
    num_kv_heads=4, head_dim=16, mlp_dim=128, rope_theta=100.))
params = transformer.init(MODEL.config, jax.random.key(0))


@jax.jit
def states_of(prompt, clean):
  """What predicts every clean token, and every token of the noised blocks."""
  s = canvas_lib.states(MODEL, params, noised.replace(
      prompt=prompt, clean=clean), MASK, BLOCKS)
  return jnp.concatenate([s.clean[0, 0], s.noisy[0, 0].reshape(4 * B, -1)])


before = states_of(one['prompt'], one['response'])
changed = []
for name, size in (('prompt', P), ('response', L)):
  for i in range(size):
    other = {k: one[k].copy() for k in ('prompt', 'response')}
    other[name][..., i] = (other[name][..., i] + 1) % 10
    after = states_of(other['prompt'], other['response'])
    changed.append(jnp.abs(after - before).max(1) > 1e-6)
plt.figure(figsize=(5, 7))
plt.imshow(np.array(changed).T, cmap='Greys', vmax=1.4, aspect='auto')
plt.xlabel('changed token: prompt | response')
plt.ylabel('noised blocks, two masks each | clean response')
plt.axvline(P - .5, color='tab:red')
for row in range(L, L + 4 * B, B):
  plt.axhline(row - .5, color='tab:red' if row == L else 'tab:orange')
plt.show()

# %% [markdown]
# ## Training
#
# The loss is the mean cross-entropy of masked tokens, plus that of the clean
# stream, which keeps an autoregressive model alive in the same weights.

# %%
optimizer = optax.adam(
    optax.warmup_cosine_decay_schedule(0., 3e-3, 50, max(STEPS, 51)))


@jax.jit
def update(params, state, batch, key):
  def loss(params):
    mean, _ = denoising.loss(
        MODEL, params, batch, key, BLOCKS, LOSS, VOCABULARY)
    return mean.value

  value, grads = jax.value_and_grad(loss)(params)
  updates, state = optimizer.update(grads, state)
  return optax.apply_updates(params, updates), state, value


state, losses = optimizer.init(params), []
for step in range(STEPS):
  params, state, value = update(
      params, state, batch_of(64), jax.random.key(step))
  losses.append(float(value))
  if (step + 1) % 200 == 0:
    print(f'step {step + 1}: loss {losses[-1]:.3f}')
plt.figure(figsize=(5, 2.5))
plt.plot(losses)
plt.xlabel('step')
plt.ylabel('cross-entropy, nats')
plt.show()

# %% [markdown]
# ## Decoding
#
# A block begins as its seed and masks. Each forward commits every token that is
# at least tau probable; when the block stands, one more forward keeps its keys
# and gives the next seed. Below, one request's response after each forward.

# %%
test = batch_of(256)


def decode(tau, blocks=BLOCKS, draft=None):
  arguments = (MODEL, params, test['prompt'], test['prompt_length'],
               test['example_id'], jax.random.key(0))
  options = dict(vocabulary=VOCABULARY, canvas=blocks,
                 config=block_decoder.DecodeConfig(max_response=L))
  if draft:
    return verification.decode(*arguments, draft=draft, **options)
  return block_decoder.decode(*arguments, commit.Threshold(tau), **options)


rollout = decode(.9)
tokens, call = rollout.tokens[0, 0], rollout.call[0, 0]
print('prompt    ', text(test['prompt'][0].tolist()))
for forward in range(int(rollout.calls[0, 0])):
  print(f'forward {forward:2}', text(
      np.where(call <= forward, tokens, MASK).tolist()))

# %% [markdown]
# Eight requests at once, as they are decoded: masks are grey, what the latest
# forward wrote is orange.

# %%
shown = rollout.call[:8, 0]
figure, axes = plt.subplots(figsize=(6, 3), layout='constrained')
axes.set(xlabel='position in the response', ylabel='request')
picture = axes.imshow(np.zeros((8, L)), 'Set2_r', vmin=0, vmax=7, aspect='auto')
digits = [[axes.text(x, y, '', ha='center', va='center') for x in range(L)]
          for y in range(8)]


def draw(forward):
  state = np.select([shown < forward, shown == forward], [7, 6])
  picture.set_data(state)
  axes.set_title(f'forward {forward}')
  for row, tokens, here in zip(digits, rollout.tokens[:8, 0], state):
    for digit, token, colour in zip(row, tokens.tolist(), here):
      digit.set_text(text([token]) if colour else '')


with tempfile.NamedTemporaryFile(suffix='.png') as file:
  animation.FuncAnimation(figure, draw, int(rollout.calls[:8].max())).save(
      file.name, animation.PillowWriter(fps=2), dpi=60)
  frames = file.read()
plt.close(figure)
Image(frames)

# %% [markdown]
# When tokens are committed, over many requests: in a row, those of one colour
# were written by the same forward.

# %%
plt.figure(figsize=(6, 3.5))
plt.imshow(np.minimum(rollout.call[:40, 0], rollout.calls[:40]), aspect='auto')
plt.colorbar(label='forward that committed the token')
plt.xlabel('position in the response')
plt.ylabel('request')
plt.show()

# %% [markdown]
# ## What it gives
#
# Tokens per forward against exact answers. Block size 1 is the autoregressive
# decoder. *Verified* drafts a block and accepts what the autoregressive stream
# of the same weights agrees with: its result, in fewer forwards.

# %%
autoregressive = decode(1., canvas_lib.AUTOREGRESSIVE)
results = {'autoregressive': autoregressive}
results |= {f'blocks, tau {tau}': decode(tau) for tau in (1., .9, .6, .3)}
results['verified'] = decode(1., draft=verification.DraftConfig(
    steps=1, window='pivot', threshold=.9))
print('                  exact   tokens a forward   as autoregressive')
for name, r in results.items():
  exact = (r.tokens[:, 0, :P] == test['response'][:, 0, :P]).all(-1).mean()
  same = (r.tokens[:, 0, :P] == autoregressive.tokens[:, 0, :P]).all(-1).mean()
  speed = (r.length / r.calls).mean()
  print(f'{name:17} {exact:6.3f} {speed:12.2f} {same:18.3f}')

# %% [markdown]
# Next: `configs/quickstart.py` is the recipe that turns a trained
# autoregressive re-ranker into such a model, and docs/architecture.md the way
# through the code.
